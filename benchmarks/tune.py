"""Find the best tile sizes, warps and programs of the rotation kernels on this GPU.

    python benchmarks/tune.py                  # ViT-B at batch 128, bfloat16
    python benchmarks/tune.py --shape llama
    python benchmarks/tune.py --apart          # q and k in tensors of their own, without v

Every setting is checked against the spectral path first; one that disagrees gets no time. Times are
medians of the device alone; the share is that of the copy bandwidth measured in the same run, for
the bytes that must move. The best settings go into `TUNED` of `src/comrope/ops/kernels/launch.py`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

import comrope
from comrope.angles import CollinearAngles, CommutingAngles, GeneralAngles
from comrope.experiments.common.timing import make_ready, time_in_turns
from comrope.ops.kernels import launch
from comrope.ops.kernels.launch import Heads, RotationArgs, Tuning
from comrope.ops.kernels.operators import prepare
from comrope.ops.layout import unpack

DEVICE = torch.device("cuda")
SHAPES: dict[str, dict[str, int]] = {
    "vit": {"batch": 128, "tokens": 197, "heads": 12, "group": 1, "dim": 64, "axes": 2},
    "llama": {"batch": 1, "tokens": 8192, "heads": 8, "group": 4, "dim": 128, "axes": 1},
}
METHODS = ("rope-mixed", "comrope-torus", "comrope-ld")


TILES = [
    Tuning(tile=tile, warps=warps, columns=columns, programs=8)
    for tile, warps, columns in itertools.product((1024, 2048, 4096), (4, 8), (16, 32, 64))
]
SMALL_BLOCKS = [Tuning(warps=warps, programs=8, stages=3) for warps in (1, 2, 4)]


def use(tuning: Tuning) -> None:
    """Use it for every kernel."""
    for key in launch.TUNED:
        launch.TUNED[key] = tuning


def variations(best: Tuning) -> list[Tuning]:
    both = itertools.product((6, 8, 12, 16, 24), (2, 3, 4))
    return [best._replace(programs=n, stages=stages) for n, stages in both]


class Layer:
    """The rotation of one attention layer, forward and backward with all gradients.

    q, k and v are one packed tensor, or ``apart`` without v.
    """

    def __init__(self, method: str, shape: dict[str, int], block_size: int, apart: bool) -> None:
        torch.manual_seed(0)
        self.apart = apart
        self.rope = comrope.RotaryEmbedding(
            method, num_heads=shape["heads"], head_dim=shape["dim"], num_axes=shape["axes"],
            block_size=block_size, device=DEVICE,
        )  # fmt: skip
        heads = shape["heads"] * (shape["group"] + 2)
        size = (shape["batch"], shape["tokens"], heads, shape["dim"])
        self.qkv = torch.randn(size, device=DEVICE, dtype=torch.bfloat16)
        self.positions = torch.rand(*size[:2], shape["axes"], device=DEVICE)
        with torch.no_grad():
            positions, frequencies, basis, _, self.direction, self.planes, size = prepare(
                self.positions, self._angles()
            )
        self.args = RotationArgs(positions, frequencies, basis, size, 0, False)
        self.given = self._heads(self.qkv)
        self.out = Heads(*(launch.empty_like_order(x) for x in self.given if x is not None))
        self.rotated = Heads(*(torch.empty_like(x) for x in self.out if x is not None))
        self.grads = Heads(*(torch.randn_like(x) for x in self.out if x is not None))
        self.packed = torch.empty_like(self.qkv)
        self.back = self._heads(self.packed)
        # Forward: everything once in and once out. Backward: also the rotated q and k in.
        turned = sum(x.nbytes for x in self.given[:2])
        every = turned if apart else self.qkv.nbytes
        self.bytes = {"forward": 2 * every, "backward": 2 * every + turned}

    def _heads(self, packed: Tensor) -> Heads:
        q, k, v = unpack(packed, self.rope.num_heads)
        return Heads(q, k, None if self.apart else v)

    def forward(self) -> list[Tensor]:
        launch.launch_forward(self.given, self.args, self.out)
        return [x for x in self.out if x is not None]

    def backward(self) -> list[Tensor]:
        of_planes, of_matrix, _ = launch.launch_backward(
            self.rotated, self.grads, self.args, self.back,
            direction=self.direction, planes=self.planes, wants_angles=True, wants_positions=False,
        )  # fmt: skip
        before = [x for x in self.back if x is not None]
        return [*before, of_planes, self._seen(of_matrix)]

    def expected(self) -> dict[str, list[Tensor]]:
        """Return the results of the spectral path for the same tensors."""
        self.rope.backend = "spectral"
        qkv = self.qkv.clone().requires_grad_()
        angles = self._angles()
        parts = (
            [angles.direction, angles.skew]
            if isinstance(angles, CollinearAngles)
            else [angles.frequencies]
        )
        if isinstance(angles, CommutingAngles) and angles.basis is not None:
            parts.append(angles.basis)
        out = list(self.rope.rotate_qkv(qkv, self.positions, angles=angles))[
            : 2 if self.apart else 3
        ]
        for mine, found in zip(self.rotated, out, strict=False):
            if mine is not None:
                mine.copy_(found.detach())
        of_qkv, *grads = torch.autograd.grad(
            out, [qkv, *parts], [x for x in self.grads if x is not None]
        )
        if len(parts) > 1:
            grads = [grads[0], self._seen(grads[1])]
        before = [x for x in self._heads(of_qkv) if x is not None]
        return {"forward": out, "backward": [*before, *grads]}

    def poison(self) -> None:
        """Fill what is to be written with NaN."""
        for x in (*self.out, self.packed):
            if x is not None:
                x.fill_(torch.nan)

    def _angles(self) -> CommutingAngles | CollinearAngles:
        angles = self.rope.angles()
        assert not isinstance(angles, GeneralAngles)
        return angles

    def _seen(self, gradient: Tensor) -> Tensor:
        """Return the part of a matrix's gradient that skew or orthogonal matrices can follow."""
        if self.direction is None and self.args.basis is not None:
            gradient = self.args.basis.mT @ gradient
        return gradient - gradient.mT if gradient.numel() else gradient


