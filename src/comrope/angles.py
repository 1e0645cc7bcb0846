"""The rotation R(x) = exp(sum_i x_i A_i) of a method, as plain tensors.

Angle matrices have one of three forms:

- ``CommutingAngles``: A_i = Q diag_k(w_ik J) Q^T, given by Q and w. Every commuting family has this
  form (docs/theory.md).
- ``CollinearAngles``: A_i = c_i S, multiples of one skew-symmetric matrix. Q and w come from an
  eigendecomposition; gradients must not go through it (see ``ops/collinear.py``).
- ``GeneralAngles``: any skew-symmetric matrices. They need not commute, so they have no common
  spectrum.

Shapes: N axes, H key heads, m blocks per head, b block size, f = b // 2 planes per block.
J = [[0, -1], [1, 0]]; plane k is spanned by columns 2k and 2k + 1; an odd b leaves the last column
unrotated.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from comrope._deprecated import renamed
from comrope._dtypes import no_autocast

__all__ = [
    "Angles",
    "CollinearAngles",
    "CommutingAngles",
    "GeneralAngles",
    "block_size_of",
    "plane_generators",
    "skew_spectrum",
    "spectrum_by_eigh",
]


class SkewSpectrum(NamedTuple):
    """How the gradient of commuting angles belongs to the matrix S that they are multiples of.

    See ``ops.collinear``.
    """

    direction: Tensor  # (N, H, m)
    frequencies: Tensor  # of S, (H, m, f)
    sums: Tensor | None  # (H, m, 2 b b + 2), zeros whose gradient belongs to S; None: not needed
    reach: Tensor | None  # of the positions, (H, m), if only scores are used

    def to(self, dtype: torch.dtype) -> SkewSpectrum:
        found: list[Any] = [None if x is None else x.to(dtype) for x in self]
        return SkewSpectrum(*found)

    def expand_heads(self, heads: int) -> SkewSpectrum:
        """Return it for every head; storage is shared."""
        first, *rest = self
        found: list[Any] = [None if x is None else _expand(x, 0, heads) for x in rest]
        return SkewSpectrum(_expand(first, 1, heads), *found)

    def split_layers(self, layers: int) -> list[SkewSpectrum]:
        """Split that of heads of several layers."""
        first, *rest = self
        parts: list[Any] = [[None] * layers if x is None else _split(x, 0, layers) for x in rest]
        return [SkewSpectrum(*part) for part in zip(_split(first, 1, layers), *parts, strict=True)]


class CommutingAngles(NamedTuple):
    """Commuting angle matrices in spectral form.

    Only the part of the gradient of ``basis`` that keeps it orthogonal is defined; the other part
    depends on the backend. The same holds for ``skew`` of ``CollinearAngles``: only the
    skew-symmetric part of its gradient is defined.
    """

    basis: Tensor | None  # (H, m, b, b), orthogonal; None is the identity
    frequencies: Tensor  # (N, H, m, f)
    block_size: int
    collinear: SkewSpectrum | None = None  # of ``CollinearAngles`` in this form

    def to(self, dtype: torch.dtype) -> CommutingAngles:
        basis = None if self.basis is None else self.basis.to(dtype)
        found = None if self.collinear is None else self.collinear.to(dtype)
        return CommutingAngles(basis, self.frequencies.to(dtype), self.block_size, found)

    def cache_spectrum(self) -> CommutingAngles:
        """Return self, which contains the spectrum."""
        return self

    def matrices(self) -> Tensor:
        """Return the angle matrices (N, H, m, b, b)."""
        planes = plane_generators(self.frequencies, self.block_size)
        if self.basis is None:
            return planes
        with no_autocast(planes.device):
            return self.basis @ planes @ self.basis.mT

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return the basis (H, m, b, b) and the frequencies (N, H, m, f)."""
        if self.basis is not None:
            return self.basis, self.frequencies
        eye = torch.eye(self.block_size).to(self.frequencies)
        return eye.expand(*self.frequencies.shape[1:3], -1, -1), self.frequencies

    def expand_heads(self, heads: int) -> CommutingAngles:
        """Return the angles of one head for every head; their storage is shared."""
        basis = None if self.basis is None else _expand(self.basis, 0, heads)
        found = None if self.collinear is None else self.collinear.expand_heads(heads)
        return CommutingAngles(basis, _expand(self.frequencies, 1, heads), self.block_size, found)

    def split_layers(self, layers: int) -> list[CommutingAngles]:
        """Split angles whose heads are those of several layers."""
        bases: Any = [None] * layers if self.basis is None else _split(self.basis, 0, layers)
        found: Any = [None] * layers
        if self.collinear is not None:
            found = self.collinear.split_layers(layers)
        frequencies = _split(self.frequencies, 1, layers)
        return [
            CommutingAngles(basis, w, self.block_size, own)
            for basis, w, own in zip(bases, frequencies, found, strict=True)
        ]


