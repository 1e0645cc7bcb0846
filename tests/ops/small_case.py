"""Every kernel once, on ragged sizes, forwards and backwards: what a memory checker is run over.

    compute-sanitizer --tool memcheck python tests/ops/small_case.py
    compute-sanitizer --tool racecheck python tests/ops/small_case.py

Prints the largest error against the slow twin, and fails if that is not small.
"""

from __future__ import annotations

import torch

import comrope
from comrope.angles import spectrum_by_eigh
from comrope.ops.kernels.spectrum import skew_spectrum_kernel

CASES = (
    ("rope-mixed", 2, 10),
    ("comrope-torus", 6, 18),
    ("comrope-ld", 8, 40),
    ("comrope-ap", 3, 18),
    ("liere", 5, 15),
    ("liere", 8, 16),
)


def outcome(rope: comrope.RotaryEmbedding, backend: str) -> list[torch.Tensor]:
    """Rotated q, k and v of a packed projection, and all gradients."""
    torch.manual_seed(0)
    rope.backend = backend
    qkv = torch.randn(3, 37, 8, rope.method.head_dim, device="cuda", requires_grad=True)
    positions = torch.rand(3, 36, 2, device="cuda", requires_grad=True)
    out = rope.packed(qkv, positions)
    wanted = [qkv, positions, *rope.parameters()]
    grads = torch.autograd.grad(sum(x.sin().sum() for x in out), wanted)
    return [x.detach() for x in (*out, *grads)]


def main() -> None:
    worst = 0.0
    for method, size, dim in CASES:
        rope = comrope.RotaryEmbedding(
            method, num_heads=2, head_dim=dim, block_size=size, num_prefix_tokens=1, device="cuda"
        )
        slow = "reference" if method == "liere" else "spectral"
        for got, expected in zip(outcome(rope, "triton"), outcome(rope, slow), strict=True):
            worst = max(worst, float((got - expected).norm() / expected.norm()))
    for size in (4, 8, 16):
        skew = torch.randn(5, size, size, device="cuda", dtype=torch.float64)
        skew = skew - skew.mT
        got, expected = (find(skew)[1] for find in (skew_spectrum_kernel, spectrum_by_eigh))
        worst = max(worst, float((got - expected).abs().max()))
    print(f"largest error {worst:.1e}")
    if not worst < 1e-4:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
