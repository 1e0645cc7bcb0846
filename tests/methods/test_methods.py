"""The parameters of each method, its initializations, and how methods relate."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import FROM_ZERO, LEARNED, fits, make, queries_and_keys, raises_for, relative_error

import comrope
from comrope.analysis import scores
from comrope.inits import Shape, rope_frequencies
from comrope.methods import label
from comrope.methods.base import batched_angles
from comrope.methods.comrope_torus import cayley


def count(rope: comrope.RotaryEmbedding) -> int:
    return sum(p.numel() for p in rope.parameters())


def test_parameter_counts_are_those_of_the_paper():
    """Table 5, one layer, at ViT-B's width."""
    d = 768
    for b, n in itertools.product((2, 4, 8, 16), (1, 2, 4)):
        sizes = {"num_heads": 12, "head_dim": 64, "num_axes": n, "block_size": b}
        counts = {
            name: count(comrope.RotaryEmbedding(name, **sizes))
            for name in comrope.METHODS
            if fits(name, num_axes=n)
        }
        assert counts["rope"] == 0
        assert counts["liere"] == n * d * b
        assert counts["comrope-ap"] == d * b
        assert counts["comrope-ld"] == d * (b + n / b)
        # Not in the table: one frequency per plane and axis, and for the torus a basis per block.
        assert counts["rope-mixed"] == n * d / 2
        assert counts["comrope-torus"] == n * d / 2 + (d * b if b > 2 else 0)


def test_normal_starts_have_the_spread_they_claim():
    sizes = {"num_heads": 200, "block_size": 8, "head_dim": 96}
    ap, ld, liere, mixed, torus = (make(name, **sizes).method for name in
        ("comrope-ap", "comrope-ld", "liere", "rope-mixed", "comrope-torus"))  # fmt: skip
    for tensor, std in (
        (ap.P, 1.0),
        (ld.P, 1.0),
        (ld.theta, 1.0),
        (liere.P, 1.0),
        (mixed.frequencies, 2**0.5),
        (torus.frequencies, 14**0.5),
    ):
        assert tensor.std().item() == pytest.approx(std, rel=0.05)
        assert abs(tensor.mean().item()) < 0.05 * std
    # The torus has the second moment that LD's frequencies have.
    found = make("comrope-ld", **sizes).spectrum()[1].square().mean().item()
    assert found == pytest.approx(14.0, rel=0.1)


def test_theta_can_be_shared_by_the_heads():
    rope = make("comrope-ld", num_heads=3, shared_theta=True)
    assert rope.method.theta.shape == (2, 1, 12)
    theta = rope.method.theta.detach()[..., None, None]
    skew = (rope.method.P - rope.method.P.mT).detach()
    torch.testing.assert_close(rope.angle_matrices(), theta * skew)


def test_zeros_is_standard_attention(method):
    for num_axes in [n for n in (1, 2, 3) if fits(method, num_axes=n, init="zeros")]:
        rope = make(method, num_axes=num_axes, init="zeros")
        q, k = queries_and_keys(rope, groups=1)
        positions = 10 * torch.randn(6, num_axes, dtype=torch.float64)
        eye = torch.eye(4, dtype=torch.float64).expand(6, 2, 12, 4, 4)
        assert torch.equal(rope.rotation_matrices(positions), eye)
        assert relative_error(scores(rope, q, k, positions), q @ k.mT) < 1e-15