class CollinearAngles(NamedTuple):
    """Commuting angle matrices that are multiples of one: A_i = direction_i * skew."""

    skew: Tensor  # (H, m, b, b)
    direction: Tensor  # (N, H, m)
    cached_spectrum: tuple[Tensor, Tensor] | None = None  # of ``skew``, see ``skew_spectrum``

    def to(self, dtype: torch.dtype) -> CollinearAngles:
        cached = self.cached_spectrum
        cached = None if cached is None else (cached[0].to(dtype), cached[1].to(dtype))
        return CollinearAngles(self.skew.to(dtype), self.direction.to(dtype), cached)

    def cache_spectrum(self) -> CollinearAngles:
        """Return the same angles with the eigendecomposition computed; b = 2 needs none."""
        if self.cached_spectrum is not None or self.skew.shape[-1] == 2:
            return self
        return self._replace(cached_spectrum=skew_spectrum(self.skew.detach()))

    def matrices(self) -> Tensor:
        """Return the angle matrices (N, H, m, b, b)."""
        return self.direction[..., None, None] * self.skew

    def as_commuting(self) -> CommutingAngles:
        """Return the spectral form for b = 2, where every skew-symmetric matrix is w J."""
        return CommutingAngles(None, self.direction[..., None] * self.skew[..., 1, :1], 2)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return the basis (H, m, b, b) and the frequencies (N, H, m, f).

        They have gradients for b = 2 only.
        """
        if self.skew.shape[-1] == 2:
            return self.as_commuting().spectrum()
        basis, frequencies = self.cached_spectrum or skew_spectrum(self.skew.detach())
        return basis, self.direction.detach()[..., None] * frequencies

    def expand_heads(self, heads: int) -> CollinearAngles:
        """Return the angles of one head for every head, decomposed once; storage is shared."""
        cached = self.cache_spectrum().cached_spectrum
        if cached is not None:
            cached = _expand(cached[0], 0, heads), _expand(cached[1], 0, heads)
        skew, direction = _expand(self.skew, 0, heads), _expand(self.direction, 1, heads)
        return CollinearAngles(skew, direction, cached)

    def split_layers(self, layers: int) -> list[CollinearAngles]:
        """Split angles whose heads are those of several layers."""
        cached: list[Any] = [None] * layers
        if self.cached_spectrum is not None:
            cached = list(zip(*(_split(x, 0, layers) for x in self.cached_spectrum), strict=True))
        skew, direction = _split(self.skew, 0, layers), _split(self.direction, 1, layers)
        return [CollinearAngles(*part) for part in zip(skew, direction, cached, strict=True)]


class GeneralAngles(NamedTuple):
    """Any skew-symmetric angle matrices."""

    skew: Tensor  # (N, H, m, b, b)

    def to(self, dtype: torch.dtype) -> GeneralAngles:
        return GeneralAngles(self.skew.to(dtype))

    def cache_spectrum(self) -> GeneralAngles:
        """Return self: there is no common spectrum."""
        return self

    def matrices(self) -> Tensor:
        """Return the angle matrices (N, H, m, b, b)."""
        return self.skew

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Raise ValueError: matrices that do not commute share no eigenbasis."""
        raise ValueError(
            f"spectrum: these {self.skew.shape[0]} angle matrices do not commute, so they have no "
            "common basis; expected a commuting method or a single axis "
            "(comrope.analysis.axis_frequencies gives the frequencies of each axis alone)"
        )

    def expand_heads(self, heads: int) -> GeneralAngles:
        """Return the angles of one head for every head; their storage is shared."""
        return GeneralAngles(_expand(self.skew, 1, heads))

    def split_layers(self, layers: int) -> list[GeneralAngles]:
        """Split angles whose heads are those of several layers."""
        return [GeneralAngles(skew) for skew in _split(self.skew, 1, layers)]


