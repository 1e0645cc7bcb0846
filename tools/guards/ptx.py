"""G5: the machine code of every kernel launch, compiled for a GPU that need not be there.

A launch is caught where Triton starts it, on tensors without memory, and compiled to PTX for
compute capability 9.0. Names of kernels and lines for debuggers are left out; the grid and the
number of warps are part of the digest. Keys say what is launched, not where the code is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from guards import tree

__all__ = ["observe"]

PROCESSES = 2
VIT = {"batch": 128, "tokens": 197, "heads": 12, "dim": 64, "axes": 2}
LLAMA = {"batch": 1, "tokens": 8192, "heads": 8, "dim": 128, "axes": 1, "packed": False}
DTYPES = ("bf16", "fp16", "fp32")


def observe() -> dict[str, Any]:
    """Return launch -> digests of what it compiles to, by parts in processes of their own."""
    try:
        import triton
    except ImportError:
        raise tree.Skipped("no triton") from None
    parts = [_start(part) for part in range(PROCESSES)]
    found: dict[str, Any] = {}
    for part in parts:
        out, _ = part.communicate()
        if part.returncode:
            raise SystemExit(f"ptx: compiling failed with exit code {part.returncode}")
        found |= json.loads(out)
    order = [label for label, _ in launches()]
    return {"triton": triton.__version__, "launches": {label: found[label] for label in order}}


def differences(golden: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return launches with other code; another version of Triton makes other code of all."""
    from guards.compare import differences as compare

    if golden["triton"] != found["triton"]:
        return [f"triton: expected {golden['triton']}, found {found['triton']}"]
    return compare(golden, found)


def launches() -> list[tuple[str, Callable[[], None]]]:
    """Return what is launched, by a name that says it, and how."""
    found: list[tuple[str, Callable[[], None]]] = []
    for label, settings in _turns():
        found.append((label, partial(_turn, **settings)))
    for dtype in DTYPES:
        for size, axes, group, per_sample in (
            (2, 2, 1, False), (3, 2, 1, True), (4, 1, 4, False), (8, 2, 1, False), (16, 3, 1, True),
        ):  # fmt: skip
            label = f"free, b={size}, N={axes}, {dtype}, G={group}"
            label += ", positions per sample" if per_sample else ""
            settings = {"size": size, "axes": axes, "group": group, "per_sample": per_sample}
            found.append((label, partial(_free, dtype=dtype, **settings)))
    for size, axes in ((2, 1), (3, 2), (4, 2), (5, 1), (8, 2), (16, 1)):
        found.append((f"exponential, b={size}, N={axes}", partial(_exponential, size, axes)))
    for size in (4, 8, 16, 32):
        for dtype in ("fp32", "fp64"):
            found.append((f"spectrum, b={size}, {dtype}", partial(_spectrum, size, dtype)))
    return found


