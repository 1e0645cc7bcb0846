"""Sizes of benchmarks, and comrope's rotations for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from support.benches import TINY

from comrope.experiments.bench.cases import (
    llama_positions,
    llama_rotary,
    llama_shape,
    name_of,
    own_rotation,
    shape_of,
    token_positions,
    used_backend,
)


def test_a_layer_has_the_sizes_of_the_vit():
    shape = shape_of(replace(TINY, size="base", grid=(14, 10)))
    assert (shape.tokens, shape.heads, shape.head_dim, shape.prefix) == (141, 12, 64, 1)
    llama = llama_shape(TINY)
    assert (llama.tokens, llama.heads, llama.prefix) == (8, 2, 0)


def test_positions_are_those_of_patches_and_a_class_token():
    shared = token_positions(TINY)
    assert shared.shape == (5, 2)
    own = token_positions(TINY, per_sample=True)
    assert own.shape == (TINY.batch, 5, 2)
    assert not torch.equal(own[0, 1:], own[1, 1:])
    assert torch.equal(own[:, 0], shared[:1].expand(TINY.batch, -1))
    assert llama_positions(TINY).flatten().tolist() == list(range(8))


def test_every_backend_gets_the_same_angles():
    one, other = (own_rotation(TINY, "comrope-ld", backend) for backend in ("spectral", "auto"))
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert used_backend(other, TINY) == "spectral"
    heads = llama_rotary(replace(TINY, llama_key_heads=2), "rope-mixed", "auto").spectrum()[1]
    assert not torch.equal(heads[:, 0], heads[:, 1])


def test_rows_are_named_by_what_differs():
    assert name_of("comrope-ld") == "comrope-ld"
    assert name_of("comrope-ld", "reference", "per sample") == "comrope-ld, Algorithm 1, per sample"
    assert name_of("liere", "spectral") == "liere, spectral"
