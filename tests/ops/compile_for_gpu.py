"""Compile the rotation kernels without a GPU, and print what the assembler reports.

    python tests/ops/compile_for_gpu.py

Prints a JSON line for every kernel: registers a thread, bytes spilled, and 16-byte loads and
stores. It replaces the launch only: everything before it is as on a GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from comrope.ops.kernels import launch
from comrope.ops.kernels.launch import Heads, RotationArgs
from comrope.ops.layout import unpack

TARGET = GPUTarget("cuda", 90, 32)
READER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def describe(kernel, arguments, options):
    """Return what a launch with these arguments would be compiled from, and its options."""
    backend = make_backend(TARGET)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"debug": False, **options}
    bound, specialization, rest = binder(*arguments, **options)
    settings, *described = kernel._pack_args(backend, options, bound, specialization, rest)
    return ASTSource(kernel, *described), settings.__dict__


class Compiled:
    """Replaces a kernel: a launch compiles it and prints what the assembler reports."""

    def __init__(self, kernel, label: str) -> None:
        self.kernel, self.label = kernel, label

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, **options) -> None:
        source, settings = describe(self.kernel, arguments, options)
        compiled = triton.compile(source, target=TARGET, options=settings)
        code = compiled.asm["ptx"]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "kernel.cubin")
            file.write_bytes(compiled.asm["cubin"])
            usage = subprocess.run(
                [READER, "--dump-resource-usage", file], capture_output=True, text=True, check=True
            ).stdout
        found = {
            "kernel": self.label,
            "registers": int(re.search(r"REG:(\d+)", usage)[1]),
            "spilled": int(re.search(r"STACK:(\d+)", usage)[1]),
            "wide_loads": code.count("ld.global.v4.b32"),
            "wide_stores": code.count("st.global.v4.b32"),
        }
        print(json.dumps(found), flush=True)


def compile_both(
    label: str, kind: str, dtype: torch.dtype, *, packed: bool = True, batch: int = 128,
    tokens: int = 197, heads: int = 12, group: int = 1, dim: int = 64, size: int = 8, axes: int = 2,
    halves: bool = False,
) -> None:  # fmt: skip
    """Compile forward and backward of a torus, a line, or planes without a basis."""
    for name, way in (
        ("rotate_kernel", "forward"),
        ("rotate_blocks_kernel", "forward"),
        ("rotate_backward_kernel", "backward"),
        ("rotate_blocks_backward_kernel", "backward"),
        ("angle_gradients_kernel", "angle gradients"),
    ):
        kernel = getattr(launch, name)
        kernel = kernel.kernel if isinstance(kernel, Compiled) else kernel
        setattr(launch, name, Compiled(kernel, f"{label} {way}"))
    with torch.device("meta"):
        qkv = torch.empty(batch, tokens, heads * (group + 2), dim, dtype=dtype)
        given = Heads(*unpack(qkv, heads))
        out = Heads(*map(launch.empty_like_order, given))
        back = Heads(*unpack(torch.empty_like(qkv), heads))
        if not packed:
            given, out, back = (x._replace(v=None) for x in (given, out, back))
        size = 2 if kind == "planes" else size
        args = RotationArgs(
            torch.empty(batch, tokens, axes),
            torch.empty(axes, heads, dim // size, size // 2),
            None if kind == "planes" else torch.empty(heads, dim // size, size, size),
            size, 0, halves,
        )  # fmt: skip
        shape = axes, heads, dim // size
        direction = torch.empty(shape) if kind == "line" else None
        planes = torch.empty(*shape[1:], size // 2) if kind == "line" else None
        launch.launch_forward(given, args, out)
        launch.launch_backward(
            out, out, args, back, direction=direction, planes=planes, wants_angles=True,
            wants_positions=False,
        )  # fmt: skip


if __name__ == "__main__":
    for kind in ("planes", "torus", "line"):
        compile_both(f"ViT-B {kind}", kind, torch.bfloat16)
    llama = {"batch": 1, "tokens": 8192, "heads": 8, "group": 4, "dim": 128, "axes": 1}
    compile_both("Llama line", "line", torch.bfloat16, packed=False, halves=True, **llama)
    compile_both("odd line", "line", torch.float16, dim=72, size=9, axes=3)