def _turns() -> Iterator[tuple[str, dict[str, Any]]]:
    """Rotations forward and backward: every kind with every type, and each option with some."""

    def one(label: str, kind: str, dtype: str, **more: Any) -> tuple[str, dict[str, Any]]:
        return f"{label}, {kind}, {dtype}", {**VIT, "kind": kind, "dtype": dtype, **more}

    for dtype in DTYPES:
        yield one("ViT, b=2", "planes", dtype)
        for kind in ("torus", "line"):
            for size in (4, 8):
                yield one(f"ViT, b={size}", kind, dtype, size=size)
        yield one("Llama halves, G=4, b=2", "planes", dtype, **LLAMA, group=4, halves=True)
        yield one("Llama halves, G=4, b=8", "line", dtype, **LLAMA, group=4, halves=True, size=8)
    yield one("ViT, b=16", "torus", "bf16", size=16)
    yield one("ViT, b=16", "line", "fp16", size=16)
    yield one("ViT, b=16", "line", "fp32", size=16)
    yield one("b=2 with a basis", "torus", "bf16", size=2)
    yield one("b=3, D=72", "planes", "fp32", size=3, dim=72)
    yield one("b=3, D=72, N=3", "torus", "fp16", size=3, dim=72, axes=3)
    yield one("b=3, D=72", "line", "bf16", size=3, dim=72)
    yield one("b=9, D=72, N=3", "line", "fp16", size=9, dim=72, axes=3)
    yield one("b=8, D=40, prefix", "torus", "fp32", dim=40, prefix=1)
    samples = {"per_sample": True, "prefix": 1}
    yield one("positions per sample, b=2", "planes", "bf16", **samples)
    yield one("positions per sample, b=8", "torus", "fp16", **samples)
    yield one("positions per sample, b=16", "line", "bf16", size=16, **samples)
    yield one("gradient of positions, b=2", "planes", "fp32", positions=True)
    yield one("gradient of positions, b=8", "torus", "bf16", positions=True)
    yield one("gradient of positions, b=8", "line", "fp32", positions=True)
    yield one("gradient of positions, b=16", "line", "bf16", size=16, positions=True)
    yield one("no gradient of angles, b=8", "line", "bf16", angles=False)
    yield one("no gradient of angles, b=2", "planes", "bf16", angles=False)
    yield one("halves, b=4", "torus", "bf16", size=4, halves=True)
    yield one("halves, b=16", "torus", "fp16", size=16, halves=True)
    yield one("Llama halves, G=4, b=16", "line", "bf16", **LLAMA, group=4, halves=True, size=16)
    yield one("one sample, N=1, b=8", "line", "bf16", batch=1, axes=1)
    yield one("N=3, b=8", "line", "bf16", axes=3)
    yield one("heads outside tokens, b=8", "line", "bf16", packed=False, contiguous=True)
    yield one("heads outside tokens, b=2", "planes", "fp16", packed=False, contiguous=True)


def _type(name: str) -> Any:
    import torch

    kinds = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    return getattr(torch, kinds[name])


def _turn(
    kind: str, dtype: str, batch: int, tokens: int, heads: int, dim: int, axes: int, size: int = 8,
    group: int = 1, packed: bool = True, halves: bool = False, per_sample: bool = False,
    prefix: int = 0, positions: bool = False, angles: bool = True, contiguous: bool = False,
) -> None:  # fmt: skip
    import torch

    from comrope.ops.kernels import launch
    from comrope.ops.kernels.launch import Heads, RotationArgs
    from comrope.ops.layout import unpack

    size = 2 if kind == "planes" and size == 8 else size
    blocks, planes = dim // size, size // 2
    qkv = torch.empty(batch, tokens, heads * (group + 2), dim, dtype=_type(dtype))
    back = torch.empty_like(qkv)
    given, there = (Heads(*unpack(x, heads)) for x in (qkv, back))
    if contiguous:
        given, there = (Heads(*(part.contiguous() for part in x)) for x in (given, there))
    if not packed:
        given, there = (x._replace(v=None) for x in (given, there))
    out = Heads(*(None if x is None else launch.empty_like_order(x) for x in given))
    shape = (batch, tokens - prefix, axes) if per_sample else (tokens - prefix, axes)
    args = RotationArgs(
        torch.empty(shape),
        torch.empty(axes, heads, blocks, planes),
        None if kind == "planes" else torch.empty(heads, blocks, size, size),
        size, prefix, halves,
    )  # fmt: skip
    line = kind == "line"
    launch.launch_forward(given, args, out)
    launch.launch_backward(
        out, out, args, there,
        direction=torch.empty(axes, heads, blocks) if line else None,
        planes=torch.empty(heads, blocks, planes) if line else None,
        wants_angles=angles, wants_positions=positions,
    )  # fmt: skip


def _free(dtype: str, size: int, axes: int, group: int, per_sample: bool) -> None:
    import torch

    from comrope.ops.kernels.apply_rotation import apply_free, apply_free_backward

    batch, tokens, heads, blocks = 64, 196, 6, 4 if size > 8 else 8
    dim = blocks * size
    q = torch.empty(batch, heads * group, tokens, dim, dtype=_type(dtype))
    k = torch.empty(batch, heads, tokens, dim, dtype=_type(dtype))
    rows = batch * tokens if per_sample else tokens
    rotations = torch.empty(rows, heads * blocks, size, size)
    for back in (False, True):
        _kernels(apply_free)(q, k, rotations, back)
    _kernels(apply_free_backward)(q, k, q, k, rotations)


