"""LieRE's rotation in Triton against float64: on a GPU where there is one, else interpreted.

Every tensor that a kernel is to fill is full of NaN beforehand, in all tests. Sizes are small: up
to 8 x 8 the interpreter takes an operation for every product of two entries.
"""

from __future__ import annotations

import pytest
import torch
from helpers import relative_error
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from comrope.ops.reference import rotate_reference

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps


def skew_exponential(matrices):
    from comrope.ops.kernels.exponential import skew_exponential

    return skew_exponential(matrices)


def rotate_free(*inputs):
    from comrope.ops.kernels.apply_rotation import rotate_free

    return rotate_free(*inputs)


def skew_part(matrix):
    return (matrix - matrix.mT) / 2


def skew_matrices(norms, size):
    """Skew-symmetric float32 matrices of these spectral norms."""
    matrices = skew_part(torch.randn(len(norms), size, size, dtype=torch.float64))
    length = torch.linalg.matrix_norm(matrices, 2)
    return (matrices * (torch.tensor(norms).double() / length)[:, None, None]).float()


def exponential_errors(matrices, gradient=True):
    """For every matrix: of exp, and of its gradient, relative to the gradient that comes in."""
    exact = matrices.double().requires_grad_()
    expected = torch.matrix_exp(exact)
    given_ = matrices.to(DEVICE).requires_grad_()
    got = skew_exponential(given_)
    error = (got.cpu() - expected).detach().abs().amax((1, 2))
    if not gradient:
        return error, None
    weights = torch.randn(matrices.shape)
    ours = torch.autograd.grad(got, given_, weights.to(DEVICE))[0].cpu().double()
    theirs = skew_part(torch.autograd.grad(expected, exact, weights.double())[0])
    return error, (ours - theirs).norm(dim=(1, 2)) / weights.norm(dim=(1, 2))


@pytest.mark.parametrize("size", [2, 3, 4, 6, 9, 16, 20, 32])
def test_exponential_of_every_size_and_norm(size):
    """As exact as a rounding of the matrix allows, each with as many squarings as it needs."""
    norms = [0.0, 1e-3, 1.0, 20.0, 200.0] if size != 6 else [0.0, 3.0]
    norms *= 7 if size == 2 else 1  # more than a program's
    value, gradient = exponential_errors(skew_matrices(norms, size))
    allowed = EPS * (4.0 + size / 4 + 2 * torch.tensor(norms))
    assert (value <= allowed).all(), value / allowed
    assert (gradient <= allowed).all(), gradient / allowed


def test_exponential_of_eight_by_eight():
    norms = [0.0, 0.1, 2.0, 50.0, 600.0]
    value, _ = exponential_errors(skew_matrices(norms, 8), gradient=False)
    allowed = EPS * (6.0 + 2 * torch.tensor(norms))
    assert (value <= allowed).all(), value / allowed


@pytest.mark.parametrize("size", [2, 3, 16])
def test_exponentials_of_large_matrices_are_orthogonal(size):
    """They have no exact phase any more, but they neither grow nor shrink."""
    large = skew_matrices([1e3, 1e5, 1e7, 1e9, 1e15], size)
    got = skew_exponential(large.to(DEVICE)).cpu().double()
    assert (got @ got.mT - torch.eye(size)).abs().max() < 1e-4
    ordinary = skew_matrices([50.0], size)  # with fewer than eight squarings
    beside = skew_exponential(torch.cat((large, ordinary)).to(DEVICE))[-1:]
    assert torch.equal(beside, skew_exponential(ordinary.to(DEVICE)))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # by numpy
@pytest.mark.parametrize("size", [4, 16])
def test_a_matrix_knows_nothing_of_its_neighbours(size):
    """Neither of large ones nor of those that are not finite, which come out as NaN."""
    alone = skew_matrices([0.5], size)
    among = torch.cat((skew_matrices([500.0], size), alone, alone * torch.nan, alone * torch.inf))
    got = skew_exponential(among.to(DEVICE)).cpu()
    assert torch.equal(got[1:2], skew_exponential(alone.to(DEVICE)).cpu())
    assert got[:2].isfinite().all()
    assert got[2:].isnan().any(-1).any(-1).all()


