"""Which parameterization of an orthogonal basis trains best, and what each costs.

    python benchmarks/basis.py

The choice behind comrope-torus. A student that knows the frequencies but not the basis learns the
scores of a teacher with a random one, by Adam, from the identity; the figures are the loss that is
left, relative to the start (median and worst over seeds), and the time of forward and backward for
the 96 blocks of a ViT-B layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from comrope.angles import CommutingAngles
from comrope.methods.base import skew_part
from comrope.methods.comrope_torus import cayley
from comrope.ops import rotate

HEADS, BLOCKS, SIZE, TOKENS = 2, 4, 8, 48
STEPS, SEEDS = 400, 8


def exponential(raw: Tensor) -> Tensor:
    return torch.matrix_exp(skew_part(raw))


def through_cayley(raw: Tensor) -> Tensor:
    return cayley(skew_part(raw))


def householder(raw: Tensor) -> Tensor:
    """The product of b reflections along the columns of I + raw."""
    basis = torch.eye(raw.shape[-1]).expand_as(raw)
    columns = (torch.eye(raw.shape[-1]) + raw).unbind(-1)
    for v in columns:
        v = v / v.norm(dim=-1, keepdim=True)
        basis = basis - 2 * (basis @ v[..., None]) * v[..., None, :]
    return basis


def remaining_loss(basis: Callable[[Tensor], Tensor], rate: float, seed: int) -> float:
    torch.manual_seed(seed)
    q, k = torch.randn(2, 8, HEADS, TOKENS, BLOCKS * SIZE).unbind(0)
    positions = torch.rand(TOKENS, 2)
    frequencies = torch.randn(2, HEADS, BLOCKS, SIZE // 2) * (2 * (SIZE - 1)) ** 0.5

    def score(q_basis: Tensor) -> Tensor:
        a, b = rotate(q, k, positions, CommutingAngles(q_basis, frequencies, SIZE))
        return a @ b.mT

    shape = (HEADS, BLOCKS, SIZE, SIZE)
    target = score(torch.linalg.qr(torch.randn(shape))[0])
    raw = torch.zeros(shape, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=rate)
    losses = []
    for _ in range(STEPS):
        loss = (score(basis(raw)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[-1] / losses[0]


def milliseconds(basis: Callable[[Tensor], Tensor]) -> float:
    raw = (0.1 * torch.randn(12, 8, SIZE, SIZE)).requires_grad_()
    times = []
    for _ in range(60):
        start = time.perf_counter()
        basis(raw).sum().backward()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[10:])


def main() -> None:
    print(f"{'basis':12} {'time':>9} {'rate':>6} {'median loss left':>17} {'worst':>9}")
    for name, basis in (
        ("cayley", through_cayley),
        ("exponential", exponential),
        ("householder", householder),
    ):
        cost = milliseconds(basis)
        for rate in (0.003, 0.01, 0.03):
            left = [remaining_loss(basis, rate, seed) for seed in range(SEEDS)]
            print(f"{name:12} {cost:6.2f} ms {rate:6} {statistics.median(left):17.1e} "
                  f"{max(left):9.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
