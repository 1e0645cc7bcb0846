"""Attention, and the basis of its rotation folded into its weights."""

from __future__ import annotations

import pytest
import torch
from helpers import relative_error, set_frequencies
from support.vits import nano

import comrope
from comrope import ops
from comrope.models import attention
from comrope.ops.layout import unpack


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
@pytest.mark.parametrize("position", ["comrope-torus", "comrope-ld"])
def test_folding_changes_nothing(position, values, order, class_position, folded):
    """Outputs and gradients in float64, against layers with hooked projections, which are not."""
    options = {"rotate_values": values, "channel_order": order, "class_position": class_position}
    model = nano(position=position, **options).double()
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
    {"position": "comrope-ld", "block_size": 2},  # without a basis
    {"position": "comrope-torus", "block_size": 2},
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


FREQUENCIES = {
    "random": [2.9, 1.7, 0.4, 0.1],
    "equal": [1.5, 1.5, 1.5, 1.5],
    "nearly equal": [1.5 + 1e-7, 1.5, 0.7, 0.7 - 1e-3],
    "zero": [1.5, 0.0, 0.0, 0.0],
    "all zero": [0.0, 0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", FREQUENCIES)
def test_gradients_of_collinear_angles_need_scores_only(kind, groups, values):
    """The lemma of docs/theory.md: in float64, against one matrix exponential per token."""
    layer = attention.Attention(
        16 * 4, 4, num_kv_heads=4 // groups, rotate_values=values,
        rope=comrope.RotaryEmbedding("comrope-ld", num_heads=4 // groups, head_dim=16),
    ).double()  # fmt: skip
    set_frequencies(layer.rope, torch.tensor(FREQUENCIES[kind]))
    x = torch.randn(3, 25, 64, dtype=torch.float64)
    positions = torch.rand(25, 2, dtype=torch.float64)
    parameters = [*layer.parameters()]

    def gradients(backend):
        layer.rope.backend = backend
        return torch.autograd.grad(layer(x, positions).tanh().sum(), parameters)

    for got, expected in zip(gradients("auto"), gradients("reference"), strict=True):
        assert relative_error(got, expected) < 1e-9


def test_attention_that_uses_more_than_scores_gets_its_own_gradient():
    """A function without ``scores_only`` may use the rotated vectors in any way."""

    def attend(q, k, v):
        return attention.attend_to_all(q, k, v) + q[..., :1] ** 3

    layer = attention.Attention(
        64, 4, rope=comrope.RotaryEmbedding("comrope-ld", num_heads=4, head_dim=16)
    ).double()
    x = torch.randn(3, 25, 64, dtype=torch.float64)
    positions = torch.rand(25, 2, dtype=torch.float64)
    (got,) = torch.autograd.grad(
        layer(x, positions, attend=attend).tanh().sum(), layer.rope.method.P
    )
    qkv = layer.qkv(x).unflatten(-1, (12, 16))
    q, k, v = unpack(qkv, 4)
    basis = layer.rope.spectrum()[0].detach()
    matrices = layer.rope.rotation_matrices(positions)
    q, k = (  # Q^T R(x) q with a constant Q, as RotaryEmbedding documents
        torch.einsum("hmji,thmjk,bhtmk->bhtmi", basis, matrices, x.unflatten(-1, (-1, 8))).flatten(
            3
        )
        for x in (q, k)
    )
    out = layer.proj(attend(q, k, v).transpose(1, 2).flatten(2))
    (expected,) = torch.autograd.grad(out.tanh().sum(), layer.rope.method.P)
    assert relative_error(got, expected) < 1e-9
    attend.scores_only = True  # a false promise is wrong, so the promise matters
    (wrong,) = torch.autograd.grad(
        layer(x, positions, attend=attend).tanh().sum(), layer.rope.method.P
    )
    assert relative_error(wrong, expected) > 1e-3


@pytest.mark.parametrize("init", ["zeros", "normal"])
@pytest.mark.parametrize(
    "options", [{"shared_heads": True}, {"shared_theta": True}, {"block_size": 3}]
)
def test_gradients_of_whole_models(options, init):
    """All layers at once, against the reference implementation of every layer."""
    sizes = {"embed_dim": 36, "num_heads": 2} if "block_size" in options else {}
    model = nano(position="comrope-ld", init=init, **sizes, **options).double()
    x, wanted = image(), [*model.parameters()]
    got = torch.autograd.grad(model(x).square().sum(), wanted)
    for block in model.blocks:
        block.attn.rope.backend = "reference"
    expected = torch.autograd.grad(model(x).square().sum(), wanted)
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-9