def _exponential(size: int, axes: int) -> None:
    import torch

    from comrope.ops.kernels.exponential import free_adjoint, free_rotations

    rows, blocks = 196, 48
    positions, skew = torch.empty(rows, axes), torch.empty(axes, blocks, size, size)
    _kernels(free_rotations)(positions, skew)
    _kernels(free_adjoint)(positions, skew, torch.empty(rows, blocks, size, size))


def _spectrum(size: int, dtype: str) -> None:
    import torch

    from comrope.ops.kernels.jacobi import skew_spectrum_kernel

    class Cuda(torch.Tensor):
        """Says that it is on a GPU, so that the launch is the one for a GPU."""

        is_cuda = True  # type: ignore[assignment]

        def contiguous(self, *_: Any, **__: Any) -> Cuda:  # type: ignore[override]
            return self

    skew = torch.empty(72, size, size, dtype=_type(dtype)).as_subclass(Cuda)
    skew_spectrum_kernel(skew)


def _kernels(operator: Any) -> Callable[..., Any]:
    """The function behind a custom operator: of tensors without memory, it would return shapes."""
    return operator._init_fn  # type: ignore[no-any-return]


def _start(part: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--part", str(part), "--tree", str(tree.root())]
    cache = Path(tempfile.gettempdir()) / f"comrope-guard-ptx-{os.getuid()}"
    settings = {"TRITON_CACHE_DIR": str(cache), "TRITON_DISABLE_LINE_INFO": "1"}
    environment = {**os.environ, **settings, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


class Compiler:
    """In the place of Triton's launches: compiles them, and keeps digests."""

    def __init__(self) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.runtime.jit import create_function_from_signature

        self.target = GPUTarget("cuda", 90, 32)
        self.backend = make_backend(self.target)
        self.compile, self.source = triton.compile, ASTSource
        self.bind = create_function_from_signature
        # The assembler takes as long as all the rest, and PTX is before it.
        type(self.backend).make_cubin = lambda *_: b""
        self.found: list[str] = []

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """As ``JITFunction.run`` does it, up to the launch."""
        options.setdefault("debug", False)
        binder = self.bind(kernel.signature, kernel.params, self.backend)
        bound, specialization, rest = binder(*args, **options)
        settings, signature, constants, attributes = kernel._pack_args(
            self.backend, options, bound, specialization, rest
        )
        source = self.source(kernel, signature, constants, attributes)
        compiled = self.compile(source, target=self.target, options=settings.__dict__)
        code = _normal(compiled.asm["ptx"], compiled.metadata.name)
        cut = f"grid {tuple(grid)}, warps {compiled.metadata.num_warps}"
        self.found.append(tree.bytes_digest(code.encode(), cut.encode()))


def _normal(code: str, name: str) -> str:
    """PTX without names of kernels, files, lines and comments."""
    code = code.split(".section\t.debug")[0].replace(name, "KERNEL")
    lines = [re.sub(r"\s*//.*", "", line).rstrip() for line in code.splitlines()]
    return "\n".join(line for line in lines if line and not re.match(r"\s*\.(file|loc)\b", line))


def _part(number: int) -> dict[str, list[str]]:
    import torch
    from triton.runtime.jit import JITFunction

    compiler, found = Compiler(), {}
    JITFunction.run = lambda kernel, *args, **options: compiler.run(kernel, *args, **options)
    torch.cuda.device_of = lambda _: contextlib.nullcontext()  # type: ignore[assignment, misc]
    # Alternating parts take about as long.
    for label, launch in launches()[number::PROCESSES]:
        compiler.found, begun = [], time.process_time()
        with torch.device("meta"):
            launch()
        found[label] = compiler.found
        if os.environ.get("GUARD_TIMES"):
            print(f"{time.process_time() - begun:6.1f} s  {label}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    _parser = argparse.ArgumentParser()
    _parser.add_argument("--part", type=int, required=True)
    _parser.add_argument("--tree", type=Path, required=True)
    _asked = _parser.parse_args()
    tree.pick(_asked.tree)
    print(json.dumps(_part(_asked.part)))
