"""The kernels on ragged sizes, forwards and backwards: what a memory checker is run over.

    compute-sanitizer --tool memcheck python tests/ops/small_case.py
    compute-sanitizer --tool racecheck python tests/ops/small_case.py

Prints the largest error against the reference implementation, and fails if that is not small.
"""

from __future__ import annotations

import torch

import comrope
from comrope.angles import spectrum_by_eigh
from comrope.ops.kernels.jacobi import skew_spectrum_kernel

NARROW = torch.bfloat16
CASES = (
    ("rope-mixed", 2, 10, torch.float32, "interleaved"),
    ("comrope-torus", 6, 18, torch.float32, "half"),
    ("comrope-torus", 8, 40, torch.float32, "half"),
    ("comrope-torus", 8, 24, NARROW, "interleaved"),
    ("comrope-ld", 8, 40, torch.float32, "interleaved"),
    ("comrope-ld", 8, 64, NARROW, "half"),
    ("comrope-ld", 16, 48, NARROW, "interleaved"),
    ("comrope-ld", 4, 20, torch.float32, "half"),
    ("comrope-ap", 3, 18, torch.float32, "interleaved"),
    ("liere", 5, 15, torch.float32, "interleaved"),
    ("liere", 8, 16, torch.float32, "interleaved"),
)


def outcome(rope: comrope.RotaryEmbedding, backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rotated q, k and v of a packed projection, and all gradients."""
    torch.manual_seed(0)
    rope.backend = backend
    shape = (3, 37, 8, rope.head_dim)
    qkv = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    positions = torch.rand(3, 36, 2, device="cuda", requires_grad=True)
    out = rope.rotate_qkv(qkv, positions)
    wanted = [qkv, positions, *rope.parameters()]
    grads = torch.autograd.grad(sum(x.float().sin().sum() for x in out), wanted)
    return [x.detach().double() for x in (*out, *grads)]


def main() -> None:
    errors = []
    for method, size, dim, dtype, order in CASES:
        rope = comrope.RotaryEmbedding(
            method, num_heads=2, head_dim=dim, block_size=size, num_prefix_tokens=1, device="cuda",
            channel_order=order,
        )  # fmt: skip
        slow = "spectral" if rope.method.commutes else "reference"
        pairs = zip(outcome(rope, "triton", dtype), outcome(rope, slow, dtype), strict=True)
        allowed = 1e-4 if dtype == torch.float32 else 5e-2
        errors += [float((a - b).norm() / b.norm()) / allowed for a, b in pairs]
    for size in (4, 8, 16):
        skew = torch.randn(5, size, size, device="cuda", dtype=torch.float64)
        skew = skew - skew.mT
        got, expected = (find(skew)[1] for find in (skew_spectrum_kernel, spectrum_by_eigh))
        errors.append(float((got - expected).abs().max()) / 1e-4)
    print(f"largest error {max(errors):.1e} of what is allowed")
    if not all(error < 1 for error in errors):  # not so for NaN
        raise SystemExit(1)


if __name__ == "__main__":
    main()
