"""Models with constant rotations compute what the model computes."""

from __future__ import annotations

import pytest
import torch
from helpers import COMMUTING, relative_error

from comrope import METHODS
from comrope.models import POSITIONS, create_model
from comrope.models.export import Exportable, exponential


@pytest.mark.parametrize(
    "options",
    [
        *({"position": position} for position in POSITIONS),
        *({"position": method, "channel_order": "half"} for method in METHODS),
        {"position": "comrope-ld", "class_position": "unrotated", "block_size": 2},
        {"position": "liere", "class_position": "unrotated", "block_size": 4},
        {"position": "comrope-torus", "rotate_values": True},
        {"position": "liere", "rotate_values": True, "channel_order": "half"},
        {"position": "liere", "axis_scale": (30.0, 2.0)},
    ],
)
def test_constant_angles_change_nothing(options):
    """In float64, to rounding: only the series of an exponential, as LieRE's, is cut off."""
    model = create_model("vit_nano_patch8_32", num_classes=10, depth=2, **options).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    constant, x = Exportable(model), torch.randn(2, 3, 24, 40, dtype=torch.float64)
    expected = model(x).detach()
    assert relative_error(constant(x), expected) < (
        1e-12 if options["position"] in (*COMMUTING, "ape", "none") else 1e-8
    )
    assert not any(parameter.requires_grad for parameter in constant.parameters())
    angles = [name for name, _ in constant.named_parameters() if ".rope." in name]
    assert all(name.endswith("method.frequencies") for name in angles)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert relative_error(constant(x), expected) < 1e-7  # it is a copy


@pytest.mark.parametrize("norm", [0.0, 0.5, 3.0, 60.0])
def test_an_exponential_of_plain_products(norm):
    matrices = torch.randn(7, 8, 8, dtype=torch.float64)
    matrices = matrices - matrices.mT
    matrices = norm * matrices / torch.linalg.matrix_norm(matrices, ord=2, keepdim=True)
    for dtype, tolerance in ((torch.float64, 2e-9 * max(norm, 1)), (torch.float32, 3e-5)):
        got = exponential(matrices.to(dtype), 6).double()
        torch.testing.assert_close(got, matrices.matrix_exp(), rtol=0, atol=tolerance)