def inputs_of(
    batch=2, heads=2, groups=1, tokens=3, blocks=2, size=2, axes=2, per_sample=False, order="heads"
):
    """q, k, positions, skew in float64, q and k as the memory order has them."""
    dim = blocks * size
    if order == "packed":  # views of a projection, v among them
        packed = torch.randn(batch, tokens, (groups + 2) * heads, dim, dtype=torch.float64)
        q, k, _ = packed.split((groups * heads, heads, heads), dim=2)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    elif order == "channels":  # those of a token lie apart
        q = torch.randn(batch, heads * groups, dim, tokens, dtype=torch.float64).mT
        k = torch.randn(batch, heads, dim, tokens, dtype=torch.float64).mT
    else:
        q = torch.randn(batch, heads * groups, tokens, dim, dtype=torch.float64)
        k = torch.randn(batch, heads, tokens, dim, dtype=torch.float64)
    positions = 2 * torch.randn(*((batch,) if per_sample else ()), tokens, axes).double()
    skew = skew_part(torch.randn(axes, heads, blocks, size, size, dtype=torch.float64))
    return q, k, positions, skew


def outputs_and_gradients(rotate, inputs, needed=(True,) * 4):
    """q', k' and the gradients, from random ones, of the inputs needed."""
    inputs = [x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, needed, strict=True)]
    outputs = rotate(*inputs)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(inputs[0]) for x in outputs]
    loss = sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True))
    gradients = torch.autograd.grad(loss, [x for x in inputs if x.requires_grad])
    return [x.detach().cpu().double() for x in (*outputs, *gradients)]


def reference(q, k, positions, skew):
    blocks = [x.unflatten(-1, (-1, skew.shape[-1])).unflatten(1, (k.shape[1], -1)) for x in (q, k)]
    out = rotate_reference(*blocks, positions, skew_part(skew))  # and so its gradient
    return out[0].reshape(q.shape), out[1].reshape(k.shape)


def assert_parity(inputs, within=1e-5, dtype=torch.float32, needed=(True,) * 4, rotate=rotate_free):
    narrow = [x.to(DEVICE, dtype) for x in inputs[:2]] + [x.to(DEVICE).float() for x in inputs[2:]]
    expected = outputs_and_gradients(reference, [x.cpu().double() for x in narrow], needed)
    got = outputs_and_gradients(rotate, narrow, needed)
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        error = relative_error(ours, theirs)
        assert error <= within, (index, error)


SHAPES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 2),
        "groups": st.integers(1, 3),
        "tokens": st.integers(1, 2),
        "blocks": st.integers(1, 6),
        "size": st.sampled_from([2, 2, 3, 4, 9, 12]),
        "axes": st.integers(1, 3),
        "per_sample": st.booleans(),
        "order": st.sampled_from(["heads", "packed", "channels"]),
    }
)


@given(SHAPES, st.integers(0, 2**16))
@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])  # no shrinking
def test_rotation_of_random_shapes(shape, seed):
    torch.manual_seed(seed)
    assert_parity(inputs_of(**shape))


def test_rotation_of_eight_by_eight_in_a_packed_projection():
    assert_parity(inputs_of(heads=1, tokens=2, blocks=3, size=8, order="packed"))


def test_many_samples_share_a_matrix():
    """More than a tile of them, and not a multiple of it; every position has one exponential."""
    q, k, positions, skew = inputs_of(batch=70, heads=1, groups=2, tokens=2, blocks=9)
    assert_parity((q, k, positions, skew))
    narrow = [x.float().to(DEVICE) for x in (q, k, positions, skew)]
    _, _, rotations = torch.ops.comrope.rotate_free(*narrow)
    assert rotations.shape == (2, 9, 2, 2)
    assert_parity((q, k, positions[None], skew))  # a batch of one position is shared as well


def test_zero_matrices():
    """Where fine-tuning starts: nothing turns, and gradients are not zero."""
    q, k, positions, skew = inputs_of(size=3, axes=3)
    narrow = [x.float().to(DEVICE) for x in (q, k, positions, 0 * skew)]
    assert torch.equal(rotate_free(*narrow)[0], narrow[0])
    assert_parity((q, k, positions, 0 * skew), needed=(True, True, False, True))