@pytest.mark.parametrize("method", FROM_ZERO)
def test_zeros_can_leave_zero(method):
    """A parameter has a gradient there, and after one step all have one."""
    rope = make(method, init="zeros")
    q, k = queries_and_keys(rope)
    positions = torch.randn(6, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(rope.parameters(), lr=1e-2)

    def gradients():
        optimizer.zero_grad()
        scores(rope, q, k, positions).square().mean().backward()
        return {name: float(p.grad.norm()) for name, p in rope.method.named_parameters()}

    assert max(gradients().values()) > 1e-3
    optimizer.step()
    assert min(gradients().values()) > 1e-8
    assert rope.angle_matrices().abs().max() > 0


def vanilla(x, positions, frequencies):
    """RoFormer's rotation written out: x (B, H, T, D), frequencies (D/2, N)."""
    angle = positions @ frequencies.T
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * angle.cos() - x[..., 1::2] * angle.sin()
    out[..., 1::2] = x[..., 0::2] * angle.sin() + x[..., 1::2] * angle.cos()
    return out


def test_rope_start_is_vanilla_rope(method):
    """Against formulas written by hand: plane p of an axis has frequency base^(-p / planes)."""
    for num_axes, block_size in ((1, 8), (2, 2), (2, 4), (2, 8), (3, 4), (4, 2)):
        if not fits(method, num_axes=num_axes):
            continue
        rope = make(method, num_axes=num_axes, block_size=block_size, init="rope", base=100.0)
        planes = block_size // 2
        per_axis = 12 // num_axes * planes
        by_hand = torch.zeros(12 * planes, num_axes, dtype=torch.float64)
        for plane in range(12 * planes):
            block, inside = divmod(plane, planes)
            rank = (block // num_axes) * planes + inside
            by_hand[plane, block % num_axes] = 100.0 ** (-rank / per_axis)
        q, k = (x.detach() for x in queries_and_keys(rope, groups=1))
        positions = torch.randn(6, num_axes, dtype=torch.float64) * 5
        expected = vanilla(q, positions, by_hand) @ vanilla(k, positions, by_hand).mT
        assert relative_error(scores(rope, q, k, positions), expected) < 1e-12
        if method == "rope":
            rotated = rope(q, k, positions)[0]
            assert relative_error(rotated, vanilla(q, positions, by_hand)) < 1e-14


def test_one_axis_has_roformers_frequencies():
    expected = 10000.0 ** (-2 * torch.arange(32, dtype=torch.float64) / 64)
    torch.testing.assert_close(rope_frequencies(Shape(1, 1, 32, 1)).flatten(), expected)


@pytest.mark.parametrize("method", [m for m in comrope.METHODS if fits(m, num_axes=1)])
def test_rope_start_with_half_order_is_hugging_faces_rotary(method):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=128, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64
    )
    q, k = torch.randn(2, 2, 9, 64), torch.randn(2, 1, 9, 64)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, torch.arange(9)[None])
    q_theirs, k_theirs = llama.apply_rotary_pos_emb(q, k, cos, sin)
    sizes = {"num_heads": 1, "head_dim": 64, "num_axes": 1}
    positions = torch.arange(9)[:, None]
    for block_size in (2, 8):
        rope = comrope.RotaryEmbedding(
            method, block_size=block_size, init="rope", channel_order="half", **sizes
        )
        assert relative_error(scores(rope, q, k, positions), q_theirs @ k_theirs.mT) < 1e-5
        if method == "rope":
            torch.testing.assert_close(rope(q, k, positions), (q_theirs, k_theirs))


def test_position_scale_is_a_change_of_units(method):
    """[0, 1] coordinates with the grid as scale are coordinates in patches."""
    q, k = queries_and_keys(make("rope"), tokens=12, groups=1)
    canvas = make(method, init="rope", position_scale=(3.0, 4.0))
    patches = make(method, init="rope")
    a = scores(canvas, q, k, comrope.grid((3, 4), dtype=torch.float64))
    b = scores(patches, q, k, comrope.grid((3, 4), scale=(3, 4), dtype=torch.float64))
    assert relative_error(a, b) < 1e-13


def test_ld_with_blocks_of_two_is_rope_mixed():
    ld = make("comrope-ld", block_size=2)
    mixed = make("rope-mixed", block_size=2)
    with torch.no_grad():
        skew = ld.method.P[..., 1, 0] - ld.method.P[..., 0, 1]
        mixed.method.frequencies.copy_((ld.method.theta * skew)[..., None])
    q, k = queries_and_keys(ld)
    positions = torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(ld(q, k, positions), mixed(q, k, positions))
    torch.testing.assert_close(ld.angle_matrices(), mixed.angle_matrices())


def test_ap_with_blocks_of_two_and_frozen_angles_is_vanilla_rope():
    ap, rope = (make(name, block_size=2, init="rope") for name in ("comrope-ap", "rope"))
    ap.requires_grad_(False)
    q, k = queries_and_keys(ap)
    positions = torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(ap(q, k, positions), rope(q, k, positions))
    torch.testing.assert_close(ap.angle_matrices(), rope.angle_matrices())


def test_ap_turns_each_block_with_its_own_axis():
    matrices = make("comrope-ap", num_axes=3).angle_matrices()
    for axis in range(3):
        for block in range(12):
            assert bool(matrices[axis, :, block].abs().max() > 0) == (block % 3 == axis)


def test_cayley_is_orthogonal_and_close_to_the_exponential():
    skew = torch.randn(5, 8, 8, dtype=torch.float64)
    skew = skew - skew.mT
    basis = cayley(skew)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(8).double().expand(5, 8, 8))
    assert torch.linalg.det(basis).sub(1).abs().max() < 1e-12
    small = 1e-3 * skew
    assert (cayley(small) - torch.matrix_exp(small)).abs().max() < 1e-6


