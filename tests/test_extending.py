"""How many files an extension touches: each is made for real, in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.outside import TASK as RECALL

import comrope

PACKAGE = Path(comrope.__file__).parent
MOST_FILES = 2

METHOD = {
    "methods/halved.py": '''"""RoPE-Mixed at half of its learned frequencies."""

from __future__ import annotations

from torch import Tensor

from comrope.angles import CommutingAngles
from comrope.methods.rope_mixed import RoPEMixed


class Halved(RoPEMixed):
    name = "halved"

    def angles_of(self, frequencies: Tensor) -> CommutingAngles:
        return super().angles_of(0.5 * frequencies)
''',
    "methods/__init__.py": ('    "rope": "rope:RoPE",\n', '    "halved": "halved:Halved",\n'),
}
METHOD_CHECK = """
import torch, comrope
from comrope.experiments.config import load_recipe
from comrope.experiments.tasks import task_of

rope = comrope.RotaryEmbedding("halved", num_heads=2, head_dim=8, block_size=4)
q = torch.randn(1, 2, 9, 8)
rotated, _ = rope(q, q, comrope.grid((3, 3)))
assert not torch.equal(rotated, q)
assert comrope.analysis.commutator_norms(rope).max() < 1e-5
config = load_recipe("digits").with_overrides(["model.position=halved"])
task_of(config).build_model()
"""
OPTION = {
    "models/vit.py": ("        layer_scale: float | None = None,\n", "        wiggle: int = 0,\n"),
    "experiments/config/schema.py": (
        "    ape: bool = option(",
        '    wiggle: int = option(0, minimum=0, help="An option of a test.")\n',
    ),
}
OPTION_CHECK = """
from comrope.experiments.config import load_recipe, run_id
from comrope.experiments.tasks import task_of
from comrope.models import create_model

plain = load_recipe("digits")
config = plain.with_overrides(["model.wiggle=3"])
model = task_of(config).build_model()
assert model.arguments()["wiggle"] == 3, model.arguments()
assert run_id(config) != run_id(plain)
"""
TASK = {
    "experiments/tasks/recall.py": RECALL,
    "experiments/tasks/__init__.py": (
        '    "images": "comrope.experiments.tasks.images:ImageTask",\n',
        '    "recall": "comrope.experiments.tasks.recall:Recall",\n',
    ),
}
TASK_CHECK = """
import pathlib, tempfile
from comrope.experiments.config import load_recipe
from comrope.experiments.training.train import train

fields = {"task": "recall", "model.position": "comrope-ld", "data.workers": 0, "train.epochs": 1,
          "train.batch_size": 100, "train.device": "cpu", "train.perturbation": 0.0}
config = load_recipe("digits").with_overrides(fields)
result = train(config, pathlib.Path(tempfile.mkdtemp(), "run"), progress=False)
assert result["recalled"]["all"] > 0, result
"""
FAIR = "comrope.experiments.studies.fair"
STUDY = {
    "experiments/studies/fair/doubled.py": '''"""Does vanilla RoPE gain from twice the base?"""

from __future__ import annotations

from matplotlib.figure import Figure

from comrope.experiments.studies.study import Row, Study
from comrope.experiments.studies.tables import accuracy_by_resolution

STUDY = Study(
    name="doubled",
    title="Vanilla RoPE with twice the base",
    rows=lambda preset: [Row("rope"), Row("rope", fields=(("model.base", 200.0),), label="200")],
    table=accuracy_by_resolution,
    figure=lambda results: Figure(),
)
''',
    "experiments/studies/__init__.py": [
        (
            "import comparison, tuning, values",
            "import doubled; from comrope.experiments.studies.fair ",
        ),
        ("comparison, tuning, values)\n", "doubled, "),
    ],
}
STUDY_CHECK = """
import contextlib, io
from pathlib import Path
from comrope.experiments.cli import app
from comrope.experiments.studies import PRESETS, find_study
from comrope.experiments.studies.plan import Request

plan = Request(find_study("doubled"), PRESETS["demo"]).plan(Path("out"))
assert [len(configs) for configs in plan.rows.values()] == [3, 3], plan
with contextlib.redirect_stdout(io.StringIO()) as printed:
    app(["reproduce"], standalone_mode=False)
assert "doubled" in printed.getvalue()
"""
HOST = {"integrations/hf_rotary.py": ('    "llama", "mistral",', '    "olmo2",\n')}
HOST_CHECK = """
import torch, transformers, comrope
from comrope.analysis import rotary_modules

config = transformers.Olmo2Config(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50,
    num_key_value_heads=2, pad_token_id=0,
)
model = transformers.Olmo2ForCausalLM(config).eval()
with torch.no_grad():
    before = model(torch.arange(3, 13)[None]).logits
    comrope.swap(model, "comrope-torus")
    after = model(torch.arange(3, 13)[None]).logits
assert len(rotary_modules(model)) == 2
torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
"""
EXTENSIONS = {
    "method": (METHOD, METHOD_CHECK),
    "model option": (OPTION, OPTION_CHECK),
    "task": (TASK, TASK_CHECK),
    "study": (STUDY, STUDY_CHECK),
    "host model": (HOST, HOST_CHECK),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXTENSIONS)
def test_an_extension_touches_at_most_two_files(kind, tmp_path):
    edits, check = EXTENSIONS[kind]
    assert len(edits) <= MOST_FILES
    copy = tmp_path / "src" / "comrope"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, edit in edits.items():
        path = copy / name
        if isinstance(edit, str):
            assert not path.exists()
            path.write_text(edit)
        else:
            text = path.read_text()
            for place, addition in edit if isinstance(edit, list) else [edit]:
                assert text.count(place) == 1
                text = text.replace(place, addition + place)
            path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, "-c", check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