@pytest.mark.parametrize(
    ("needed", "per_sample"),
    [((1, 0, 0, 0), False), ((1, 1, 0, 0), True), ((0, 0, 1, 0), True), ((0, 0, 0, 1), False)],
)
def test_only_what_is_needed(needed, per_sample):
    assert_parity(inputs_of(per_sample=per_sample), needed=tuple(map(bool, needed)))


def test_one_output_alone_has_a_gradient():
    narrow = [x.float().to(DEVICE).requires_grad_() for x in inputs_of()]
    wide = [x.detach().cpu().double().requires_grad_() for x in narrow]
    for index in (0, 1):
        ours = torch.autograd.grad(rotate_free(*narrow)[index].sum(), narrow)
        theirs = torch.autograd.grad(reference(*wide)[index].sum(), wide, materialize_grads=True)
        for got, expected in zip(ours, theirs, strict=True):
            assert relative_error(got.cpu().double(), expected) <= 1e-5


@pytest.mark.parametrize("order", ["heads", "packed"])
def test_outputs_lie_in_memory_as_inputs_do(order):
    q, k, positions, skew = (x.float().to(DEVICE) for x in inputs_of(groups=2, order=order))
    q.requires_grad_()
    for x, y in zip((q, k), rotate_free(q, k, positions, skew), strict=True):
        assert y.shape == x.shape
        assert (y if order == "heads" else y.transpose(1, 2)).is_contiguous()


def test_an_empty_batch():
    q, k, positions, skew = (x.float().to(DEVICE).requires_grad_() for x in inputs_of())
    out = rotate_free(q[:0], k[:0], positions, skew)
    assert out[0].shape == (0, *q.shape[1:])
    assert not torch.autograd.grad(out[0].sum(), skew)[0].any()


def test_operators_keep_their_contracts():
    shape = {"batch": 1, "heads": 1, "tokens": 2, "order": "packed"}
    q, k, positions, skew = (x.float().to(DEVICE) for x in inputs_of(**shape))
    operators = torch.ops.comrope
    flat, blocks = positions.requires_grad_(), skew.flatten(1, 2).requires_grad_()
    torch.library.opcheck(operators.free_rotations.default, (flat, blocks))
    rotations = operators.free_rotations(flat, blocks).detach()
    flat, blocks = flat.detach(), blocks.detach()
    torch.library.opcheck(operators.free_adjoint.default, (flat, blocks, rotations))
    torch.library.opcheck(operators.apply_free.default, (q, k, rotations, True))
    torch.library.opcheck(operators.apply_free_backward.default, (q, k, q, k, rotations))
    inputs = [x.detach().requires_grad_() for x in (q, k, positions, skew)]
    torch.library.opcheck(operators.rotate_free.default, inputs)


@pytest.mark.parametrize("per_sample", [False, True])
def test_compiled_whole(per_sample):
    torch._dynamo.reset()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(rotate_free, fullgraph=True, backend=backend)
    assert_parity(inputs_of(per_sample=per_sample, order="packed"), rotate=compiled)


def test_checkpointed():
    def recomputed(*inputs):
        return checkpoint(rotate_free, *inputs, use_reentrant=False)

    assert_parity(inputs_of(), rotate=recomputed)


def test_no_second_derivative():
    q, k, positions, skew = (x.float().to(DEVICE).requires_grad_() for x in inputs_of(batch=1))
    loss = rotate_free(q, k, positions, skew)[0].square().sum()
    (gradient,) = torch.autograd.grad(loss, skew, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("size", [4, 8, 16, 32])
@pytest.mark.parametrize("per_sample", [False, True])
def test_narrow_inputs(size, per_sample, dtype, within):
    shape = {"batch": 65, "groups": 2, "tokens": 5, "blocks": 64 // size, "size": size}
    inputs = inputs_of(**shape, per_sample=per_sample, order="packed")
    assert_parity(inputs, within, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_gradients_have_the_same_bits_every_time():
    inputs = [x.float().to(DEVICE) for x in inputs_of(batch=65, tokens=7, blocks=8, size=8)]
    first, second = (outputs_and_gradients(rotate_free, inputs) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
