"""The spectrum kernel against its contract; interpreted where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

tl = pytest.importorskip("triton.language")

from comrope.angles import plane_generators, skew_spectrum  # noqa: E402
from comrope.ops.kernels import jacobi  # noqa: E402
from comrope.ops.kernels.jacobi import skew_spectrum_kernel, supported  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (4, 8, 16, 32)


def with_frequencies(frequencies: torch.Tensor) -> torch.Tensor:
    """Skew-symmetric matrices (n, b, b) of given frequencies (n, f) in random planes, float64."""
    size = 2 * frequencies.shape[-1]
    basis = torch.linalg.qr(torch.randn(len(frequencies), size, size, dtype=torch.float64))[0]
    skew = basis @ plane_generators(frequencies.double(), size) @ basis.mT
    return ((skew - skew.mT) / 2).to(DEVICE)


def random_skew(*shape: int) -> torch.Tensor:
    matrix = torch.randn(*shape, shape[-1], dtype=torch.float64)
    return (matrix - matrix.mT).to(DEVICE)


def every_kind(size: int, each: int = 6) -> dict[str, torch.Tensor]:
    """Matrices (each, b, b) by what is special about their frequencies."""
    planes = size // 2
    rand = torch.rand(each, planes, dtype=torch.float64)
    order = torch.arange(planes)
    swapped = torch.eye(size, dtype=torch.float64)[torch.rand(each, size).argsort(-1)]
    return {
        "random": random_skew(each, size),
        "zero": torch.zeros(each, size, size, dtype=torch.float64, device=DEVICE),
        "repeated": with_frequencies(torch.full_like(rand, 1.3)),
        "nearly repeated": with_frequencies(1.3 + 1e-9 * rand),
        "repeated to rounding": with_frequencies(1.3 + 1e-14 * rand),
        "in clusters": with_frequencies((3 * rand).floor() + 1e-7 * rand),
        "half of them zero": with_frequencies(rand * (order % 2)),
        "only one": with_frequencies(rand * (order == 0)),
        "many scales": with_frequencies((10.0 ** (-2 * order)).expand_as(rand)),
        "of two axes each": (swapped @ plane_generators(rand, size) @ swapped.mT).to(DEVICE),
    }


def assert_is_spectrum(
    skew: torch.Tensor, basis: torch.Tensor, frequencies: torch.Tensor, tolerance: float = 1e-12
) -> None:
    size = skew.shape[-1]
    assert basis.shape == skew.shape
    assert frequencies.shape == (*skew.shape[:-2], size // 2)
    assert basis.dtype == frequencies.dtype == skew.dtype
    skew, basis, frequencies = skew.double(), basis.double(), frequencies.double()
    eye = torch.eye(size, dtype=torch.float64, device=skew.device)
    assert (basis.mT @ basis - eye).abs().max() <= tolerance
    assert (frequencies >= 0).all()
    assert (frequencies.diff(dim=-1) <= 0).all()
    scale = skew.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    rebuilt = basis @ plane_generators(frequencies / scale[..., 0], size) @ basis.mT
    assert (skew / scale - rebuilt).abs().max() <= tolerance
    expected = skew_spectrum(skew / scale)[1]
    assert (frequencies / scale[..., 0] - expected).abs().max() <= tolerance


@pytest.mark.parametrize("size", SIZES)
def test_every_kind_of_spectrum_is_found_to_rounding(size):
    kinds = every_kind(size)
    if size == 32 and DEVICE == "cpu":  # interpreted, only those of few sweeps
        kinds = {kind: kinds[kind] for kind in ("zero", "only one")}
    basis, frequencies = skew_spectrum_kernel(torch.cat(list(kinds.values())))
    zeros = {"zero": size // 2, "half of them zero": size // 4, "only one": size // 2 - 1}
    found = zip(kinds.items(), basis.split(6), frequencies.split(6), strict=True)
    for (kind, skew), kind_basis, kind_frequencies in found:
        assert_is_spectrum(skew, kind_basis, kind_frequencies)
        if kind in zeros:
            assert ((kind_frequencies == 0).sum(-1) == zeros[kind]).all(), kind


@settings(max_examples=8, deadline=None, derandomize=True)
@given(size=st.sampled_from([4, 8]), data=st.data())
def test_any_mixture_of_frequencies_is_found(size, data):
    special = st.sampled_from([0.0, 1.0, 1.0 + 1e-15, 1.0 + 1e-11, 1.0 - 1e-6, 1e-3, 1e-12, 1e-16])
    one = st.lists(special | st.floats(0, 10), min_size=size // 2, max_size=size // 2)
    batch = data.draw(st.lists(one, min_size=1, max_size=20))
    torch.manual_seed(0)
    skew = with_frequencies(torch.tensor(batch, dtype=torch.float64))
    assert_is_spectrum(skew, *skew_spectrum_kernel(skew))


def test_the_scale_of_a_matrix_does_not_matter():
    skew = random_skew(1, 8)
    scales = torch.tensor([1e-310, 1e-300, 1e-30, 1.0, 1e30, 1e300], dtype=torch.float64)
    scaled = skew * scales.to(DEVICE)[:, None, None]
    assert_is_spectrum(scaled, *skew_spectrum_kernel(scaled))


@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e37])
def test_float32_matrices_give_float32_spectra(scale):
    skew = (random_skew(5, 8) * scale).float()
    assert_is_spectrum(skew, *skew_spectrum_kernel(skew), tolerance=2e-6)


def test_small_frequencies_beside_large_ones_survive_float32():
    frequencies = torch.tensor([1.0, 1e-2, 1e-3, 1e-4]).expand(20, 4)
    skew = with_frequencies(frequencies).float()
    skew = skew - skew.mT
    expected = skew_spectrum(skew.double())[1]
    found = skew_spectrum_kernel(skew)[1]
    torch.testing.assert_close(found.double(), expected, rtol=1e-7, atol=0)


def test_a_matrix_that_is_not_finite_has_nan_and_leaves_the_others_alone():
    skew = random_skew(7, 8)
    skew[1, 0, 5] = torch.nan
    skew[3, 6, 2] = torch.inf
    skew[4] = torch.nan
    basis, frequencies = skew_spectrum_kernel(skew)
    bad = torch.tensor([False, True, False, True, True, False, False], device=DEVICE)
    assert basis[bad].isnan().all()
    assert frequencies[bad].isnan().all()
    assert_is_spectrum(skew[~bad], basis[~bad], frequencies[~bad])


@pytest.fixture
def _poisoned():
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_poisoned")
def test_every_entry_of_the_outputs_is_written():
    assert torch.empty(9, device=DEVICE).isnan().all()
    for size in (4, 8):
        skew = random_skew(3, size)
        basis, frequencies = skew_spectrum_kernel(skew)
        assert basis.isfinite().all()
        assert frequencies.isfinite().all()


@pytest.mark.parametrize("matrices", [1, 4])
def test_one_or_more_matrices_a_program_and_nothing_beyond_the_last(matrices):
    count, size = 2, 8
    skew = torch.cat((random_skew(count, size), torch.full_like(random_skew(2, size), torch.nan)))
    basis = torch.full_like(skew, torch.nan)
    frequencies = torch.full_like(skew[..., : size // 2, 0], torch.nan)
    jacobi._spectrum[(-(-count // matrices),)](
        skew, basis, frequencies, count, 1e-26,
        SIZE=size, MATRICES=matrices, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    assert_is_spectrum(skew[:count], basis[:count], frequencies[:count])
    assert basis[count:].isnan().all()
    assert frequencies[count:].isnan().all()


def test_any_batch_shape_and_strides():
    skew = random_skew(2, 3, 8)
    basis, frequencies = skew_spectrum_kernel(skew)
    assert_is_spectrum(skew, basis, frequencies)
    strided = skew.mT[:, ::2]
    assert_is_spectrum(strided, *skew_spectrum_kernel(strided))
    basis, frequencies = skew_spectrum_kernel(skew[:0])
    assert basis.shape == (0, 3, 8, 8)
    assert frequencies.shape == (0, 3, 4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("size", SIZES)
def test_on_a_device_nothing_waits_and_neighbours_do_not_matter(size):
    skew = torch.cat(list(every_kind(size).values()))
    skew_spectrum_kernel(skew)  # compiled before the watch begins
    torch.cuda.set_sync_debug_mode("error")
    try:
        together = skew_spectrum_kernel(skew)
        alone = [skew_spectrum_kernel(matrix) for matrix in skew]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for of_all, of_each in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(of_all, torch.stack(of_each), rtol=0, atol=0)


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel does not see the change")
def test_a_third_of_the_sweeps_it_may_take_are_enough(monkeypatch):
    monkeypatch.setattr(jacobi, "_MAX_SWEEPS", tl.constexpr(13))
    skew = torch.cat(list(every_kind(8).values()))
    assert_is_spectrum(skew, *skew_spectrum_kernel(skew))


def test_sizes_and_dtypes_it_does_not_take_are_refused():
    assert [size for size in range(70) if supported(size)] == list(SIZES)
    with pytest.raises(ValueError, match=r"size 6 in torch\.float64"):
        skew_spectrum_kernel(random_skew(1, 6))
    with pytest.raises(ValueError, match=r"size 8 in torch\.float16"):
        skew_spectrum_kernel(random_skew(1, 8).half())
