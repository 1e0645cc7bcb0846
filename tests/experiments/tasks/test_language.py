"""Language modelling: what is scored, and in which context."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from helpers import raises_for
from support.runs import Memory, same, stop_after, trainer_of, weights
from support.text import make_texts, make_tokenizer, spoken
from torch import nn

from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.runs.directory import read_result
from comrope.experiments.tasks import task_of
from comrope.experiments.tasks.base import Probe, Step
from comrope.experiments.tasks.language import LanguageTask, TextView
from comrope.experiments.tasks.token_scores import position_edges
from comrope.experiments.training.evaluate import evaluate_run, load_run
from comrope.experiments.training.train import train
from comrope.models import GPT

pytestmark = pytest.mark.usefixtures("one_thread")
STEP = Step(0, 0, 0, torch.device("cpu"))


def evaluated(task, model, view, **share) -> dict:
    validation = task.validation(task.open(train=False).validation, **share)
    return task.evaluate(model, validation, view, create_accelerator("cpu"))


# Configuration


def test_the_recipe_has_the_settings_of_the_first_trial():
    config = load_recipe("language")
    assert isinstance(task_of(config), LanguageTask)
    assert config.train.batch_size * 600 == config.language.epoch_sequences
    assert (config.model.name, config.language.context) == ("gpt_nano", 256)
    rope = task_of(config).build_model().blocks[0].attn.rope
    assert rope.method.init.base == 10_000
    assert config.optim.angle_lr_scale == 10
    assert task_of(config).lower_is_better


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train.perturbation", 1.0),
        ("model.name", "vit_nano_patch4_12"),
        ("model.name", "gpt_huge"),
        ("model.ape", True),
        ("model.locality_bias", 1.0),
        ("model.tubelet", 2),
        ("augment.hflip", 0.0),
        ("augment.mixup", 0.5),
        ("data.cache", True),
        ("data.unreadable", "skip"),
        ("data.frames", 2),
        ("data.holdout", 1.0),
        ("evaluate.spans", (0.5,)),
        ("language.lengths", ()),
        ("language.lengths", (1.0, 0.0)),
        ("language.lora_rank", 4),
    ],
)
def test_fields_without_a_meaning_are_refused(field, value):
    named = "data.frames" if field in ("model.tubelet", "evaluate.spans") else field
    with raises_for(named, UserError):
        task_of(spoken().with_overrides({field: value})).build_model()


@pytest.mark.parametrize(
    ("field", "value"), [("model.position", "ape"), ("model.block_size", 7), ("model.init", "none")]
)
def test_models_that_cannot_be_built_are_refused(field, value):
    with raises_for("model", UserError):
        task_of(spoken().with_overrides({field: value})).build_model()


def test_fields_reach_the_gpt_by_their_names():
    config = spoken(model__block_size=4, model__rotate_values=True, model__base=500.0)
    model = task_of(config).build_model()
    rope = model.blocks[0].attn.rope
    assert (rope.block_size, model.blocks[0].attn.rotate_values) == (4, True)
    assert (model.vocab_size, model.context) == (257, 16)
    assert rope.method.init.base == 500
    plain = task_of(spoken(model__position="none")).build_model()
    assert task_of(config).position_parameters(plain) == 0


def test_views_are_context_lengths():
    task = task_of(spoken(language__lengths=(0.5, 1.0, 1.3)))
    assert task.views() == {"8": TextView(8), "16": TextView(16), "21": TextView(21)}
    assert task.views([5, 9]) == {"5": TextView(5), "9": TextView(9)}
    assert task.training_view == TextView(16)
    task.check_view(nn.Identity(), TextView(21))
    for wrong, named in (([22], "resolutions"), ([0], "language.lengths")):
        with raises_for(named, UserError):
            for view in task.views(wrong).values():
                task.check_view(nn.Identity(), view)
    with raises_for("offsets", UserError):
        task.check_probe(nn.Identity(), Probe(1.0))


def test_layers_by_the_names_of_parameters():
    task = task_of(spoken())
    model = task.build_model()
    found = {name: task.layer_of(name) for name, _ in model.named_parameters()}
    assert {layer for layer in found.values() if layer is not None} == set(range(5))
    assert found["embed.weight"] == 0
    assert found["norm.weight"] is None
    for name, layer in {
        "model.model.embed_tokens.weight": 0,
        "model.model.layers.3.mlp.up_proj.weight": 4,
        "model.base_model.model.transformer.h.0.attn.q.lora_A.default.weight": 1,
        "model.lm_head.weight": None,
    }.items():
        assert task.layer_of(name) == layer


def test_coordinates_are_indices_of_tokens():
    place = task_of(spoken()).coordinates(nn.Identity())
    assert place.positions.flatten().tolist() == list(range(16))
    assert (place.scale.tolist(), place.width.tolist(), place.unit) == ([1], [16], "token")


# Evaluation


class Counting(nn.Module):
    """Predicts the next token by its own rule, and counts what it has seen."""

    def __init__(self, sizes: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(sizes, sizes))
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, tokens):
        self.shapes.append(tuple(tokens.shape))
        return self.table[tokens]


def test_bits_are_those_of_the_text_in_every_view_and_batch():
    """A model without context: all views have the bits of a plain loop over the text."""
    torch.manual_seed(0)
    model = Counting(257).double()
    corpus = task_of(spoken()).open(train=False).validation.corpus
    text = torch.from_numpy(corpus.read(0, len(corpus)))
    logits = model.table.detach()[text[:-1]]
    nats = nn.functional.cross_entropy(logits, text[1:], reduction="sum")
    expected = float(nats) / math.log(2) / corpus.bytes
    for lengths, batch in (((1.0, 2.0), 8), ((0.5, 1.0, 3.3, 8.0), 1), ((1.0, 7.0), 1000)):
        task = task_of(spoken(language__lengths=lengths, evaluate__batch_size=batch))
        for view in task.views().values():
            found = evaluated(task, model, view)
            assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-6)
            assert found["perplexity"] == pytest.approx(
                math.exp(float(nats) / (len(corpus) - 1)), rel=1e-6
            )
            assert {length for _, length in model.shapes} == {view.length}
            model.shapes.clear()


def test_the_first_byte_and_every_end_are_scored():
    """The documents of a text are coded completely: from an end token, to an end token."""
    corpus = task_of(spoken()).open(train=False).validation.corpus
    assert corpus.read(0, 1)[0] == 256
    assert corpus.read(len(corpus) - 1, 1)[0] == 256
    assert len(corpus) == corpus.bytes + corpus.documents + 1
    assert corpus.bytes == 3000


def test_bits_by_position_are_means_of_their_bins():
    class ByPosition(nn.Module):
        """Every token is as likely as 2 to the power of its position, of 257."""

        def forward(self, tokens):
            bits = torch.arange(tokens.shape[1]) % 8
            own = torch.zeros(*tokens.shape, 257, dtype=torch.float64)
            following = tokens.roll(-1, 1)  # the target, but of the last token of a window
            others = math.log(256) - torch.log(2.0 ** bits.double() - 1 + 1e-12)
            return own.scatter(2, following[..., None], others.expand_as(tokens)[..., None])

    task = task_of(spoken(language__lengths=(2.0,)))
    found = evaluated(task, ByPosition(), TextView(32))["bits_by_position"]
    edges = position_edges(32)
    assert edges[:9] == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert edges[-1] == 32
    for first, last, bits in zip(edges, edges[1:], found, strict=False):
        if last < 32:  # a window does not contain its last target
            expected = sum(place % 8 for place in range(first, last)) / (last - first)
            assert bits == pytest.approx(expected, abs=0.02)


def test_a_token_sees_only_those_before_it():
    task = task_of(spoken())
    model = task.build_model().eval()
    tokens = torch.randint(257, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] += 1
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_the_loss_of_a_model_that_knows_nothing():
    task = task_of(spoken())
    source = task.open().train
    batch = next(iter(task.training_loader(source, task.training_batches(len(source)))))
    assert batch.inputs.shape == batch.targets.shape == (8, 16)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    loss = task.loss(task.build_model(), batch, STEP)
    assert loss.item() == pytest.approx(math.log(257), abs=1)


def test_outputs_that_are_not_finite_are_refused():
    task = task_of(spoken())
    model = task.build_model()
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="length 16"):
        evaluated(task, model, TextView(16))


# Runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(spoken(), folder, progress=False)
    return folder


def test_a_run_leaves_bits_and_facts_about_the_text(finished):
    result = read_result(finished)
    assert set(result["bits_per_byte"]) == {"16", "32"} == set(result["figures"])
    assert 3 < result["bits_per_byte"]["16"] < 8
    assert result["steps"] == 12
    about = result["corpus"]
    assert result["machine"]["python"] in about["train"]["title"]
    assert about["validation"]["bytes"] == 3000
    assert len(about["train"]["digest"]) == 64
    assert result["position_parameters"] == 4160
    assert result["sequences_per_second"] > 0
    assert all(
        len(found["bits_by_position"]) == len(position_edges(int(view))) - 1
        for view, found in result["figures"].items()
    )


def test_it_learns(tmp_path):
    config = spoken(train__epochs=8, optim__lr=4e-3)
    before = evaluated(task := task_of(config), task.build_model(), TextView(16))
    after = train(config, tmp_path / "run", progress=False)
    assert after["bits_per_byte"]["16"] < before["bits_per_byte"] - 2


def test_stopped_and_resumed_it_ends_with_the_same_weights(tmp_path):
    config = spoken(train__ema=0.9, train__accumulate=2)
    train(config, tmp_path / "whole", progress=False)
    stop_after(7, config, tmp_path / "parts")  # in the second epoch, in the same pass
    train(config, tmp_path / "parts", progress=False)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert (
        read_result(tmp_path / "parts")["bits_per_byte"]
        == (read_result(tmp_path / "whole")["bits_per_byte"])
    )


def test_more_lengths_are_added_to_existing_ones(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    before = read_result(run)
    after = train(spoken(language__lengths=(1.0, 2.0, 0.5, 4.0)), run, progress=False)
    assert set(after["bits_per_byte"]) == {"8", "16", "32", "64"} == set(after["figures"])
    for view, value in before["bits_per_byte"].items():
        assert after["bits_per_byte"][view] == value


def test_an_evaluation_gives_the_result_of_training(finished):
    entries = {entry["view"]: entry for entry in evaluate_run(finished, progress=False)}
    result = read_result(finished)
    assert {v: e["bits_per_byte"] for v, e in entries.items()} == result["bits_per_byte"]
    (entry,) = evaluate_run(finished, resolutions=[20], progress=False)
    assert (entry["view"], entry["length"]) == ("20", 20)
    for field, value in (
        ("language.context", 8), ("language.tokenizer", "other"), ("data.holdout", 0.5),
        ("model.block_size", 4), ("language.validation_bytes", 10),
    ):  # fmt: skip
        named = "language.lengths" if "validation" in field else field.partition(".block")[0]
        with raises_for(named, UserError):
            evaluate_run(finished, overrides={field: value}, progress=False)


def test_texts_between_epochs_and_other_texts(tmp_path):
    config = spoken(evaluate__every=1)
    trainer = trainer_of(config, sink := Memory())
    trainer.fit()
    trainer.close()
    (bits,) = sink.values("evaluation", "bits_per_byte")
    assert 3 < bits < 8
    assert sink.values("evaluation", "perplexity")
    root = make_texts(tmp_path / "texts", files=3)
    fields = {"data__name": "text", "data__root": str(root), "data__workers": 1}
    result = train(spoken(**fields, train__epochs=1), tmp_path / "run", progress=False)
    assert result["corpus"]["train"]["documents"] == 2


def test_a_run_starts_from_another_with_the_same_tokenizer(finished, tmp_path):
    config = spoken(train__start_from=str(finished), language__context=32)
    task = task_of(config)
    model = task.build_model()
    assert task.initialize(model).new == []
    assert same(model.state_dict(), load_run(finished)[1].state_dict())
    pytest.importorskip("transformers")
    other = str(make_tokenizer(tmp_path / "tokenizer"))
    task = task_of(config.with_overrides({"language.tokenizer": other}))
    with raises_for("language.tokenizer", UserError):
        task.initialize(task.build_model())


def test_tokens_of_a_tokenizer(tmp_path):
    pytest.importorskip("transformers")
    name = str(make_tokenizer(tmp_path / "tokenizer"))
    result = train(spoken(language__tokenizer=name), tmp_path / "run", progress=False)
    assert result["corpus"]["validation"]["bytes"] == 3000
    assert result["corpus"]["validation"]["tokens"] < 3000
    assert isinstance(load_run(tmp_path / "run")[1], GPT)
