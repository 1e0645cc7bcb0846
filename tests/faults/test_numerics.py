"""Positions far from the origin, and tensors that do not fit together: exact, or an error."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import make, raises_for, relative_error

import comrope
from comrope import METHODS
from comrope.analysis import scores
from comrope.angles import GeneralAngles
from comrope.ops.reference import LARGEST, rotation_matrices

SIZES = (2, 3, 4, 8, 16)
FAR = [10.0**power for power in range(10)]


def orthogonality(rotations: torch.Tensor) -> float:
    rotations = rotations.detach().double()
    eye = torch.eye(rotations.shape[-1], dtype=torch.float64)
    return float((rotations @ rotations.mT - eye).abs().max())


def far_case(distance: float, method: str = "liere", **options):
    rope = make(method, dtype=torch.float32, **options)
    q, k = torch.randn(2, 1, 2, 5, rope.head_dim).unbind(0)
    return rope, q, k, distance * (0.5 + torch.rand(5, 2) / 2)


# Far from the origin


@pytest.mark.parametrize("distance", FAR)
@pytest.mark.parametrize("size", SIZES)
def test_liere_is_orthogonal_at_every_distance(size, distance):
    rope, q, k, positions = far_case(distance, block_size=size)
    rotations = rope.rotation_matrices(positions)
    assert orthogonality(rotations) < 1e-4
    for x, rotated in zip((q, k), rope(q, k, positions), strict=True):
        torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", METHODS)
def test_the_reference_is_orthogonal_at_every_distance(name):
    for distance in FAR:
        rope, q, k, positions = far_case(distance, name, backend="reference")
        assert orthogonality(rope.rotation_matrices(positions)) < 1e-4
        assert rope(q, k, positions)[0].isfinite().all()


@pytest.mark.parametrize("distance", [1e2, 1e3, 1e4, 1e5])
def test_liere_is_as_exact_as_vanilla_rope_from_the_same_start(distance):
    """Positions are integers, so their product with a frequency of one is exact."""
    errors = {}
    for name in ("rope", "liere"):
        torch.manual_seed(0)
        rope, q, k, _ = far_case(1.0, name, init="rope", block_size=8)
        positions = distance + torch.arange(10.0).reshape(5, 2)
        expected = scores(make(name, init="rope", block_size=8), q.double(), k.double(),
                          positions.double())  # fmt: skip
        errors[name] = (scores(rope, q, k, positions) - expected).abs().max().item()
    assert errors["liere"] < 10 * errors["rope"] + 1e-4


PLANE = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
EXPONENTS = {
    "random": torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1)),
    "equal frequencies": torch.block_diag(PLANE, PLANE)[None],
    "one is zero": torch.block_diag(PLANE, 0 * PLANE)[None],
    "all are zero": torch.zeros(1, 4, 4),
}


@pytest.mark.parametrize("distance", [1.0, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("kind", EXPONENTS)
def test_gradients_are_those_of_float64(kind, distance):
    exponents = distance * (EXPONENTS[kind] - EXPONENTS[kind].mT)
    weights = torch.randn(exponents.shape)

    def gradient(dtype):
        matrices = exponents.to(dtype).requires_grad_()
        rotations = rotation_matrices(matrices[None, None], torch.ones(1, 1, dtype=dtype))
        (found,) = torch.autograd.grad((rotations[0, 0] * weights.to(dtype)).sum(), matrices)
        return (found - found.mT).double()

    assert relative_error(gradient(torch.float32), gradient(torch.float64)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("distance", [1.0, 1e5, 1e9])
def test_compiled_and_exported_are_the_same_bits(distance):
    torch._dynamo.reset()
    rope, q, k, positions = far_case(distance)
    positions.requires_grad_()
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")

    def gradients(function):
        outputs = function(q, k, positions)
        loss = sum((x * x.roll(1, 2)).sum() for x in outputs)
        return *outputs, *torch.autograd.grad(loss, [positions, *rope.parameters()])

    expected = gradients(rope)
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled), expected, strict=True))
    with torch.no_grad():
        exported = torch.export.export(rope, (q, k, positions.detach())).module()
        assert torch.equal(exported(q, k, positions.detach())[0], expected[0])


def test_vmap_is_orthogonal_too():
    rope, q, k, positions = far_case(1e8)
    got = torch.func.vmap(lambda x: rope(q, k, x)[0])(positions[None])[0]
    torch.testing.assert_close(got, rope(q, k, positions)[0])
    far = torch.func.vmap(lambda x: rope(q, k, x)[0])(1e5 * positions[None])
    assert far.isnan().all()


def test_near_tokens_do_not_depend_on_far_ones():
    rope, q, k, positions = far_case(1.0)
    positions[3:] = 1e9
    together = rope(q, k, positions)[0][:, :, :3]
    torch.testing.assert_close(together, rope(q[:, :, :3], k[:, :, :3], positions[:3])[0])


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_positions_too_far_for_float64_are_refused(backend, mode):
    rope, q, k, positions = far_case(1e13, backend=backend)
    call = torch.compile(rope, fullgraph=True, backend="aot_eager") if mode == "compiled" else rope
    for wide in (positions, positions.double()):
        with raises_for("positions"):
            call(q, k, wide)
    with raises_for("positions"):
        rope.rotation_matrices(positions)


def test_ordinary_exponents_stay_in_float32():
    """The bits of earlier versions: those of a plain matrix exponential."""
    matrices = torch.randn(2, 1, 3, 8, 8)
    matrices = matrices - matrices.mT
    positions = 3 * torch.rand(7, 2)
    exponents = sum(positions[:, axis, None, None, None, None] * matrices[axis] for axis in (0, 1))
    assert exponents.max() < LARGEST[torch.float32]
    expected = torch.matrix_exp(exponents.flatten(0, 2)).view_as(exponents)
    assert torch.equal(rotation_matrices(matrices, positions), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_matrix_of_liere_gives_nan_and_not_an_error(value):
    rope, q, k, positions = far_case(1.0)
    with torch.no_grad():
        rope.method.P[:, 0, 0, 0, 1] = value
    got = rope(q, k, positions)[0]
    assert got[:, 0, :, :4].isnan().all()
    assert got[:, 0, :, 4:].isfinite().all()
    assert got[:, 1].isfinite().all()


# Positions that are not finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_positions_that_are_not_finite_are_refused(method, dtype, value):
    rope, q, k, positions = far_case(1.0, method)
    positions = positions.to(dtype)
    positions[2, 1] = value
    for call in (
        rope,
        lambda q, k, x: rope.rotate(q, x),
        lambda q, k, x: rope.rotation_matrices(x),
    ):
        with raises_for("positions"):
            call(q, k, positions)


def test_finite_positions_with_an_infinite_sum_are_not_refused():
    for dtype in (torch.float16, torch.float32):
        comrope.shift(torch.full((9, 2), torch.finfo(dtype).max, dtype=dtype), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_compiled_they_give_nan_at_their_token_only(method, value):
    """A graph has no values to check."""
    torch._dynamo.reset()
    rope, q, k, positions = far_case(1.0, method)
    positions[2] = value
    got = torch.compile(rope, fullgraph=True, backend="aot_eager")(q, k, positions)[0]
    assert got[:, :, 2].isnan().any()
    assert got[:, :, [0, 1, 3, 4]].isfinite().all()


# Devices, dtypes, angles


def tensors(method: str, device: str = "cpu"):
    rope = make(method, dtype=torch.float32)
    q, k = torch.randn(2, 1, 2, 5, rope.head_dim, device=device).unbind(0)
    return rope, {"q": q, "k": k, "positions": torch.rand(5, 2, device=device)}


@pytest.mark.parametrize("elsewhere", [c for n in (1, 2) for c in itertools.combinations("qkx", n)])
def test_tensors_on_several_devices_are_refused(method, elsewhere):
    rope, given = tensors(method)
    for name in elsewhere:
        label = "positions" if name == "x" else name
        given[label] = given[label].to("meta")
    # Compared with q: the first of the others that differs from it.
    named = "k" if (("k" in elsewhere) != ("q" in elsewhere)) else "positions"
    with raises_for(named):
        rope(**given)


def test_a_module_on_another_device_is_refused(method):
    rope, given = tensors(method, "meta")
    packed = torch.empty(1, 5, 6, rope.head_dim, device="meta")
    calls = {
        "forward": lambda: rope(**given),
        "rotate": lambda: rope.rotate(given["q"], given["positions"]),
        "inverse": lambda: rope.rotate(given["q"], given["positions"], inverse=True),
        "rotate_qkv": lambda: rope.rotate_qkv(packed, given["positions"]),
    }
    for call in calls.values():
        with raises_for("the module", naming="meta"):
            call()
    with raises_for("positions", naming="meta"):
        rope.rotation_matrices(given["positions"])
    rope.to("meta")
    assert all(call() is not None for call in calls.values())


def test_angles_on_another_device_are_refused(method):
    rope, given = tensors(method)
    elsewhere = make(method, dtype=torch.float32, device="meta").angles()
    with raises_for("angles", naming="meta"):
        rope(**given, angles=elsewhere)
    rope(**given, angles=rope.angles())


@pytest.mark.parametrize(
    "changes", [{"num_heads": 1}, {"num_axes": 1}, {"num_axes": 3}, {"head_dim": 24}]
)
def test_angles_of_another_size_are_refused(method, changes):
    rope, given = tensors(method)
    other = make(method, dtype=torch.float32, **changes)
    with raises_for("angles"):
        rope(**given, angles=other.angles())


@pytest.mark.parametrize("angles", ["angles", 3, torch.zeros(2), (torch.zeros(2),)])
def test_angles_that_are_no_angles_are_refused(angles):
    rope, given = tensors("liere")
    with raises_for("angles", TypeError):
        rope(**given, angles=angles)
    rope(**given, angles=GeneralAngles(rope.angle_matrices()))


NARROW = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]


@pytest.mark.parametrize("dtype", [*NARROW, torch.complex64, torch.complex128, torch.bool])
def test_dtypes_without_arithmetic_are_refused(dtype):
    rope, given = tensors("comrope-ld")
    for name, good in given.items():
        with raises_for(name, naming=str(dtype)):
            rope(**{**given, name: torch.ones(good.shape).to(dtype)})
    with raises_for("qkv", naming=str(dtype)):
        rope.rotate_qkv(torch.ones(1, 5, 6, rope.head_dim).to(dtype), given["positions"])
    with raises_for("positions", naming=str(dtype)):
        comrope.shift(torch.ones(5, 2).to(dtype), 1.0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_are_positions_but_not_vectors(dtype):
    rope, given = tensors("comrope-ld")
    integers = torch.arange(10).reshape(5, 2)
    expected = rope(**{**given, "positions": integers.float()})
    assert torch.equal(rope(**{**given, "positions": integers.to(dtype)})[0], expected[0])
    for name in ("q", "k"):
        with raises_for(name, naming=str(dtype)):
            rope(**{**given, name: given[name].to(dtype)})


# Sizes


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_no_samples_and_no_tokens(method, backend):
    rope, given = tensors(method)
    rope.backend = backend
    q, k, x = given.values()
    for batch, tokens in ((0, 5), (1, 0), (0, 0)):
        positions = [x[:tokens], x[None, :tokens].expand(batch, -1, -1)]
        for where in positions:
            out = rope(q[:batch, :, :tokens], k[:batch, :, :tokens], where)
            assert out[0].shape == (batch, 2, tokens, rope.head_dim)
    assert rope.rotation_matrices(x[:0]).shape[0] == 0


@pytest.mark.parametrize(
    "wrong",
    [torch.tensor(1.0), torch.zeros(0), torch.zeros(2), torch.zeros(5, 0), torch.zeros(0, 2)],
)
def test_positions_of_other_sizes_are_refused(method, wrong):
    rope, given = tensors(method)
    with raises_for("positions"):
        rope(**{**given, "positions": wrong})
