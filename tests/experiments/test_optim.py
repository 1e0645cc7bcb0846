"""What the optimizer is told of angles and bases, and where a training step says patches are."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.runs import tiny

from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.tasks.base import objective_of
from comrope.experiments.training.evaluate import build_model
from comrope.experiments.training.optim import parameter_groups


def said_of(config) -> dict[str, tuple[float, float]]:
    """Rate and decay of every parameter of the first block's rotation."""
    model = build_model(config)
    told = {
        id(p): (group["lr_scale"], group["weight_decay"])
        for group in parameter_groups(config, model)
        for p in group["params"]
    }
    method = model.blocks[0].attn.rope.method
    return {name: told[id(p)] for name, p in method.named_parameters()}


def test_a_basis_has_a_rate_of_its_own():
    settings = {
        "optim__angle_lr_scale": 4.0,
        "optim__basis_lr_scale": 0.5,
        "optim__angle_weight_decay": 0.3,
    }
    torus = said_of(tiny(model__position="comrope-torus", **settings))
    assert torus == {"P": (2.0, 0.3), "frequencies": (4.0, 0.3)}
    line = said_of(tiny(model__position="comrope-ld", **settings))
    assert line == {"P": (4.0, 0.3), "theta": (4.0, 0.3)}  # its P are the angles
    assert set(said_of(tiny(model__position="comrope-torus")).values()) == {(1.0, 0.0)}


@pytest.mark.parametrize("sigma", [0.0, 1.0])
@pytest.mark.parametrize("per", ["sample", "batch"])
def test_coordinates_are_rescaled_about_the_centre(sigma, per):
    config = tiny(train__perturbation=sigma, train__perturbation_per=per, train__rescale=3.0)
    accelerator = create_accelerator("cpu")
    run = SimpleNamespace(bare=SimpleNamespace(train_grid=(6, 6)), step=2)
    place = objective_of(config, accelerator).positions(run)
    plain = objective_of(config.with_overrides({"train.rescale": 1.0}), accelerator).positions(run)
    assert place.shape == ((config.train.batch_size, 36, 2) if per == "sample" else (36, 2))
    factor = ((place - 0.5) / (plain - 0.5))[..., :1, :1]  # of the corner, far from the centre
    torch.testing.assert_close(place, 0.5 + factor * (plain - 0.5), rtol=0, atol=1e-5)
    assert (factor.log() / math.log(3)).abs().max() < 1 + 1e-3
    assert (factor - 1).abs().max() > 0.01
    run.step = 3
    assert not torch.equal(objective_of(config, accelerator).positions(run), place)
