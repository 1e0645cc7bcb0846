"""A plain ViT as a backbone: attention in windows, at positions in the whole image."""

from __future__ import annotations

import pytest
import torch
from helpers import COMMUTING, FROM_ZERO, raises_for, relative_error
from support.backbones import in_windows, small, tokenless
from torch import nn

import comrope
from comrope.analysis import rotary_modules
from comrope.models import POSITIONS, ViT
from comrope.models.detection import PlainBackbone


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("global_blocks", [(), (1,)])
def test_one_window_over_the_whole_image_is_the_plain_vit(position, global_blocks):
    vit, x = tokenless(position).eval(), torch.randn(2, 3, 32, 24)
    with torch.no_grad():
        expected = vit.forward_features(x).mT.unflatten(2, (4, 3))
        got = in_windows(vit, global_blocks=global_blocks)(x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("position", COMMUTING)
def test_a_window_that_the_map_does_not_fill_is_an_image_of_its_own(position):
    """Nothing from beyond the map, nor from another window: the crop alone gives the same."""
    backbone = in_windows(tokenless(position), scale="patch").eval()
    x = torch.randn(1, 3, 48, 56)  # 6 x 7 patches
    with torch.no_grad():
        whole = backbone(x)
        corner = backbone(x[..., 32:, 32:])
        garbage = x.clone()
        garbage[..., :32, :] = 100.0
        torch.testing.assert_close(whole[..., 4:, 4:], corner, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(backbone(garbage)[..., 4:, 4:], whole[..., 4:, 4:])
        everywhere = in_windows(backbone.vit, global_blocks=(1,), scale="patch").eval()(garbage)
        assert (everywhere[..., 4:, 4:] - whole[..., 4:, 4:]).abs().max() > 1e-2


def test_positions_in_windows_are_those_in_the_image():
    """LieRE's rotations are not relative, so the same crop elsewhere is not the same to it."""
    backbone = in_windows(tokenless("liere"), scale="patch").eval()
    x = torch.randn(1, 3, 48, 56)
    positions = comrope.grid((6, 7), scale=(1.5, 1.75)).unflatten(0, (6, 7))
    with torch.no_grad():
        corner = backbone(x)[..., 4:, 4:]
        alone = backbone(x[..., 32:, 32:])
        expected_corner = backbone(x[..., 32:, 32:], positions[4:, 4:].flatten(0, 1))
    assert (corner - alone).abs().max() > 1e-2
    torch.testing.assert_close(corner, expected_corner, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("position", comrope.METHODS)
def test_moving_all_coordinates_changes_nothing_if_the_rotations_commute(position):
    backbone = in_windows(tokenless(position), global_blocks=(1,)).eval()
    x, positions = torch.randn(2, 3, 48, 40), comrope.grid((6, 5))
    with torch.no_grad():
        here, there, each = (
            backbone(x, at) for at in (positions, positions + 1, positions.expand(2, -1, -1) + 1)
        )
        torch.testing.assert_close(here, backbone(x))
    torch.testing.assert_close(there, each)
    change = float((here - there).norm() / here.norm())
    assert change < 1e-4 if position in COMMUTING else change > 1e-2


@pytest.mark.parametrize("position", FROM_ZERO)
def test_angles_of_zero_on_absolute_positions_change_nothing_and_learn_at_once(position):
    plain = small("ape")
    rotary = small(position, ape=True, init="zeros")
    missing, unexpected = rotary.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(".rope." in name for name in missing)
    x = torch.randn(2, 3, 48, 40)
    expected, got = (in_windows(vit, global_blocks=(2,))(x) for vit in (plain, rotary))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    (got * torch.randn_like(got)).sum().backward()
    for rope in rotary_modules(rotary).values():
        assert sum(p.grad.abs().sum() for p in rope.parameters()) > 1e-4


@pytest.mark.parametrize("class_position", ["center", "unrotated"])
def test_the_class_token_is_taken_out(class_position, tmp_path):
    with_token, without = small(class_position=class_position), tokenless(num_classes=0)
    without.load_state_dict(with_token.state_dict(), strict=False)
    x = torch.randn(1, 3, 48, 40)
    backbone = in_windows(with_token, global_blocks=(0,)).eval()
    torch.testing.assert_close(backbone(x), in_windows(without, global_blocks=(0,)).eval()(x))
    backbone(x).square().sum().backward()
    assert all(p.grad is not None for p in backbone.parameters())
    backbone.vit.save_pretrained(tmp_path)
    again = in_windows(ViT.from_pretrained(tmp_path), global_blocks=(0,)).eval()
    assert torch.equal(again(x), backbone(x))


def test_any_size_of_image_padded_on_the_right_and_below():
    backbone = in_windows(small(ape=True), scale="patch", global_blocks=(1,)).eval()
    for size, grid in {(41, 63): (6, 8), (100, 40): (13, 5), (7, 8): (1, 1)}.items():
        x = torch.randn(1, 3, *size)
        padded = torch.zeros(1, 3, *(8 * number for number in grid))
        padded[..., : size[0], : size[1]] = x
        assert backbone(x).shape == (1, 48, *grid)
        backbone.vit.ape = None  # the one thing here that is relative to the image
        torch.testing.assert_close(backbone(x), backbone(padded))


def test_coordinates_are_relative_to_the_image_or_as_far_apart_as_in_training():
    vit, x = tokenless(), torch.randn(1, 3, 44, 64)
    relative, patch = (in_windows(vit, scale=scale).eval() for scale in ("relative", "patch"))
    steps = torch.stack(
        torch.meshgrid(torch.arange(6) + 0.5, torch.arange(8) + 0.5, indexing="ij"), -1
    ).flatten(0, 1)
    torch.testing.assert_close(relative(x), relative(x, steps * torch.tensor([8 / 44, 8 / 64])))
    torch.testing.assert_close(patch(x), patch(x, steps / 4))
    assert not torch.allclose(relative(x), patch(x), atol=1e-3)
    own_size = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(relative(own_size), patch(own_size))
    absolute = tokenless("ape")  # would run out of its codebook if it counted patches
    relative, patch = (in_windows(absolute, scale=scale) for scale in ("relative", "patch"))
    assert torch.equal(relative(x), patch(x))


def test_the_scale_of_the_axes_is_that_of_the_vit():
    vit = tokenless(axis_scale=(0.5, 2.0), ape=True).eval()
    x = torch.randn(1, 3, 32, 32)
    expected = vit.forward_features(x).mT.unflatten(2, (4, 4))
    torch.testing.assert_close(in_windows(vit)(x), expected, rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_changes_nothing_but_memory():
    backbone = in_windows(small(ape=True), global_blocks=(1,))
    x, gradients = torch.randn(2, 3, 48, 40), []
    for enable in (False, True):
        backbone.vit.set_grad_checkpointing(enable)
        backbone.zero_grad()
        backbone(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in backbone.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_the_residual_stream_is_in_the_precision_of_the_weights():
    backbone, x = in_windows(small(ape=True), global_blocks=(1,)).eval(), torch.randn(1, 3, 48, 40)
    with torch.no_grad():
        expected = backbone(x)
        with torch.autocast("cpu", dtype=torch.float16):
            got = backbone(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


def test_the_last_block_of_every_quarter_is_global():
    assert PlainBackbone(small("none", depth=12)).global_blocks == {2, 5, 8, 11}
    assert PlainBackbone(small("none", depth=2)).global_blocks == {0, 1}


def test_hooks_of_blocks_run_in_windows_too():
    """Sharding, offloading and compilation depend on calls of blocks."""
    called = []
    vit = tokenless()
    for block in vit.blocks:
        block.register_forward_hook(lambda block, *_: called.append(block))
    in_windows(vit)(torch.randn(1, 3, 64, 64))
    assert called == list(vit.blocks)


def test_hooks_of_rotations_run_in_windows_too():
    backbone, x, seen = in_windows(small()).eval(), torch.randn(1, 3, 48, 40), []
    expected = backbone(x)
    for rope in rotary_modules(backbone).values():
        rope.register_forward_hook(lambda *call: seen.append(call))
    torch.testing.assert_close(backbone(x), expected)
    assert len(seen) == 3


@pytest.mark.parametrize("position", ["rope", "comrope-ld", "comrope-torus", "liere"])
def test_values_in_windows_are_rotated_at_their_positions_in_the_image(position):
    backbone = in_windows(tokenless(position, rotate_values=True), window=2).double()
    x = torch.randn(1, 3, 48, 40, dtype=torch.float64)
    positions = comrope.grid((6, 5), dtype=torch.float64)
    before = backbone(x, positions)
    change = relative_error(backbone(x, positions + 1.5), before)
    assert change < 1e-10 if position in COMMUTING else change > 1e-4
    whole = in_windows(tokenless(position, rotate_values=True), window=9).double()
    whole.load_state_dict(backbone.state_dict())
    plain = whole.vit.forward_features(x, positions).mT.unflatten(2, (6, 5))
    assert relative_error(whole(x, positions), plain) < 1e-10
    assert relative_error(before, plain) > 1e-3


def test_errors_of_the_backbone_name_the_argument():
    for options, message in (
        ({"window": 0}, "window: expected an integer of at least 1, got 0"),
        ({"global_blocks": (3,)}, "global_blocks: expected indices from 0 to 2, got 3"),
        ({"global_blocks": (-1,)}, "global_blocks: expected indices from 0 to 2, got -1"),
        ({"scale": "pixels"}, "scale: expected one of relative, patch, got 'pixels'"),
    ):
        with pytest.raises(ValueError, match=message):
            PlainBackbone(small(), **options)
    with raises_for("vit"):
        PlainBackbone(small("none", img_size=(4, 8, 8), patch_size=(1, 4, 4)))
    with raises_for("vit", TypeError):
        PlainBackbone(nn.Linear(2, 2))
    with raises_for("x"):
        in_windows(small())(torch.randn(1, 1, 8, 8))
    with raises_for("positions"):
        in_windows(small())(torch.randn(1, 3, 16, 16), torch.rand(5, 2))
