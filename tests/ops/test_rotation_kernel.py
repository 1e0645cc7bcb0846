"""The Triton rotation against the float64 reference: on a GPU where there is one, else interpreted.

Every tensor that a kernel is to fill is full of NaN beforehand, in all tests.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import (
    COMMUTING,
    DEVICE,
    fits,
    make,
    queries_and_keys,
    relative_error,
    scores_and_gradients,
    set_frequencies,
)
from helpers import assert_kernel_parity as assert_parity
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")


@pytest.mark.parametrize("block_size", [3, 8])
@pytest.mark.parametrize("name", COMMUTING)
def test_it_agrees_with_the_spectral_path_for_any_gradient(name, block_size):
    """Not only for those that come from scores, in which some of the sums cancel."""
    rope = make(name, block_size=block_size, dtype=torch.float32, head_dim=4 * block_size)
    rope.to(DEVICE)
    q, k = (x.detach().float().to(DEVICE) for x in queries_and_keys(rope))
    positions = torch.rand(2, 6, 2, device=DEVICE)
    grads = torch.randn_like(q), torch.randn_like(k)

    def outcome(backend):
        rope.backend = backend
        inputs = [x.clone().requires_grad_() for x in (q, k, positions)]
        out = rope(*inputs)
        return [*out, *torch.autograd.grad(out, [*inputs, *rope.parameters()], grads)]

    for got, expected in zip(outcome("triton"), outcome("spectral"), strict=True):
        assert relative_error(got, expected) < 3e-6


@pytest.mark.parametrize("init", ["normal", "zeros", "rope"])
@pytest.mark.parametrize("name", COMMUTING)
def test_every_start(name, init):
    if not fits(name, init=init):
        pytest.skip(f"{name} cannot start at {init}")
    assert_parity(make(name, block_size=8, head_dim=16, init=init), torch.rand(6, 2))


@pytest.mark.parametrize(
    ("block_size", "head_dim", "num_axes"),
    [(2, 32, 1), (2, 48, 3), (3, 15, 1), (4, 72, 2), (6, 48, 2), (8, 80, 1), (8, 96, 3),
     (16, 128, 2), (32, 256, 2), (64, 64, 1), (4, 64, 4)],
)  # fmt: skip
def test_every_size(block_size, head_dim, num_axes):
    """Of the method that asks most of the kernels; others meet random shapes below."""
    rope = make(
        "comrope-ld", num_heads=1, block_size=block_size, head_dim=head_dim, num_axes=num_axes
    )
    assert_parity(rope, torch.rand(6, num_axes), within=4e-6)


@pytest.mark.parametrize(("per_sample", "order"), [(False, "heads"), (True, "tokens")])
@pytest.mark.parametrize("name", COMMUTING)
def test_groups_strides_and_positions(name, per_sample, order):
    rope = make(name, block_size=4, head_dim=24)
    positions = torch.rand(*((3,) if per_sample else ()), 23, 2)
    assert_parity(rope, positions, groups=3, tokens=23, batch=3, order=order)


@pytest.mark.parametrize(
    ("name", "channel_order"),
    [("rope-mixed", "interleaved"), ("rope-mixed", "half"), ("comrope-ld", "interleaved"),
     ("comrope-ld", "half"), ("liere", "interleaved")],
)  # fmt: skip
@pytest.mark.parametrize("given_rows", ["all", "without prefix"])
def test_prefix_tokens_and_channel_orders(name, given_rows, channel_order):
    rope = make(name, head_dim=16, num_prefix_tokens=2, channel_order=channel_order)
    rows = 6 if given_rows == "all" else 4
    assert_parity(rope, torch.rand(rows, 2), groups=2)


@given(
    block_size=st.sampled_from([2, 3, 4, 5, 8, 16]),
    blocks=st.integers(1, 5),
    heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 40),
    axes=st.integers(1, 4),
    per_sample=st.booleans(),
    name=st.sampled_from(["rope-mixed", "comrope-ld", "comrope-torus"]),
)
@settings(max_examples=10, deadline=None)
def test_random_shapes(block_size, blocks, heads, groups, batch, tokens, axes, per_sample, name):
    rope = make(
        name, num_heads=heads, block_size=block_size, head_dim=block_size * blocks, num_axes=axes
    )
    positions = torch.rand(*((batch,) if per_sample else ()), tokens, axes)
    assert_parity(rope, positions, groups=groups, batch=batch, tokens=tokens, within=5e-6)


@pytest.mark.parametrize(
    "frequencies", [[1.0, 1, 1, 1], [0, 0, 0, 0], [2, 2, 0, 0], [1, 1 + 1e-3, 1e-4, 0]]
)
@pytest.mark.parametrize("name", ["comrope-ap", "comrope-ld"])
def test_repeated_and_vanishing_frequencies(name, frequencies):
    rope = make(name, block_size=8, head_dim=16)
    set_frequencies(rope, torch.tensor(frequencies))
    assert_parity(rope, torch.rand(6, 2), within=1e-5)


def test_several_programs_share_the_rows():
    """More tiles than one, rows left over: all sums meet."""
    rope = make("comrope-ld", num_heads=1, block_size=8, head_dim=16)
    assert_parity(rope, torch.rand(3, 101, 2), tokens=101, batch=3, within=4e-6)


def test_gradients_have_the_same_bits_every_time():
    rope = make("comrope-ld", dtype=torch.float32, block_size=8, head_dim=16).to(DEVICE)
    q, k = (x.detach().float().to(DEVICE) for x in queries_and_keys(rope, tokens=50, batch=3))
    positions = torch.rand(50, 2, device=DEVICE)
    q, k = q.requires_grad_(), k.requires_grad_()
    first = scores_and_gradients(rope, q, k, positions, "triton")
    again = scores_and_gradients(rope, q, k, positions, "triton")
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(("reach", "within"), [(8, 1e-7), (5e3, 2e-7), (6e4, 1e-6)])
def test_cosines_are_good_to_a_rounding(reach, within):
    """Through rope-mixed with frequency one, at angles up to ten thousand turns."""
    rope = make("rope-mixed", num_heads=1, num_axes=1, block_size=2, head_dim=16).float()
    torch.nn.init.ones_(rope.method.frequencies)
    rope.to(DEVICE).backend = "triton"
    angle = torch.linspace(-reach, reach, 4001)
    q = torch.zeros(1, 1, len(angle), 16)
    q[..., 0::2] = 1
    with torch.no_grad():
        turned, _ = rope(q.to(DEVICE), q.to(DEVICE), angle[:, None].to(DEVICE))
    turned = turned[0, 0].double().cpu()
    assert (turned[:, 0] - angle.double().cos()).abs().max() < within
    assert (turned[:, 1] - angle.double().sin()).abs().max() < within


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", COMMUTING)
def test_low_precision_is_within_its_own_noise(name, dtype, size):
    """No worse than twice what rounding inputs and outputs of an exact rotation costs.

    With small angles too, where frequencies nearly repeat.
    """
    rope = make(name, dtype=torch.float32, block_size=8, head_dim=64, num_heads=4).cuda()
    with torch.no_grad():
        for parameter in rope.parameters():
            parameter *= size
    q, k = (x.detach().cuda().to(dtype) for x in queries_and_keys(rope, tokens=197, batch=16))
    positions = torch.rand(16, 197, 2, device="cuda")
    exact = [x.double().requires_grad_() for x in (q, k)]
    low = [x.clone().requires_grad_() for x in (q, k)]
    expected = scores_and_gradients(rope.double(), *exact, positions.double(), "reference")
    got = scores_and_gradients(rope.float(), *low, positions, "triton")
    plain = [x.clone().requires_grad_() for x in (q, k)]
    spectral = scores_and_gradients(rope, *plain, positions, "spectral")
    for key, value in expected.items():
        error, limit = (relative_error(x[key].double(), value) for x in (got, spectral))
        assert error < 2 * limit + torch.finfo(dtype).eps, (key, error, limit)


@pytest.mark.parametrize("name", ["comrope-ld", "comrope-torus"])
def test_products_of_low_precision(name, monkeypatch):
    """What float16 inputs get, on float32 inputs: it errs, and by no more than so."""
    from comrope.ops.kernels import launch

    monkeypatch.setitem(launch.PRECISIONS, torch.float32, "tf32")
    rope = make(name, block_size=16, head_dim=32)
    positions = torch.rand(2, 40, 2)
    with pytest.raises(AssertionError):
        assert_parity(copy.deepcopy(rope), positions, tokens=40)
    assert_parity(rope, positions, tokens=40, within=1e-3)
