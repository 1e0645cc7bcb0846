"""Pure tensor functions: the slow obvious reference, the spectral rotation, one door that picks."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from comrope import checks
from comrope.angles import Angles, Free, Line, Torus, block_size_of
from comrope.ops.line import rotate_line
from comrope.ops.reference import rotate_reference, rotation_matrices
from comrope.ops.spectral import rotate_torus
from comrope.precision import compute_dtype, no_autocast

__all__ = ["BACKENDS", "choose_backend", "rotate", "rotation_matrices"]

BACKENDS = ("auto", "reference", "spectral")


def choose_backend(angles: Angles, backend: str = "auto") -> Literal["reference", "spectral"]:
    """The backend that ``rotate`` will use for these angles."""
    checks.one_of("backend", backend, BACKENDS)
    if backend == "reference":
        return "reference"
    if isinstance(angles, Free):
        if backend == "spectral":
            raise ValueError(
                "backend: 'spectral' needs angle matrices that commute, and LieRE's on more than "
                "one axis do not; expected 'auto' or 'reference'"
            )
        return "reference"
    return "spectral"


def rotate(
    q: Tensor, k: Tensor, positions: Tensor, angles: Angles, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Rotate q (B, H G, T, D) and k (B, H, T, D) at positions (T, N) or (B, T, N).

    The scores of the result are those of R(x) q . R(y) k. Computed in the widest dtype that comes
    in, at least float32, and returned in the dtypes of q and k.
    """
    chosen = choose_backend(angles, backend)
    dtype = compute_dtype(q, k, positions, *(part for part in angles if isinstance(part, Tensor)))
    block_size = block_size_of(angles)
    q_blocks, k_blocks = (_to_blocks(x, k.shape[1], block_size) for x in (q, k))
    positions, angles = positions.to(dtype), angles.to(dtype)
    with no_autocast(q.device):
        if chosen == "spectral" and isinstance(angles, Torus):
            out = rotate_torus(q_blocks, k_blocks, positions, angles)
        elif chosen == "spectral" and isinstance(angles, Line):
            out = rotate_line(q_blocks, k_blocks, positions, angles)
        else:
            out = rotate_reference(q_blocks, k_blocks, positions, angles.matrices())
    return out[0].reshape(q.shape).to(q.dtype), out[1].reshape(k.shape).to(k.dtype)


def _to_blocks(x: Tensor, heads: int, block_size: int) -> Tensor:
    """(B, H G, T, D) to (B, H, G, T, m, b)."""
    return x.unflatten(-1, (-1, block_size)).unflatten(1, (heads, -1))
