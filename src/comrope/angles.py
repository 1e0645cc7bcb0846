"""What a method hands on: its rotation R(x) = exp(sum_i x_i A_i) as plain tensors.

Every position encoding here is one of three forms:

- ``Torus``: A_i = Q diag_k(w_ik J) Q^T with Q and w given outright. All commuting families have
  this form (docs/theory.md).
- ``Line``: A_i = c_i S, multiples of one skew-symmetric matrix. Its Q and w come out of an
  eigendecomposition, and its gradients must not go through it (see ``ops/line.py``).
- ``Free``: any skew-symmetric matrices. They need not commute, so they have no common spectrum.

Shapes: N axes, H key heads, m blocks a head, b block size, f = b // 2 planes a block.
J = [[0, -1], [1, 0]]; plane k is spanned by columns 2k and 2k + 1; an odd b leaves the last column
unrotated.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from comrope._dtypes import no_autocast

__all__ = [
    "Angles",
    "Free",
    "Line",
    "Torus",
    "block_size_of",
    "plane_generators",
    "skew_spectrum",
    "spectrum_by_eigh",
]


class Torus(NamedTuple):
    """Commuting angle matrices in spectral form.

    The gradient of ``basis`` is good for moving it among orthogonal matrices: what of it would
    leave them is up to the backend. Likewise that of the ``skew`` of a line.
    """

    basis: Tensor | None  # (H, m, b, b), orthogonal; None is the identity
    frequencies: Tensor  # (N, H, m, f)
    block_size: int

    def to(self, dtype: torch.dtype) -> Torus:
        basis = None if self.basis is None else self.basis.to(dtype)
        return Torus(basis, self.frequencies.to(dtype), self.block_size)

    def with_spectrum(self) -> Torus:
        """It is its own."""
        return self

    def matrices(self) -> Tensor:
        """The angle matrices (N, H, m, b, b)."""
        planes = plane_generators(self.frequencies, self.block_size)
        if self.basis is None:
            return planes
        with no_autocast(planes.device):
            return self.basis @ planes @ self.basis.mT

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Basis (H, m, b, b) and frequencies (N, H, m, f)."""
        if self.basis is not None:
            return self.basis, self.frequencies
        eye = torch.eye(self.block_size).to(self.frequencies)
        return eye.expand(*self.frequencies.shape[1:3], -1, -1), self.frequencies

    def per_layer(self, layers: int) -> list[Torus]:
        """Taken apart again, where the heads are those of several layers."""
        bases = [None] * layers if self.basis is None else _apart(self.basis, 0, layers)
        frequencies = _apart(self.frequencies, 1, layers)
        return [Torus(*both, self.block_size) for both in zip(bases, frequencies, strict=True)]


class Line(NamedTuple):
    """Commuting angle matrices that are multiples of one: A_i = direction_i * skew."""

    skew: Tensor  # (H, m, b, b)
    direction: Tensor  # (N, H, m)
    known: tuple[Tensor, Tensor] | None = None  # the spectrum of ``skew``, once worked out

    def to(self, dtype: torch.dtype) -> Line:
        known = None if self.known is None else (self.known[0].to(dtype), self.known[1].to(dtype))
        return Line(self.skew.to(dtype), self.direction.to(dtype), known)

    def with_spectrum(self) -> Line:
        """The same, its spectrum known: for b > 2, where it is an eigendecomposition."""
        if self.known is not None or self.skew.shape[-1] == 2:
            return self
        return self._replace(known=skew_spectrum(self.skew.detach()))

    def matrices(self) -> Tensor:
        """The angle matrices (N, H, m, b, b)."""
        return self.direction[..., None, None] * self.skew

    def plane(self) -> Torus:
        """For b = 2, where every skew-symmetric matrix is w J already."""
        return Torus(None, self.direction[..., None] * self.skew[..., 1, :1], 2)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Basis (H, m, b, b) and frequencies (N, H, m, f), for b > 2 without gradient."""
        if self.skew.shape[-1] == 2:
            return self.plane().spectrum()
        basis, frequencies = self.known or skew_spectrum(self.skew.detach())
        return basis, self.direction.detach()[..., None] * frequencies

    def per_layer(self, layers: int) -> list[Line]:
        """Taken apart again, where the heads are those of several layers."""
        known: list[Any] = [None] * layers
        if self.known is not None:
            known = list(zip(*(_apart(part, 0, layers) for part in self.known), strict=True))
        skew, direction = _apart(self.skew, 0, layers), _apart(self.direction, 1, layers)
        return [Line(*each) for each in zip(skew, direction, known, strict=True)]


class Free(NamedTuple):
    """Any skew-symmetric angle matrices."""

    skew: Tensor  # (N, H, m, b, b)

    def to(self, dtype: torch.dtype) -> Free:
        return Free(self.skew.to(dtype))

    def with_spectrum(self) -> Free:
        """It has none."""
        return self

    def matrices(self) -> Tensor:
        """The angle matrices (N, H, m, b, b)."""
        return self.skew

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Always an error: matrices that do not commute share no eigenbasis."""
        raise ValueError(
            f"spectrum: these {self.skew.shape[0]} angle matrices do not commute, so they have no "
            "common basis; expected a commuting method or a single axis "
            "(comrope.analysis.axis_frequencies gives the frequencies of each axis alone)"
        )

    def per_layer(self, layers: int) -> list[Free]:
        """Taken apart again, where the heads are those of several layers."""
        return [Free(skew) for skew in _apart(self.skew, 1, layers)]