def error_of(got: list[Tensor], expected: list[Tensor]) -> float:
    there = [x.detach().float() for x in got if x.numel()]
    pairs = zip(there, (x.detach().float() for x in expected), strict=True)
    errors = [(a - b.view(a.shape)).norm() / b.norm() for a, b in pairs]
    return float(torch.stack(errors).max())  # NaN if any is


def milliseconds(call: Callable[[], object]) -> float:
    work = make_ready(call, DEVICE, rounds=7, queued=True)
    return time_in_turns({"": work}, DEVICE)[""].ms


def measure(tuning: Tuning, layer: Layer, way: str, expected: list[Tensor]) -> float | str:
    """Return its time in milliseconds, or why it has none."""
    use(tuning)
    layer.poison()
    call: Callable[[], list[Tensor]] = getattr(layer, way)
    try:
        error = error_of(call(), expected)
    except Exception as problem:  # a setting that does not compile is no reason to stop
        return type(problem).__name__
    return milliseconds(call) if error < 0.02 else f"parity failed ({error:.1e})"


def tune(layer: Layer, label: str, copy: float) -> None:
    """Print the times of all settings, the best one first, forward and backward."""
    for way, expected in layer.expected().items():
        small = launch.in_registers(layer.given, layer.args)
        settings = SMALL_BLOCKS if small else TILES
        found = {one: measure(one, layer, way, expected) for one in settings}
        times = {one: ms for one, ms in found.items() if isinstance(ms, float)}
        for one in variations(min(times, key=times.__getitem__)) if times else ():
            found[one] = measure(one, layer, way, expected)
        for one in sorted(found, key=lambda one: (isinstance(found[one], str), found[one])):
            options = " ".join(f"{name} {value}" for name, value in one._asdict().items())
            print(f"{label} {way} {options}: {describe(found[one], layer.bytes[way] / copy)}")


def describe(found: float | str, least: float) -> str:
    if isinstance(found, str):
        return found
    return f"{1e3 * found:.0f} us ({least / found:.0%} of copying)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="vit")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    args = parser.parse_args()
    source = torch.empty(2**28, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / milliseconds(lambda: target.copy_(source))
    print(f"{torch.cuda.get_device_name()}: copying {copy / 1e9:.2f} TB/s")
    for method in args.methods:
        layer = Layer(method, SHAPES[args.shape], args.block_size, args.apart)
        tune(layer, method, copy)


if __name__ == "__main__":
    main()
