"""How many files an extension touches: each is made for real, in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
EXTENSIONS = {"method": (METHOD, METHOD_CHECK), "model option": (OPTION, OPTION_CHECK)}


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
            place, line = edit
            text = path.read_text()
            assert text.count(place) == 1
            path.write_text(text.replace(place, line + place))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, "-c", check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
