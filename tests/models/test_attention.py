"""Attention, and the basis of its rotation folded into its weights."""

from __future__ import annotations

import pytest
import torch
from helpers import relative_error
from support.vits import nano

from comrope import ops
from comrope.models import attention


@pytest.fixture
def folded(monkeypatch):
    """A list that grows with every parameter of queries, keys and values that is folded."""
    calls, ours = [], ops.fold_into_outputs

    def counted(*args, **options):
        calls.append(1)
        return ours(*args, **options)

    monkeypatch.setattr(attention.ops, "fold_into_outputs", counted)
    return calls


def image(size: int = 12) -> torch.Tensor:
    return torch.randn(4, 1, size, size, dtype=torch.float64)


@pytest.mark.parametrize("order", ["interleaved", "half"])
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("class_position", ["center", "unrotated"])
def test_folding_changes_nothing(values, order, class_position, folded):
    """Outputs and gradients in float64, against layers with hooked projections, which are not."""
    options = {"rotate_values": values, "channel_order": order, "class_position": class_position}
    model = nano(position="comrope-torus", **options).double()
    x, wanted = image(), [*model.parameters()]
    fast = model(x)
    got = torch.autograd.grad(fast.square().sum(), wanted)
    assert len(folded) == 2 * len(model.blocks)  # weight and bias
    for block in model.blocks:
        block.attn.qkv.register_forward_hook(lambda *_: None)
    slow = model(x)
    assert len(folded) == 2 * len(model.blocks)
    assert relative_error(fast, slow) < 1e-12
    for a, b in zip(got, torch.autograd.grad(slow.square().sum(), wanted), strict=True):
        assert relative_error(a, b) < 1e-10


def test_only_where_it_is_less_work(folded):
    model = nano(position="comrope-torus").double()
    width = model.blocks[0].attn.qkv.in_features
    model(image(6)[:1])  # ten tokens
    assert width > 10
    assert not folded
    model(image())
    assert folded


@pytest.mark.parametrize("options", [
    {"position": "comrope-ld"},
    {"position": "comrope-torus", "block_size": 2},  # without a basis
    {"position": "liere"},
    {"position": "rope-mixed"},
    {"position": "none"},
])  # fmt: skip
def test_not_without_a_basis(options, folded):
    nano(**options).double()(image())
    assert not folded


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_not_with_another_backend(backend, folded):
    model = nano(position="comrope-torus", backend=backend)
    expected = nano(position="comrope-torus")
    expected.load_state_dict(model.state_dict())
    x = image().float()
    got = model(x)
    assert not folded
    assert relative_error(got, expected(x)) < 1e-4
    assert folded


def test_projections_without_biases(folded):
    model, x = nano(position="comrope-torus").double(), image()
    for block in model.blocks:
        block.attn.qkv.bias.data.zero_()
        block.attn.proj.bias.data.zero_()
    expected = model(x)
    folded.clear()
    for block in model.blocks:
        block.attn.qkv.bias = block.attn.proj.bias = None
    assert relative_error(model(x), expected) < 1e-12
    assert len(folded) == len(model.blocks)


def test_hooks_on_the_rotation_are_called(folded):
    model, seen = nano(position="comrope-torus").double(), []
    expected = model(x := image())
    for block in model.blocks:
        block.attn.rope.register_forward_hook(lambda *_: seen.append(1))
    assert relative_error(model(x), expected) < 1e-12
    assert len(seen) == len(model.blocks)


@pytest.mark.parametrize("values", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_low_precision_autocast_compile_and_checkpointing(values):
    model = nano(position="comrope-torus", rotate_values=values)
    x = image().float()
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(model(x).float(), expected) < 0.05
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), expected) < 1e-5
    model.set_grad_checkpointing(True)
    model.train()
    assert relative_error(model(x), expected) < 1e-5
    low = nano(position="comrope-torus", rotate_values=values)
    low.load_state_dict(model.state_dict())
    assert relative_error(low.bfloat16()(x.bfloat16()).float(), expected) < 0.1
