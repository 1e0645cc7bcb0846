"""RotaryEmbedding as a module: dtypes, shapes, states, transforms."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from helpers import LEARNED, fits, make, queries_and_keys, raises_for, relative_error

import comrope
from comrope.analysis import scores
from comrope.angles import skew_spectrum
from comrope.ops.layout import halves_to_neighbours

LOW = [torch.bfloat16, torch.float16]


def single(method: str, **options) -> comrope.RotaryEmbedding:
    return make(method, dtype=torch.float32, block_size=8, **options)


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_inputs_are_rotated_in_float32(method, dtype):
    """Bit for bit: what a float32 rotation of the same numbers gives, rounded once."""
    rope = single(method)
    q, k = (x.detach().to(dtype) for x in queries_and_keys(rope))
    positions = 50 * torch.rand(6, 2)
    got = rope(q, k, positions)
    expected = rope(q.float(), k.float(), positions)
    for low, full in zip(got, expected, strict=True):
        assert low.dtype == dtype
        assert torch.equal(low, full.to(dtype))


@pytest.mark.parametrize("dtype", LOW)
def test_autocast_changes_nothing(method, dtype):
    rope = single(method)
    q, k = (x.detach().float().requires_grad_() for x in queries_and_keys(rope))
    positions = 50 * torch.rand(6, 2)

    def forward():
        out = rope(q, k, positions)
        return *out, rope.angle_matrices(), rope.rotation_matrices(positions)

    def backward(out):
        return torch.autograd.grad(sum(x.square().mean() for x in out[:2]), (q, k))

    expected = forward()
    with torch.autocast("cpu", dtype=dtype):
        got = forward()
    for a, b in zip((*got, *backward(got)), (*expected, *backward(expected)), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_phases_are_float32_sums_of_position_times_frequency():
    """Bit for bit at positions where bfloat16 would be wrong by whole turns."""
    rope = comrope.RotaryEmbedding(
        "rope-mixed", num_heads=1, head_dim=8, num_axes=2, block_size=2, dtype=torch.bfloat16
    )
    positions = torch.tensor([[1000.3, 77.7], [3.1, 2048.5]])
    w = rope.method.frequencies.detach().float()[:, 0, :, 0]  # (N, m)
    angle = positions[:, :1] * w[0] + positions[:, 1:] * w[1]
    q = torch.zeros(1, 1, 2, 8)
    q[..., 0::2] = 1.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rotated = rope(q, q, positions)[0][0, 0]
    assert torch.equal(rotated[:, 0::2], angle.cos())
    assert torch.equal(rotated[:, 1::2], angle.sin())


@pytest.mark.parametrize("method", LEARNED)
def test_bfloat16_modules_keep_their_gradients(method):
    rope = single(method)
    q, k = queries_and_keys(rope, tokens=30)
    positions = torch.rand(30, 2)
    rope.bfloat16()
    narrow = [x.detach().bfloat16().requires_grad_() for x in (q, k)]
    scores(rope, *narrow, positions).tanh().sum().backward()
    low = [p.grad.double() for p in rope.parameters()]
    rope.zero_grad()
    rope.double()
    wide = [x.detach().double().requires_grad_() for x in narrow]
    scores(rope, *wide, positions.double()).tanh().sum().backward()
    for a, p in zip(low, rope.parameters(), strict=True):
        assert relative_error(a, p.grad) < 0.03


@pytest.mark.parametrize("method", [m for m in comrope.METHODS if fits(m, num_axes=1)])
def test_low_precision_modules_have_wide_angles(method):
    rope = single(method, num_axes=1).bfloat16()
    assert rope.angle_matrices().dtype == torch.float32
    assert {part.dtype for part in rope.spectrum()} == {torch.float32}


def test_the_widest_dtype_that_comes_in_is_computed_in(commuting):
    """Positions in float64 keep their digits, also with float32 queries and parameters."""
    rope = single(commuting)
    q, k = (x.detach().float() for x in queries_and_keys(rope))
    positions = torch.rand(6, 2, dtype=torch.float64)
    near, far = scores(rope, q, k, positions), scores(rope, q, k, positions + 1e6)
    assert relative_error(far, near) < 1e-5
    rounded = scores(rope, q, k, (positions + 1e6).float())
    assert relative_error(rounded, near) > 1e-3 or commuting == "rope"
    assert rope(q, k, positions)[0].dtype == torch.float32
    assert rope.rotation_matrices(positions).dtype == torch.float64


def test_backward_under_autocast_keeps_its_precision():
    rope = single("comrope-ld")
    q, k = (x.detach().float().requires_grad_() for x in queries_and_keys(rope))
    positions = torch.rand(6, 2)
    inputs = [q, k, *rope.parameters()]
    loss = sum(x.pow(3).mean() for x in rope(q, k, positions))
    expected = torch.autograd.grad(loss, inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(loss, inputs)
    torch.testing.assert_close(got, expected)


def test_strided_inputs(method):
    """Views of a packed qkv, as attention layers have them, and their gradients."""
    rope = make(method)
    packed = torch.randn(2, 6, 3, 2, rope.head_dim, dtype=torch.float64, requires_grad=True)
    q, k, _ = packed.permute(2, 0, 3, 1, 4).unbind(0)
    assert not q.is_contiguous()
    positions = torch.rand(2, 6, 2, dtype=torch.float64)
    strided = rope(q, k, positions)
    dense = rope(q.contiguous(), k.contiguous(), positions)
    torch.testing.assert_close(strided, dense)
    a = torch.autograd.grad((strided[0] @ strided[1].mT).tanh().sum(), packed)[0]
    b = torch.autograd.grad((dense[0] @ dense[1].mT).tanh().sum(), packed)[0]
    torch.testing.assert_close(a, b)


def test_hardly_any_tokens(method):
    for block_size, batch, tokens in ((3, 0, 1), (4, 1, 0), (3, 1, 1), (4, 2, 1), (4, 2, 0)):
        rope = make(method, block_size=block_size)
        q, k = queries_and_keys(rope, tokens=tokens, batch=batch)
        positions = torch.rand(batch, tokens, 2, dtype=torch.float64)
        out = rope(q, k, positions)
        assert out[0].shape == q.shape
        assert out[1].shape == k.shape
        sum(x.square().sum() for x in out).backward()
        assert q.grad.shape == q.shape
        for p in rope.parameters():
            assert p.grad.isfinite().all()


def test_positions_per_sample_are_each_samples_own(method):
    rope = make(method)
    q, k = queries_and_keys(rope)
    positions = torch.rand(2, 6, 2, dtype=torch.float64)
    together = rope(q, k, positions)
    for i in range(2):
        alone = rope(q[i : i + 1], k[i : i + 1], positions[i])
        torch.testing.assert_close(together[0][i], alone[0][0])
        torch.testing.assert_close(together[1][i], alone[1][0])


def test_a_batch_of_one_set_of_positions_serves_all(method):
    rope = make(method)
    q, k = queries_and_keys(rope)
    positions = torch.rand(6, 2, dtype=torch.float64)
    torch.testing.assert_close(rope(q, k, positions[None]), rope(q, k, positions))


def test_integer_positions(method):
    rope = make(method)
    q, k = queries_and_keys(rope)
    positions = torch.arange(12).view(6, 2)
    torch.testing.assert_close(rope(q, k, positions), rope(q, k, positions.double()))


def test_prefix_tokens_are_left_unrotated(method):
    """Among them, standard attention; their rows of positions may be left out."""
    rope = make(method, num_prefix_tokens=2)
    q, k = queries_and_keys(rope, groups=1)
    positions = torch.rand(6, 2, dtype=torch.float64)
    short = rope(q, k, positions[2:])
    torch.testing.assert_close(short, rope(q, k, positions))
    got = short[0] @ short[1].mT
    torch.testing.assert_close(got[..., :2, :2], (q @ k.mT)[..., :2, :2])
    rotated = rope(q, k, positions, num_prefix_tokens=0)
    torch.testing.assert_close(got[..., 2:, 2:], (rotated[0] @ rotated[1].mT)[..., 2:, 2:])
    rope.num_prefix_tokens = 0
    torch.testing.assert_close(rotated, rope(q, k, positions))


def test_tokens_can_come_one_at_a_time(method):
    """As with a key cache: rotated alone or together, a token comes out the same."""
    rope = make(method)
    q, k = queries_and_keys(rope)
    positions = torch.rand(6, 2, dtype=torch.float64)
    together = rope(q, k, positions)[1]
    alone = [
        rope(q[:, :, t : t + 1], k[:, :, t : t + 1], positions[t : t + 1])[1] for t in range(6)
    ]
    torch.testing.assert_close(torch.cat(alone, dim=2), together)


def test_half_order_is_a_permutation_of_channels(method):
    half, neighbours = make(method, channel_order="half"), make(method)
    neighbours.load_state_dict(half.state_dict())
    q, k = queries_and_keys(half)
    order = torch.arange(half.method.head_dim).view(2, -1).mT.flatten()
    positions = torch.rand(6, 2, dtype=torch.float64)
    got = half(q, k, positions)
    expected = neighbours(q[..., order], k[..., order], positions)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a[..., order], b)


def test_meta_construction_then_materialisation(method):
    with torch.device("meta"):
        rope = comrope.RotaryEmbedding(method, num_heads=2, head_dim=48, block_size=4)
    assert all(p.is_meta for p in rope.parameters())
    rope.to_empty(device="cpu")
    torch.manual_seed(5)
    rope.reset_parameters()
    torch.manual_seed(5)
    direct = comrope.RotaryEmbedding(method, num_heads=2, head_dim=48, block_size=4)
    torch.testing.assert_close(rope.angle_matrices(), direct.angle_matrices(), rtol=0, atol=0)
    q, k = torch.randn(1, 2, 3, 48), torch.randn(1, 2, 3, 48)
    positions = torch.rand(3, 2)
    torch.testing.assert_close(rope(q, k, positions), direct(q, k, positions), rtol=0, atol=0)


def test_deepcopy_and_state_dict_round_trip(method):
    rope = make(method)
    q, k = queries_and_keys(rope)
    positions = torch.rand(6, 2, dtype=torch.float64)
    expected = rope(q, k, positions)
    fresh = make(method)
    fresh.load_state_dict(rope.state_dict(), strict=True)
    for other in (copy.deepcopy(rope), fresh):
        torch.testing.assert_close(other(q, k, positions), expected, rtol=0, atol=0)


def test_spectrum_rebuilds_the_angle_matrices(commuting):
    for block_size, axes in itertools.product((2, 3, 8), (2, 3)):
        if not fits(commuting, num_axes=axes):
            continue
        rope = make(commuting, block_size=block_size, num_axes=axes)
        basis, frequencies = rope.spectrum()
        assert basis.shape == (2, 12, block_size, block_size)
        assert frequencies.shape == (axes, 2, 12, block_size // 2)
        planes = torch.zeros(axes, 2, 12, block_size, block_size, dtype=torch.float64)
        for f in range(block_size // 2):
            planes[..., 2 * f + 1, 2 * f] = frequencies[..., f]
            planes[..., 2 * f, 2 * f + 1] = -frequencies[..., f]
        torch.testing.assert_close(basis @ planes @ basis.mT, rope.angle_matrices())


def test_the_result_is_that_of_the_spectrum(commuting):
    """q' = Rot(phi) Q^T q, written out: folding Q into the projections relies on it."""
    for block_size in (2, 3, 8):
        rope = make(commuting, block_size=block_size)
        q, k = queries_and_keys(rope, groups=1)
        positions = torch.rand(6, 2, dtype=torch.float64)
        basis, frequencies = rope.spectrum()
        inner = torch.einsum("hmij,bhtmi->bhtmj", basis, q.unflatten(-1, (12, block_size)))
        phase = torch.einsum("tn,nhmf->htmf", positions, frequencies)
        expected = inner.clone()
        for f in range(block_size // 2):
            a, b, angle = inner[..., 2 * f], inner[..., 2 * f + 1], phase[..., f]
            expected[..., 2 * f] = a * angle.cos() - b * angle.sin()
            expected[..., 2 * f + 1] = a * angle.sin() + b * angle.cos()
        torch.testing.assert_close(rope(q, k, positions)[0], expected.flatten(-2))


def test_no_angle_is_decayed(method):
    rope = make(method)
    assert rope.no_weight_decay() == set(dict(rope.named_parameters()))


def test_frozen_angles_cost_no_gradient():
    rope = make("comrope-ld", block_size=8).requires_grad_(False)
    q, k = queries_and_keys(rope)
    positions = torch.rand(6, 2, dtype=torch.float64)
    frozen = torch.autograd.grad(scores(rope, q, k, positions).tanh().sum(), (q, k))
    rope.requires_grad_(True)
    learned = torch.autograd.grad(scores(rope, q, k, positions).tanh().sum(), (q, k))
    torch.testing.assert_close(frozen, learned)


def test_vmap_over_inputs_is_a_loop(method):
    rope = make(method, block_size=3)
    q, k = (torch.stack(x) for x in zip(*(queries_and_keys(rope) for _ in range(3)), strict=True))
    positions = torch.rand(3, 6, 2, dtype=torch.float64)
    got = torch.func.vmap(rope)(q, k, positions)
    for i in range(3):
        expected = rope(q[i], k[i], positions[i])
        torch.testing.assert_close((got[0][i], got[1][i]), expected)


def test_vmap_of_the_spectrum_over_any_dimension():
    skew = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    skew = skew - skew.mT
    expected = skew_spectrum(skew)
    for dim in (0, 1):
        got = torch.func.vmap(skew_spectrum, in_dims=dim, out_dims=dim)(skew)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("method", LEARNED)
def test_an_ensemble_through_functional_call_and_vmap(method):
    """torch.func's own recipe: gradients of several models at once."""
    ropes = [make(method, block_size=5) for _ in range(3)]
    q, k = (x.detach() for x in queries_and_keys(ropes[0], groups=1))
    positions = torch.rand(6, 2, dtype=torch.float64)
    parameters, _ = torch.func.stack_module_state(ropes)

    def loss(state):
        out = torch.func.functional_call(ropes[0], state, (q, k, positions))
        return (out[0] @ out[1].mT).tanh().sum()

    together = torch.func.vmap(torch.func.grad(loss))(parameters)
    for i, rope in enumerate(ropes):
        state = dict(rope.named_parameters())
        alone = torch.autograd.grad(loss(state), list(state.values()))
        for name, value in zip(state, alone, strict=True):
            torch.testing.assert_close(together[name][i], value)


def test_sizes_are_attributes(method):
    for axes in [axes for axes in (2, 3) if fits(method, num_axes=axes)]:
        rope = make(method, num_axes=axes, num_heads=3, block_size=4)
        sizes = (rope.name, rope.num_heads, rope.head_dim, rope.num_axes, rope.block_size)
        assert sizes == (method, 3, 48, axes, 4)


def test_the_constructor_computes_no_angles(method, monkeypatch):
    monkeypatch.setattr(comrope.RotaryEmbedding, "angles", None)
    make(method)


@pytest.mark.parametrize("order", ["interleaved", "half"])
def test_keys_of_another_length_at_their_own_positions(method, order):
    """Cross-attention, by definition: scores of R(x) q and R(y) k, in values and gradients."""
    rope = make(method, channel_order=order)
    q = torch.randn(2, 4, 5, rope.head_dim, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 2, 7, rope.head_dim, dtype=torch.float64, requires_grad=True)
    x, y = torch.rand(5, 2, dtype=torch.float64), torch.rand(2, 7, 2, dtype=torch.float64)
    rotated = rope(q, k, x, key_positions=y)
    got = rotated[0] @ rotated[1].repeat_interleave(2, dim=1).mT

    def by_matrices(vectors, positions):
        vectors = halves_to_neighbours(vectors) if order == "half" else vectors
        blocks = vectors.unflatten(-1, (-1, rope.block_size))
        matrices = rope.rotation_matrices(positions).repeat_interleave(q.shape[1] // 2, dim=-4)
        return torch.einsum("...thmij,bhtmj->bhtmi", matrices, blocks).flatten(-2)

    def of_samples(vectors, positions):
        return torch.cat([by_matrices(v[None], p) for v, p in zip(vectors, positions, strict=True)])

    keys = k.repeat_interleave(2, dim=1)
    expected = by_matrices(q, x) @ of_samples(keys, y).mT
    assert relative_error(got, expected) < 1e-12
    wanted = [q, k, *rope.parameters()]
    pairs = zip(
        torch.autograd.grad(got.tanh().sum(), wanted),
        torch.autograd.grad(expected.tanh().sum(), wanted),
        strict=True,
    )
    assert all(relative_error(a, b) < 1e-9 for a, b in pairs)


def test_wrong_positions_of_keys():
    rope = make("comrope-ld")
    q = torch.zeros(2, 2, 5, rope.head_dim)
    k = torch.zeros(2, 2, 7, rope.head_dim)
    with raises_for("k", naming="key_positions"):
        rope(q, k, torch.rand(5, 2))
    for wrong in (torch.rand(5, 2), torch.rand(7, 3), torch.rand(3, 7, 2), torch.rand(7)):
        with raises_for("key_positions"):
            rope(q, k, torch.rand(5, 2), key_positions=wrong)
    with raises_for("k", naming="batch"):
        rope(q, k[:1], torch.rand(5, 2), key_positions=torch.rand(7, 2))
