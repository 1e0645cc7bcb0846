"""``import comrope`` is light, and its lazy names are ordinary names."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import comrope

HEAVY = (
    "torch", "numpy", "timm", "transformers", "triton", "matplotlib", "torchvision", "sklearn",
    "accelerate", "rich", "typer", "tensorboard", "safetensors",
)  # fmt: skip

PUBLIC = {
    "METHODS", "RotaryEmbedding", "analysis", "create_gpt", "create_model", "fold", "grid", "inits",
    "normalize", "parameter_groups", "perturb", "shift", "swap", "unswap", "with_class_token",
}  # fmt: skip


def run(code: str) -> str:
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return out.stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "import comrope; comrope.METHODS, comrope.__version__, dir(comrope)",
        "from comrope.methods import METHODS",
    ],
)
def test_import_loads_no_torch(code):
    assert run(f"import sys; {code}; print([m for m in {HEAVY!r} if m in sys.modules])") == "[]"


def test_help_loads_no_torch():
    pytest.importorskip("typer")
    code = (
        "import runpy, sys\n"
        "sys.argv = ['comrope', '--help']\n"
        "try:\n    runpy.run_module('comrope', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print('torch' in sys.modules)"
    )
    assert run(code).endswith("False")


def test_the_first_use_loads_what_it_needs_and_no_more():
    heavier = tuple(name for name in HEAVY if name not in ("torch", "numpy"))
    code = "import sys, comrope; comrope.RotaryEmbedding; comrope.grid((2, 2))"
    assert run(f"{code}; print([m for m in {heavier!r} if m in sys.modules])") == "[]"


def test_a_timm_that_was_imported_before_finds_our_models():
    pytest.importorskip("timm")
    code = "import timm, comrope; print(timm.list_models('comrope_vit_base_patch16_224'))"
    assert run(code) == "['comrope_vit_base_patch16_224']"


def test_public_names_can_be_listed_and_used():
    pytest.importorskip("timm")
    assert set(comrope.__all__) >= PUBLIC
    for name in comrope.__all__:
        assert getattr(comrope, name) is getattr(comrope, name)
        assert name in dir(comrope)
    with pytest.raises(AttributeError, match="has no attribute 'rotary_embedding'"):
        comrope.rotary_embedding  # noqa: B018


def test_embeddings_can_be_pickled_and_copied():
    rope = comrope.RotaryEmbedding("comrope-ld", num_heads=2, head_dim=16)
    for other in (pickle.loads(pickle.dumps(rope)), copy.deepcopy(rope)):
        assert type(other) is comrope.RotaryEmbedding
        assert torch.equal(other.angle_matrices(), rope.angle_matrices())
