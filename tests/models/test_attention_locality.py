"""Locality bias: attention that starts with heads that prefer near tokens."""

from __future__ import annotations

import pytest
import torch
from helpers import raises_for, relative_error

import comrope
from comrope.models import ViT
from comrope.models.attention import Attention


def started(**options) -> ViT:
    torch.manual_seed(3)
    options = {"in_chans": 1, "num_classes": 10, "depth": 2, **options}
    return comrope.create_model("vit_nano_patch2_12", **options).eval()


def scores(layer: Attention, positions: torch.Tensor) -> torch.Tensor:
    """(heads, T, T), of queries and keys that are biases alone."""
    found = []

    def attend(q, k, v):
        found.append((q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5)[0])
        return v

    nothing = positions.new_zeros(1, len(positions), layer.qkv.in_features)
    layer(nothing, positions, attend=attend)
    return found[0]


def test_the_score_is_highest_at_distance_zero(method):
    model, positions = started(position=method, locality_bias=4.0), comrope.grid((5, 6))
    for block in model.blocks:
        found = scores(block.attn, positions)
        own = found.diagonal(dim1=-2, dim2=-1)
        assert relative_error(own, torch.full_like(own, 4.0)) < 1e-5
        others = ~torch.eye(len(positions), dtype=torch.bool)
        assert (found[:, others] < 4.0).all()


@pytest.mark.parametrize("init", ["rope", "rope-random-axes", "isotropic"])
def test_it_is_the_mean_of_the_cosines_of_all_planes(init):
    model = started(position="comrope-torus", init=init, locality_bias=4.0).double()
    positions = comrope.grid((5, 6)).double()
    layer = model.blocks[1].attn
    _, frequencies = layer.rope.spectrum()  # (N, H, m, b / 2)
    apart = positions[None] - positions[:, None]  # (T, T, N)
    phases = torch.einsum("tsn,nhmp->htsmp", apart, frequencies)
    wanted = 4.0 * phases.cos().mean((-2, -1))
    assert relative_error(scores(layer, positions), wanted) < 1e-6


def test_only_biases_of_queries_and_keys_start_otherwise(method):
    plain, biased = started(position=method), started(position=method, locality_bias=4.0)
    own, names = biased.state_dict(), plain.state_dict().keys()
    changed = {name for name in names if not torch.equal(own[name], plain.state_dict()[name])}
    assert changed == {f"blocks.{layer}.attn.qkv.bias" for layer in range(2)}
    half = own["blocks.0.attn.qkv.bias"].chunk(3)
    assert half[0].gt(0).all()
    assert half[1].gt(0).all()
    assert not half[2].any()


def test_resetting_parameters_sets_it_again():
    model = started(position="comrope-ld", locality_bias=4.0)
    before = model.blocks[0].attn.qkv.bias.clone()
    model.reset_parameters()
    assert torch.equal(model.blocks[0].attn.qkv.bias, before)
    assert before.any()


def test_it_is_saved_and_folded(tmp_path):
    model, x = started(position="comrope-ld", locality_bias=4.0), torch.randn(2, 1, 10, 14)
    wanted = model(x)
    model.save_pretrained(tmp_path)
    again = ViT.from_pretrained(tmp_path).eval()
    assert again.arguments()["locality_bias"] == 4.0
    assert torch.equal(again(x), wanted)
    assert relative_error(comrope.fold(model)(x), wanted) < 1e-5
    model.save_pretrained(tmp_path / "folded")
    folded = ViT.from_pretrained(tmp_path / "folded").eval()
    assert relative_error(folded(x), wanted) < 1e-5


def test_what_has_no_rotation_cannot_set_locality_bias():
    with raises_for("locality_bias"):
        started(position="ape", locality_bias=4.0)
    with raises_for("locality_bias"):
        started(locality_bias=-1.0)
    with raises_for("set_locality_bias"):
        Attention(16, 2).set_locality_bias(4.0)
