"""How the rotation kernels are best cut on this GPU: tile sizes, warps and programs, side by side.

    python benchmarks/tune.py                  # ViT-B at batch 128, bfloat16
    python benchmarks/tune.py --shape llama

Every cut is checked against the spectral path first, and one that disagrees shows no speed. Times
are medians; the share is that of the copy bandwidth measured in the same run, for the bytes that
must move. What wins here goes into `src/comrope/ops/kernels/launch.py`.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

import comrope
from comrope.ops.kernels import launch

SHAPES: dict[str, dict[str, int]] = {
    "vit": {"batch": 128, "tokens": 197, "heads": 12, "group": 1, "dim": 64, "axes": 2},
    "llama": {"batch": 1, "tokens": 8192, "heads": 8, "group": 4, "dim": 128, "axes": 1},
}
METHODS = ("rope-mixed", "comrope-torus", "comrope-ld")
CUTS = {
    "columns": (16, 32, 64),
    "tile": (2048, 4096),
    "warps": (4, 8),
    "programs": (1024, 4096),
}


def settle(columns: int, tile: int, warps: int, programs: int) -> None:
    """Cut every kernel so."""
    launch.COLUMNS = launch.COLUMNS_WITH_BASIS = launch.COLUMNS_OF_LINE = columns
    launch.TILE, launch.WARPS = tile, warps
    launch.FORWARD_PROGRAMS = launch.BACKWARD_PROGRAMS = programs


class Layer:
    """The packed rotation of one attention layer."""

    def __init__(self, method: str, shape: dict[str, int]) -> None:
        torch.manual_seed(0)
        self.rope = comrope.RotaryEmbedding(
            method, num_heads=shape["heads"], head_dim=shape["dim"], num_axes=shape["axes"],
            device="cuda",
        )  # fmt: skip
        heads = shape["heads"] * (shape["group"] + 2)
        size = (shape["batch"], shape["tokens"], heads, shape["dim"])
        self.qkv = torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.positions = torch.rand(*size[:2], shape["axes"], device="cuda")
        # Forward: everything once in and once out. Backward: also the rotated q and k in.
        self.bytes_forward = 2 * self.qkv.nbytes
        turned = (shape["group"] + 1) / (shape["group"] + 2)
        self.bytes_backward = int((2 + turned) * self.qkv.nbytes)

    def forward(self, backend: str) -> tuple[Tensor, ...]:
        self.rope.backend = backend
        return self.rope.packed(self.qkv, self.positions)

    def gradients(self, backend: str) -> list[Tensor]:
        q, k, v = self.forward(backend)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        wanted = [self.qkv, *self.rope.parameters()]
        return [out.float(), *torch.autograd.grad(out.float().square().sum(), wanted)]


def error_of(layer: Layer, expected: list[Tensor]) -> float:
    got = layer.gradients("triton")
    pairs = zip(got, expected, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def times_of(layer: Layer) -> tuple[float, float]:
    """Median milliseconds of the forward pass, and of the backward pass with every gradient."""
    forward = do_bench(lambda: layer.forward("triton"), return_mode="median")
    rotated = layer.forward("triton")
    grads = [torch.randn_like(x) for x in rotated]
    wanted = [layer.qkv, *layer.rope.parameters()]

    def backward() -> Any:
        return torch.autograd.grad(rotated, wanted, grads, retain_graph=True)

    return forward, do_bench(backward, return_mode="median")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="vit")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    args = parser.parse_args()
    source = torch.empty(2**28, device="cuda", dtype=torch.bfloat16)
    copy = 2 * source.nbytes / do_bench(source.clone, return_mode="median")
    print(f"{torch.cuda.get_device_name()}: copying {copy / 1e9:.2f} TB/s")
    for method in args.methods:
        layer = Layer(method, SHAPES[args.shape])
        expected = layer.gradients("spectral")
        for cut in itertools.product(*CUTS.values()):
            settle(*cut)
            label = f"{method:14s} " + " ".join(f"{a} {b}" for a, b in zip(CUTS, cut, strict=True))
            try:
                error = error_of(layer, expected)
            except Exception as problem:  # a cut that does not compile is no reason to stop
                print(f"{label}: {type(problem).__name__}")
                continue
            if not error < 0.02:
                print(f"{label}: parity failed ({error:.1e})")
                continue
            forward, backward = times_of(layer)
            there, back = (
                layer.bytes_forward / copy / forward,
                layer.bytes_backward / copy / backward,
            )
            print(
                f"{label}: forward {1e3 * forward:.0f} us ({there:.0%} of copying), "
                f"backward {1e3 * backward:.0f} us ({back:.0%})",
                flush=True,
            )


if __name__ == "__main__":
    main()
