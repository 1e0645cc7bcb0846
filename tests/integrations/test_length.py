"""Frequencies that follow the length of the input: outputs are those of the stock model."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import make, queries_and_keys, raises_for, relative_error
from support.language_models import GROUPED, SIZES, logits, train

import comrope
from comrope.integrations.length import rotate_with_ratio
from comrope.ops.layout import halves_to_neighbours

transformers = pytest.importorskip("transformers")

ORIGINAL = 32  # tokens, up to which frequencies are the original ones
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
METHODS = {
    "rope": 2,
    "rope-mixed": 2,
    "comrope-ap": 4,
    "comrope-ld": 8,
    "comrope-torus": 8,
    "liere": 4,
}
LENGTHS = (16, ORIGINAL, ORIGINAL + 1, 100, 16, 64, 20)
both = pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=lambda rope: rope["rope_type"])


def stock(rope):
    length = {"max_position_embeddings": ORIGINAL if rope is DYNAMIC else 4 * ORIGINAL}
    config = transformers.LlamaConfig(**{**SIZES, **GROUPED, **length}, rope_parameters=dict(rope))
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def of_length(model, length):
    torch.manual_seed(length)
    with torch.no_grad():
        return model(torch.randint(model.config.vocab_size, (2, length))).logits


@both
@pytest.mark.parametrize(("method", "block_size"), METHODS.items())
def test_outputs_at_any_lengths_in_any_order(rope, method, block_size):
    model = stock(rope)
    swapped = comrope.swap(copy.deepcopy(model), method, block_size=block_size)
    changed = False
    for length in LENGTHS:
        expected = of_length(model, length)
        assert relative_error(of_length(swapped, length), expected) < 1e-4, length
        fixed = copy.deepcopy(model)
        fixed.model.rotary_emb.rope_type = "default"
        fixed.model.rotary_emb.inv_freq = fixed.model.rotary_emb.original_inv_freq
        changed |= relative_error(of_length(fixed, length), expected) > 1e-3
    assert changed  # otherwise constant frequencies would pass


@both
def test_a_model_that_saw_a_long_input_before(rope):
    model = stock(rope)
    of_length(model, 100)
    swapped = comrope.swap(copy.deepcopy(model), "comrope-ld")
    for length in (16, 100):
        assert relative_error(of_length(swapped, length), of_length(model, length)) < 1e-4


@both
@pytest.mark.parametrize("method", ["rope-mixed", "comrope-ld", "comrope-torus"])
def test_cached_decoding_across_the_boundary(rope, method):
    """Keys keep the frequencies of their time, as in the stock model."""
    model = stock(rope)
    swapped = comrope.swap(copy.deepcopy(model), method)
    tokens = torch.randint(model.config.vocab_size, (2, ORIGINAL + 8))
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    steps = [tokens[:, : ORIGINAL - 4], *tokens[:, ORIGINAL - 4 :].split(1, dim=1)]
    for step in steps:
        with torch.no_grad():
            expected, got = (
                each(step, past_key_values=cache, use_cache=True).logits
                for each, cache in zip((model, swapped), caches, strict=True)
            )
        assert relative_error(got, expected) < 1e-4


@both
def test_angles_are_learned_at_long_lengths(rope):
    swapped = comrope.swap(stock(rope), "comrope-ld")
    before = {n: p.detach().clone() for n, p in swapped.named_parameters() if "comrope" in n}
    train(swapped)
    assert all((swapped.get_parameter(n) - p).abs().max() > 1e-4 for n, p in before.items())
    assert logits(swapped).isfinite().all()


@pytest.mark.parametrize(("method", "block_size"), METHODS.items())
def test_by_definition(method, block_size):
    """R(x) = exp(x S A S) in values and gradients, in float64."""
    rope = make(
        method, num_axes=1, block_size=block_size, head_dim=16, channel_order="half", init="rope"
    )
    for parameter in rope.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    q, k = queries_and_keys(rope)
    positions = torch.arange(6.0, dtype=torch.float64)[:, None]
    ratio = 0.5 + torch.rand(8, dtype=torch.float64)
    got = rotate_with_ratio(rope, q, k, positions, ratio)
    root = ratio.sqrt().repeat_interleave(2).view(-1, rope.block_size)
    matrices = root[..., :, None] * rope.angle_matrices()[0] * root[..., None, :]
    rotations = torch.linalg.matrix_exp(positions[:, 0, None, None, None, None] * matrices)
    blocks = halves_to_neighbours(k).unflatten(-1, (-1, rope.block_size))
    expected = torch.einsum("thmij,bhtmj->bhtmi", rotations, blocks).flatten(-2)
    assert relative_error(halves_to_neighbours(got[1]), expected) < 1e-12
    wanted = [k, *rope.parameters()]
    pairs = zip(
        torch.autograd.grad(halves_to_neighbours(got[1]).sin().sum(), wanted),
        torch.autograd.grad(expected.sin().sum(), wanted),
        strict=True,
    )
    assert all(relative_error(a, b) < 1e-9 for a, b in pairs)


@both
def test_folding_is_refused(rope):
    swapped = comrope.swap(stock(rope), "comrope-ld")
    with raises_for("model", naming=rope["rope_type"]):
        comrope.fold(swapped)
    assert relative_error(of_length(comrope.unswap(swapped), 64), of_length(stock(rope), 64)) < 1e-6