Angles: TypeAlias = Torus | Line | Free


def _apart(x: Tensor, axis: int, layers: int) -> tuple[Tensor, ...]:
    """(..., L H, ...) to L tensors (..., H, ...), each of its own contiguous piece."""
    return x.unflatten(axis, (layers, -1)).movedim(axis, 0).contiguous().unbind(0)


def block_size_of(angles: Angles) -> int:
    """b. (A function and not a property: torch.compile of torch 2.6 cannot follow one here.)"""
    return angles.block_size if isinstance(angles, Torus) else angles.skew.shape[-1]


def plane_generators(frequencies: Tensor, block_size: int) -> Tensor:
    """diag_k(w_k J): frequencies (..., f) to skew-symmetric matrices (..., b, b)."""
    even = torch.arange(block_size // 2, device=frequencies.device)
    unit = frequencies.new_zeros(block_size // 2, block_size, block_size)
    unit[even, 2 * even + 1, 2 * even] = 1.0
    unit[even, 2 * even, 2 * even + 1] = -1.0
    return (frequencies[..., None, None] * unit).sum(-3)


@torch.library.custom_op("comrope::skew_spectrum", mutates_args=())
def skew_spectrum(skew: Tensor) -> tuple[Tensor, Tensor]:
    """Orthogonal Q (..., b, b) and w >= 0 (..., f), descending, with skew = Q diag_k(w_k J) Q^T.

    Right to 1e-13 of the largest frequency, at repeated and at zero ones too. It has no gradient: Q
    is not a smooth function of ``skew`` there. An opaque op, so that no complex dtype enters a
    compiled graph. A matrix that is not finite has NaN for a spectrum: a run that diverged shows it
    in its loss.
    """
    return spectrum_by_eigh(skew)


def spectrum_by_eigh(skew: Tensor) -> tuple[Tensor, Tensor]:
    """``skew_spectrum`` on any device; on a GPU the host waits for it."""
    size = skew.shape[-1]
    planes = size // 2
    finite = skew.isfinite().all(-1).all(-1)[..., None]
    # float64: the matrices are few and small, and small frequencies beside large ones stay exact.
    wide = torch.where(finite[..., None], skew, 0.0).double()
    values, vectors = torch.linalg.eigh(1j * wide)
    frequencies = values[..., size - planes :].flip(-1)
    vectors = vectors[..., size - planes :].flip(-1)
    turning = frequencies > 1e-13 * frequencies[..., :1]
    frequencies = torch.where(turning, frequencies, 0.0)

    # (i skew) v = w v makes sqrt(2) Re v, sqrt(2) Im v an orthonormal pair with the plane's
    # rotation between them, unless w vanishes: then v and its conjugate mix. What is left of the
    # space gets any orthonormal basis: the eigenvectors of the projection onto it, of eigenvalue 1,
    # which come last. (No QR: of many small matrices it is slow on a GPU.)
    pairs = torch.stack((vectors.real, vectors.imag), dim=-1).flatten(-2) * 2**0.5
    used = turning.repeat_interleave(2, dim=-1)
    pairs, used = (torch.nn.functional.pad(t, (0, size - 2 * planes)) for t in (pairs, used))
    pairs = torch.where(used[..., None, :], pairs, 0.0)
    eye = torch.eye(size, device=skew.device, dtype=wide.dtype)
    rest = torch.linalg.eigh(eye - pairs @ pairs.mT).eigenvectors
    basis = torch.where(used[..., None, :], pairs, rest)
    for _ in range(4):  # to the nearest orthogonal matrix: barely turning planes still mix a little
        basis = 0.5 * basis @ (3 * eye - basis.mT @ basis)

    basis = torch.where(finite[..., None], basis, torch.nan)
    frequencies = torch.where(finite, frequencies, torch.nan)
    return basis.to(skew.dtype).contiguous(), frequencies.to(skew.dtype).contiguous()


@skew_spectrum.register_fake
def _(skew: Tensor) -> tuple[Tensor, Tensor]:
    return skew.new_empty(skew.shape), skew.new_empty(*skew.shape[:-2], skew.shape[-1] // 2)


@skew_spectrum.register_vmap
def _(info, in_dims, skew: Tensor):  # type: ignore[no-untyped-def]
    return skew_spectrum(skew.movedim(in_dims[0], 0)), (0, 0)