Angles: TypeAlias = CommutingAngles | CollinearAngles | GeneralAngles

__getattr__ = renamed(
    __name__, {"Torus": "CommutingAngles", "Line": "CollinearAngles", "Free": "GeneralAngles"}
)


def _expand(x: Tensor, axis: int, heads: int) -> Tensor:
    """(..., 1, ...) to (..., H, ...) without copies."""
    return x.expand(*x.shape[:axis], heads, *x.shape[axis + 1 :])


def _split(x: Tensor, axis: int, layers: int) -> tuple[Tensor, ...]:
    """(..., L H, ...) to L contiguous tensors (..., H, ...)."""
    return x.unflatten(axis, (layers, -1)).movedim(axis, 0).contiguous().unbind(0)


def block_size_of(angles: Angles) -> int:
    """Return b. (A function: torch.compile of torch 2.6 cannot follow a property here.)"""
    return angles.block_size if isinstance(angles, CommutingAngles) else angles.skew.shape[-1]


def plane_generators(frequencies: Tensor, block_size: int) -> Tensor:
    """Return diag_k(w_k J): frequencies (..., f) to skew-symmetric matrices (..., b, b)."""
    even = torch.arange(block_size // 2, device=frequencies.device)
    unit = frequencies.new_zeros(block_size // 2, block_size, block_size)
    unit[even, 2 * even + 1, 2 * even] = 1.0
    unit[even, 2 * even, 2 * even + 1] = -1.0
    return (frequencies[..., None, None] * unit).sum(-3)


@torch.library.custom_op("comrope::skew_spectrum", mutates_args=())
def skew_spectrum(skew: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose skew-symmetric matrices: skew = Q diag_k(w_k J) Q^T.

    Args:
        skew: (..., b, b).

    Returns:
        Orthogonal Q (..., b, b) and frequencies w >= 0 (..., f), descending, exact to 1e-13 of the
        largest one, also where frequencies repeat or vanish. NaN for a matrix that is not finite,
        so that a run that diverged shows it in its loss.

    There is no gradient: Q is not a smooth function of ``skew`` where frequencies repeat. An opaque
    operator, so that no complex dtype enters a compiled graph.
    """
    return spectrum_by_eigh(skew)


def spectrum_by_eigh(skew: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``skew_spectrum`` on any device; on a GPU the host waits for the result."""
    size = skew.shape[-1]
    planes = size // 2
    finite = skew.isfinite().all(-1).all(-1)[..., None]
    # float64: the matrices are few and small, and small frequencies beside large ones stay exact.
    wide = torch.where(finite[..., None], skew, 0.0).double()
    values, vectors = torch.linalg.eigh(1j * wide)
    frequencies = values[..., size - planes :].flip(-1)
    vectors = vectors[..., size - planes :].flip(-1)
    nonzero = frequencies > 1e-13 * frequencies[..., :1]
    frequencies = torch.where(nonzero, frequencies, 0.0)

    # (i skew) v = w v makes sqrt(2) Re v, sqrt(2) Im v an orthonormal pair with the plane's
    # rotation between them, unless w vanishes: then v and its conjugate mix. The rest of the space
    # gets any orthonormal basis: the eigenvectors of the projection onto it, of eigenvalue 1,
    # which come last. (No QR: for many small matrices it is slow on a GPU.)
    pairs = torch.stack((vectors.real, vectors.imag), dim=-1).flatten(-2) * 2**0.5
    used = nonzero.repeat_interleave(2, dim=-1)
    pairs, used = (torch.nn.functional.pad(t, (0, size - 2 * planes)) for t in (pairs, used))
    pairs = torch.where(used[..., None, :], pairs, 0.0)
    eye = torch.eye(size, device=skew.device, dtype=wide.dtype)
    basis = pairs
    if skew.device.type != "cpu" or not used.all():  # a GPU would wait for the answer
        rest = torch.linalg.eigh(eye - pairs @ pairs.mT).eigenvectors
        basis = torch.where(used[..., None, :], pairs, rest)
    for _ in range(4):  # to the nearest orthogonal matrix: very slow planes still mix a little
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
