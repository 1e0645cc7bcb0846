"""How many files an extension touches: each is made for real, in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.outside import TASK as RECALL

import comrope

HERE, PACKAGE = Path(__file__).parent, Path(comrope.__file__).parent
MOST_FILES = 2

METHOD = {
    "methods/rope_polar.py": '''"""Polar RoPE: directions and the logs of frequencies."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CommutingAngles
from comrope.inits import PlaneInit
from comrope.methods.base import Method


class RoPEPolar(Method):
    """Parameters: ``alpha`` and ``rho`` (H, m, f), w = exp(rho) (cos(alpha), sin(alpha))."""

    name = "rope-polar"
    label = "polar RoPE"
    head_axis: ClassVar = {"alpha": 0, "rho": 0}
    only_axes = 2
    starts_at_zero = False  # no rho gives the frequency 0
    alpha: nn.Parameter
    rho: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        planes = (self.num_heads, self.num_blocks, self.num_planes)
        return {"alpha": planes, "rho": planes}

    def init_normal(self, std: float) -> None:
        self._set_frequencies(self.rho.new_empty(2, *self.rho.shape).normal_(std=std * 2**0.5))

    def init_planes(self, init: PlaneInit) -> None:
        planes = init.planes(self.shape, self.rho)
        self._set_frequencies(planes.direction * planes.speed)

    def angles_of(self, alpha: Tensor, rho: Tensor) -> CommutingAngles:
        alpha, speed = to_compute_dtype(alpha), to_compute_dtype(rho).exp()
        frequencies = speed * torch.stack((alpha.cos(), alpha.sin()))
        return CommutingAngles(None, frequencies, self.block_size)

    def _set_frequencies(self, frequencies: Tensor) -> None:
        first, second = frequencies
        self.alpha.copy_(torch.atan2(second, first))
        self.rho.copy_(torch.hypot(first, second).log())
''',
    "methods/__init__.py": (
        '    "rope": "rope:RoPE",\n',
        '    "rope-polar": "rope_polar:RoPEPolar",\n',
    ),
}
METHOD_CHECK = """
from pathlib import Path
import comrope
from comrope.experiments import launch
from comrope.experiments.config import load_recipe
from comrope.experiments.studies import PRESETS, STUDIES
from comrope.experiments.studies.plan import Request
from comrope.experiments.studies.reproduce import reproduce

assert comrope.methods.label("rope-polar") == "polar RoPE"
assert load_recipe("digits_rope-polar_p1").model.position == "rope-polar"
for name, study in STUDIES.items():  # the published ones do not change
    rows = Request(study, PRESETS["demo"]).plan(Path("runs"), gather=True).rows
    assert "rope-polar" not in {row.method for row in rows}, name

launch.slots = lambda *_: [launch.Slot(None, 1)]  # in this process
tiny = ["model.name=vit_nano_patch4_12", "train.epochs=1", "train.batch_size=720",
        "evaluate.resolutions=12,24", "train.device=cpu"]
methods = ("rope", "rope-polar")
found = reproduce("classification", out=Path("out"), methods=methods, seeds=1, overrides=tiny,
                  progress=False)
assert [row["method"] for row in found["rows"]] == ["rope", "rope-polar"], found["rows"]
assert len(list(Path("out").glob("classification*/figure.png"))) == 1
assert "| polar RoPE |" in next(Path("out").glob("classification*/table.md")).read_text()
"""
INIT = {
    "inits.py": [
        (
            "CLASSES: dict[str",
            '''@dataclass(frozen=True)
class EvenFan(PlaneInit):
    """Directions that are spread evenly over half a turn of two axes."""

    name: ClassVar[str] = "even-fan"
    mixes_axes: ClassVar[bool] = True

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if shape.num_axes != 2:
            raise ValueError(f"num_axes: init {self.name!r} needs 2, got {shape.num_axes}")

    def planes(self, shape: Shape, like: Tensor) -> PlaneFrequencies:
        count = shape.num_blocks * shape.num_planes
        steps = torch.arange(count, device=like.device, dtype=torch.float64) / count
        turns = torch.pi * torch.arange(shape.num_blocks, device=like.device) / shape.num_blocks
        scale = constants_like(self.scale_of_axes(2), steps)[:, None]
        direction = scale * torch.stack((turns.cos(), turns.sin()))
        speed = (self.base**-steps).view(shape.num_planes, shape.num_blocks).T
        return PlaneFrequencies(direction[:, None, :, None], speed[None], float(scale.max()))


''',
        ),
        ("Normal, Zeros, RoPE,", "EvenFan, "),
        ('    "Init",\n', '    "EvenFan",\n'),
    ]
}
INIT_CHECK = """
import comrope
from comrope.experiments.config import load_recipe
from comrope.experiments.tasks import task_of

rope = comrope.RotaryEmbedding("comrope-ld", num_heads=2, head_dim=32, init="even-fan")
assert rope.method.init == comrope.inits.EvenFan()
config = load_recipe("digits").with_overrides(["model.init=even-fan", "model.base=100"])
(method, *_) = (block.attn.rope.method for block in task_of(config).build_model().blocks)
assert method.init == comrope.inits.EvenFan(100.0, (6, 6))
"""
RECIPE = {
    "experiments/config/recipes/digits_slow.yaml": """# digits with a lower learning rate.
base: digits
optim: {lr: 0.0001}
"""
}
RECIPE_CHECK = """
from comrope.experiments.config import load_recipe, recipe_names, run_id

assert "digits_slow" in recipe_names()
assert load_recipe("digits_slow") == load_recipe("digits").with_overrides(["optim.lr=0.0001"])
assert run_id(load_recipe("digits_slow_rope_p1")) != run_id(load_recipe("digits_rope_p1"))
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
            "import comparison, language, language_search, tuning, values",
            "import doubled; from comrope.experiments.studies.fair ",
        ),
        ("comparison, tuning, values, language, language_search)\n", "doubled, "),
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
    "initialization": (INIT, INIT_CHECK),
    "recipe": (RECIPE, RECIPE_CHECK),
    "model option": (OPTION, OPTION_CHECK),
    "task": (TASK, TASK_CHECK),
    "study": (STUDY, STUDY_CHECK),
    "host model": (HOST, HOST_CHECK),
}


# The tests that every method, initialization or recipe has, by the words of pytest's -k.
TESTS = {
    "method": ("rope-polar", "methods", "test_properties.py", "test_rotary.py", "test_inits.py"),
    "initialization": ("even-fan", "test_inits.py"),
    "recipe": ("every_recipe", "experiments/config/test_recipes.py"),
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
    run(tmp_path, "-c", check)
    if kind in TESTS:
        word, *files = TESTS[kind]
        passed = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow",
                     "-k", word, *(str(HERE / file) for file in files))  # fmt: skip
        assert re.search(r"\b[1-9]\d* passed", passed), passed


def run(folder: Path, *arguments: str) -> str:
    """Run Python with the copy of the package in a folder, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