def test_vanilla_frequencies_survive_low_precision_casts():
    rope = make("rope", dtype=torch.float32)
    before = rope.spectrum()[1]
    rope.bfloat16().float()
    assert torch.equal(rope.spectrum()[1], before)


def test_the_angles_of_several_layers_at_once(method):
    """The same numbers and gradients as layer by layer."""
    for block_size in (2, 4):
        layers = [make(method, block_size=block_size).method for _ in range(3)]
        together = batched_angles(layers)
        apart = [layer.angles() for layer in layers]
        for a, b in zip(together, apart, strict=True):
            assert type(a) is type(b)
            assert torch.equal(a.matrices(), b.matrices())
        weights = [torch.randn_like(angles.matrices()) for angles in apart]
        parameters = [p for layer in layers for p in layer.parameters()]
        if not parameters:
            continue
        losses = [
            sum((angles.matrices() * w).sum() for angles, w in zip(found, weights, strict=True))
            for found in (together, apart)
        ]
        first, second = (torch.autograd.grad(loss, parameters) for loss in losses)
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b)


def test_a_shared_theta_belongs_to_its_layer():
    layers = [make("comrope-ld", shared_theta=True).method for _ in range(2)]
    for a, layer in zip(batched_angles(layers), layers, strict=True):
        assert torch.equal(a.matrices(), layer.angles().matrices())
        assert a.cached_spectrum is not None


@pytest.mark.parametrize(
    "other",
    [
        {"method": "comrope-ap"},
        {"block_size": 8, "head_dim": 48},
        {"dtype": torch.float32},
        {"shared_theta": True},
        {"shared_heads": True},
        {"init": "zeros"},
    ],
)
def test_layers_that_differ_are_not_batched(other):
    first = make("comrope-ld").method
    assert batched_angles([first, make(**{"method": "comrope-ld", **other}).method]) is None


def test_a_frozen_layer_is_not_batched_with_one_that_learns():
    layers = [make("comrope-ld").method for _ in range(2)]
    layers[0].requires_grad_(False)
    assert batched_angles(layers) is None


@pytest.mark.parametrize("method", LEARNED)
def test_a_wider_start_is_the_same_draw_wider(method):
    sizes = {"num_heads": 2, "head_dim": 32, "block_size": 8}
    matrices = []
    for spread in (1.0, 2.5):
        torch.manual_seed(0)
        matrices.append(comrope.RotaryEmbedding(method, spread=spread, **sizes).angle_matrices())
    torch.testing.assert_close(2.5 * matrices[0], matrices[1])
    with raises_for("spread"):
        comrope.RotaryEmbedding(method, spread=2.0, init="rope", **sizes)


def test_vanilla_rope_has_nothing_to_widen():
    with raises_for("spread"):
        comrope.RotaryEmbedding("rope", num_heads=2, head_dim=32, spread=2.0)


def test_labels():
    assert label("comrope-ld") == "ComRoPE-LD"
    assert len({label(name) for name in comrope.METHODS}) == len(comrope.METHODS)


@pytest.mark.parametrize(
    ("method", "init", "options"),
    [
        ("rope", "normal", {"base": 100.0, "position_scale": 14.0}),
        ("rope", "rope", {"frequencies": [1.0, 0.5] * 6}),
        ("comrope-ld", "normal", {"spread": 2.0}),
        ("comrope-torus", "rope-random-axes", {"base": 10.0}),
    ],
)
def test_a_pickle_of_version_0_1_is_read(method, init, options):
    """It had the name and the numbers of an initialization as attributes."""
    rope = make(method, init=init, **options)
    state = rope.method.__getstate__()
    state |= {"spread": 1.0, "base": 10000.0, "position_scale": (1.0, 1.0), **options}
    state |= {"is_vanilla": init != "normal" or method == "rope"}
    state["given_frequencies"] = options.get("frequencies")
    state["init"] = {"rope-random-axes": "turned"}.get(init, init)
    for newer in ("shared_heads", "log_frequencies"):
        del state[newer]
    read = type(rope.method).__new__(type(rope.method))
    read.__setstate__(state)
    assert torch.equal(read.angles().matrices(), rope.angle_matrices())
    torch.manual_seed(1)
    read.reset_parameters()
    torch.manual_seed(1)
    rope.reset_parameters()
    assert torch.equal(read.angles().matrices(), rope.angle_matrices())
