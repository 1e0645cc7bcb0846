from __future__ import annotations

import pytest
import torch

from comrope.angles import (
    CollinearAngles,
    CommutingAngles,
    GeneralAngles,
    plane_generators,
    skew_spectrum,
)


def spectra(block_size: int) -> dict[str, torch.Tensor]:
    planes = block_size // 2
    return {
        "random": torch.rand(planes) * 5,
        "zero": torch.zeros(planes),
        "repeated": torch.full((planes,), 1.3),
        "nearly repeated": 1.3 + 1e-9 * torch.rand(planes),
        "half of them zero": torch.rand(planes) * (torch.arange(planes) % 2),
        "many scales": 10.0 ** (-5 * torch.arange(planes)),
    }


@pytest.mark.parametrize("block_size", [2, 3, 4, 5, 8, 16])
def test_skew_spectrum_is_exact_wherever_frequencies_lie(block_size):
    for kind, frequencies in spectra(block_size).items():
        basis = torch.linalg.qr(torch.randn(7, block_size, block_size, dtype=torch.float64))[0]
        skew = basis @ plane_generators(frequencies.double(), block_size) @ basis.mT
        skew = (skew - skew.mT) / 2
        found, values = skew_spectrum(skew)
        eye = torch.eye(block_size, dtype=torch.float64)
        rebuilt = found @ plane_generators(values, block_size) @ found.mT
        torch.testing.assert_close(found.mT @ found, eye.expand_as(found), atol=1e-14, rtol=0)
        torch.testing.assert_close(rebuilt, skew, atol=3e-14, rtol=0, msg=kind)
        assert (values.diff(dim=-1) <= 1e-15).all(), kind


def test_skew_spectrum_is_a_sound_custom_op():
    torch.library.opcheck(skew_spectrum, (torch.randn(3, 5, 5),))


def test_small_frequencies_beside_large_ones_survive_float32():
    """As in language models: 1 and 1e-4 in one block, at positions in the thousands. What float32
    holds of the matrix is found to float32's precision of the small ones, not of the large."""
    frequencies = torch.tensor([1.0, 1e-2, 1e-3, 1e-4])
    basis = torch.linalg.qr(torch.randn(20, 8, 8))[0]
    skew = basis @ plane_generators(frequencies, 8) @ basis.mT
    skew = skew - skew.mT
    expected = skew_spectrum(skew.double())[1]
    torch.testing.assert_close(skew_spectrum(skew)[1].double(), expected, rtol=1e-7, atol=0)


def test_the_three_forms_agree_on_what_a_spectrum_means():
    skew = torch.randn(1, 1, 5, 5, dtype=torch.float64)
    line = CollinearAngles(skew - skew.mT, torch.randn(3, 1, 1, dtype=torch.float64))
    torus = CommutingAngles(*line.spectrum(), block_size=5)
    torch.testing.assert_close(torus.matrices(), line.matrices())


def test_free_matrices_have_no_spectrum():
    with pytest.raises(ValueError, match="2 angle matrices do not commute"):
        GeneralAngles(torch.zeros(2, 1, 1, 4, 4)).spectrum()
