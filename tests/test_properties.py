"""What must hold for any method, size, parameter and position (Hypothesis)."""

from __future__ import annotations

import pytest
import torch
from helpers import COMMUTING, fits, make, queries_and_keys
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from comrope import METHODS
from comrope.analysis import commutator_norms, rope_equation_error, scores

settings.register_profile(
    "comrope",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much],  # of methods that fit few sizes
)
settings.load_profile("comrope")

sizes = st.fixed_dictionaries(
    {
        "num_axes": st.integers(1, 4),
        "block_size": st.sampled_from([2, 3, 4, 5, 8]),
        "num_heads": st.integers(1, 3),
        "init": st.sampled_from(["normal", "zeros", "rope"]),
    }
)
seeds = st.integers(0, 2**31)


def draw(name, size, seed, spread=3.0):
    assume(fits(name, num_axes=size["num_axes"], init=size["init"]))
    torch.manual_seed(seed)
    rope = make(name, **size)
    return rope, (spread * torch.randn(5, size["num_axes"], dtype=torch.float64) for _ in "xy")


@pytest.mark.parametrize("name", METHODS)
@given(size=sizes, seed=seeds)
def test_rotations_are_special_orthogonal_and_start_at_the_identity(name, size, seed):
    rope, (x, _) = draw(name, size, seed)
    rotations = rope.rotation_matrices(x)
    eye = torch.eye(size["block_size"], dtype=torch.float64)
    assert (rotations @ rotations.mT - eye).abs().max() < 1e-12
    assert torch.linalg.det(rotations).sub(1).abs().max() < 1e-12
    assert (rope.rotation_matrices(0 * x) - eye).abs().max() == 0


@pytest.mark.parametrize("name", COMMUTING)
@given(size=sizes, seed=seeds)
def test_commuting_rotations_compose(name, size, seed):
    rope, (x, y) = draw(name, size, seed)
    both = rope.rotation_matrices(x) @ rope.rotation_matrices(y)
    assert (both - rope.rotation_matrices(x + y)).abs().max() < 1e-11
    assert rope_equation_error(rope, x, y).max() < 1e-11


@pytest.mark.parametrize("name", METHODS)
@given(size=sizes, seed=seeds)
def test_angle_matrices_stay_skew_and_commuting_while_they_learn(name, size, seed):
    rope, (x, _) = draw(name, size, seed)
    q, k = queries_and_keys(rope, tokens=5)
    parameters = list(rope.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.1) if parameters else None
    start = rope.angle_matrices().detach().clone()
    for _ in range(10 if optimizer else 0):
        optimizer.zero_grad()
        scores(rope, q.detach(), k.detach(), x).tanh().sum().backward()
        optimizer.step()
    matrices = rope.angle_matrices().detach()
    assert (matrices + matrices.mT).abs().max() < 1e-12
    if optimizer:
        assert (matrices - start).abs().max() > 1e-3
    if name in COMMUTING or size["num_axes"] == 1:
        assert commutator_norms(rope).max() < 1e-13
    elif size["block_size"] > 2:
        assert commutator_norms(rope).max() > 1e-3  # the negative control


@pytest.mark.parametrize("name", METHODS)
@given(size=sizes, seed=seeds, half=st.booleans(), prefix=st.integers(0, 5))
def test_norms_are_kept(name, size, seed, half, prefix):
    rope, (x, _) = draw(name, size, seed)
    rope.channel_order = "half" if half and rope.head_dim % 2 == 0 else "interleaved"
    q, k = queries_and_keys(rope, tokens=5)
    q_rotated, k_rotated = rope(q, k, x, num_prefix_tokens=prefix)
    torch.testing.assert_close(q_rotated.norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(k_rotated.norm(dim=-1), k.norm(dim=-1))


@pytest.mark.parametrize("name", METHODS)
@given(size=sizes, seed=seeds, per_sample=st.booleans(), prefix=st.integers(0, 2))
def test_scores_are_those_of_the_rotation_matrices(name, size, seed, per_sample, prefix):
    """The contract itself, from ``rotation_matrices`` alone and a loop over blocks."""
    rope, (x, y) = draw(name, size, seed)
    positions = torch.stack((x, y)) if per_sample else x
    q, k = queries_and_keys(rope, tokens=5 + prefix, groups=3)
    b = size["block_size"]
    rotations = rope.rotation_matrices(positions)
    eye = torch.eye(b, dtype=torch.float64)
    rotations = torch.cat((eye.expand_as(rotations[..., :prefix, :, :, :, :]), rotations), dim=-5)
    rotations = rotations if per_sample else rotations.expand(2, *rotations.shape)
    expected = torch.zeros(2, q.shape[1], 5 + prefix, 5 + prefix, dtype=torch.float64)
    for head in range(q.shape[1]):
        for block in range(12):
            channels = slice(b * block, b * (block + 1))
            r = rotations[:, :, head // 3, block]
            rq = (r @ q[:, head, :, channels, None])[..., 0]
            rk = (r @ k[:, head // 3, :, channels, None])[..., 0]
            expected[:, head] += rq @ rk.mT
    q_rotated, k_rotated = rope(q, k, positions, num_prefix_tokens=prefix)
    got = q_rotated @ k_rotated.repeat_interleave(3, dim=1).mT
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
