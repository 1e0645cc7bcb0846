"""The package ``elsewhere``: a kind of data, a recipe and a study that comrope does not know.

The task is recall: a sequence of symbols has one mark, and the answer is the symbol a number of
places before it. Without positions that is a guess.
"""

from __future__ import annotations

CHANCE = 100 / 8  # percent

TASK = '''
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from comrope import RotaryEmbedding
from comrope.experiments.common.distributed import sum_over_processes
from comrope.experiments.common.errors import UserError
from comrope.experiments.data.batches import IGNORED
from comrope.experiments.tasks.base import NO_PROBE, Splits, Task

SYMBOLS, LENGTH = 8, 12
MARK = SYMBOLS


def sequences(count, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SYMBOLS, (count, LENGTH), generator=generator)
    place = torch.randint(offset, LENGTH, (count, 1), generator=generator)
    answers = tokens.gather(1, place - offset).squeeze(1)
    return TensorDataset(tokens.scatter(1, place, MARK), answers)


class ByKey(Dataset):
    def __init__(self, source):
        self.source = source

    def __getitem__(self, key):
        tokens, answer = self.source[key.sample]
        return tokens, torch.tensor(IGNORED) if key.place < 0 else answer


class Model(nn.Module):
    """One attention layer; the answer is read where the mark is."""

    def __init__(self, config, width=32, heads=2):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS + 1, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, SYMBOLS)
        self.heads, self.rope = heads, None
        if config.model.position != "none":
            self.rope = RotaryEmbedding(
                config.model.position, num_heads=heads, head_dim=width // heads, num_axes=1,
                block_size=config.model.block_size, init="rope", base=100,
            )

    def forward(self, tokens):
        x = self.qkv(self.embedding(tokens)).unflatten(-1, (3, self.heads, -1))
        q, k, v = x.permute(2, 0, 3, 1, 4)
        if self.rope is not None:
            q, k = self.rope(q, k, torch.arange(tokens.shape[1]).float()[:, None])
        x = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x[tokens == MARK])


class Recall(Task):
    name, headline, samples = "recall", "recalled", "sequences"

    def check(self):
        self.offset = self.config.options.get("offset", 1)
        if not 0 < self.offset < LENGTH:
            raise UserError(f"options.offset: expected 1 to {LENGTH - 1}, got {self.offset}")

    def open(self, *, train=True):
        first = sequences(2000, self.offset, seed=1) if train else None
        return Splits(first, sequences(450, self.offset, seed=2))

    def dataset(self, source, view):
        return ByKey(source)

    def create_model(self):
        return Model(self.config)

    def loss(self, model, batch, step):
        return nn.functional.cross_entropy(model(batch.inputs), batch.targets)

    @torch.inference_mode()
    def evaluate(self, model, validation, view, accelerator, *, probe=NO_PROBE, advance=id):
        right = seen = 0
        for batch in validation.batches(view):
            right += (model(batch.inputs).argmax(-1) == batch.targets).sum()
            seen += (batch.targets != IGNORED).sum()
            advance(len(batch.targets))
        right, seen = sum_over_processes(accelerator, right, seen)
        return {"recalled": 100 * right / seen, "sequences": seen, "unreadable": 0}
'''
RECIPE = """
task: elsewhere.task:Recall
options: {offset: 3}
model: {position: comrope-ld}
data: {name: sequences, workers: 0}
optim: {lr: 0.02}
train: {epochs: 6, batch_size: 50, perturbation: 0, device: cpu}
evaluate: {every: 2, batch_size: 100}
"""
STUDY = """
from pathlib import Path

from matplotlib.figure import Figure

from comrope.experiments.studies.study import Row, Scale, Study
from comrope.experiments.studies.tables import format_mean, markdown_table, row_name

RECIPE = str(Path(__file__).with_name("recall.yaml"))


def table(results):
    lines = [[row_name(row), format_mean(row["recalled"]["all"])] for row in results["rows"]]
    return markdown_table(["method", "recalled, %"], lines)


def figure(results):
    drawing = Figure()
    drawing.subplots().bar(*zip(*(
        (row_name(row), row["recalled"]["all"]["mean"]) for row in results["rows"]
    )))
    return drawing


STUDY = Study(
    name="recall",
    title="Recall by relative position",
    scales={"demo": Scale(RECIPE, "made-up sequences")},
    seeds=lambda preset: 1,
    rows=lambda preset: [Row("none", 0.0), Row("comrope-ld", 0.0)],
    table=table,
    figure=figure,
)
"""
