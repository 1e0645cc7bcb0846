"""Old names work for one release and name their successor."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from helpers import make

import comrope
from comrope import angles


def warns(*names: str):
    return pytest.warns(DeprecationWarning, match=".*".join(names))


def test_functions():
    pixels = torch.tensor([[112.0, 56.0], [0.0, 224.0]])
    with warns("relative", "normalize"):
        old = comrope.relative(pixels, (224, 112))
    torch.testing.assert_close(old, comrope.normalize(pixels, (224, 112)))


def test_rescale():
    positions, generator = comrope.grid((3, 5)), torch.Generator().manual_seed(0)
    with warns("rescale", "center"):
        many = comrope.rescale(positions, 2.0, batch_size=500, generator=generator)
    factors = (many - 0.5)[..., :1, :1] / (positions - 0.5)[0, 0]
    torch.testing.assert_close(many, 0.5 + factors * (positions - 0.5))
    logs = factors.log2()
    assert logs.abs().max() <= 1 + 1e-5
    assert logs.std() == pytest.approx(1 / 3**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("old", "new"),
    [("Torus", "CommutingAngles"), ("Line", "CollinearAngles"), ("Free", "GeneralAngles")],
)
def test_forms_of_angles(old, new):
    with warns(old, new):
        assert getattr(angles, old) is getattr(angles, new)


def test_methods_of_an_embedding():
    rope = make("comrope-torus", head_dim=16)
    x, positions = torch.randn(1, 2, 6, 16, dtype=torch.float64), torch.rand(6, 2)
    with warns("unrotate", r"rotate\(..., inverse=True\)"):
        old = rope.unrotate(x, positions)
    torch.testing.assert_close(old, rope.rotate(x, positions, inverse=True))
    weight = torch.eye(32, dtype=torch.float64)
    with warns("unrotate_before", "inverse=True"):
        vector, instead = rope.unrotate_before(x, positions, weight)
    torch.testing.assert_close(
        vector.transpose(1, 2).flatten(2) @ instead.mT, old.transpose(1, 2).flatten(2)
    )
    with warns("packed", "rotate_qkv"):
        old = rope.packed(x.transpose(1, 2).repeat(1, 1, 3, 1), positions, in_place=True)
    torch.testing.assert_close(old[0], rope.rotate(x, positions))
    with warns("chosen_backend", "select_backend"):
        assert rope.chosen_backend(x, x, positions).backend == "spectral"


def test_the_old_module_of_training(monkeypatch):
    monkeypatch.delitem(sys.modules, "comrope.experiments.train", raising=False)
    with warns("experiments.train", "experiments.training.train"):
        old = importlib.import_module("comrope.experiments.train")
    from comrope.experiments.training.train import train

    assert old.train is train
