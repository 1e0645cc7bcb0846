"""``comrope bench``: time and memory of every method and its rivals, after a correctness check.

Every candidate is checked in the same process before it is timed (``parity``). If the check fails,
no time is reported and the exit code is 1. ``runner`` measures and compares; ``rivals`` contains
the implementations of other libraries.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from comrope.experiments.bench.cases import Setting
from comrope.experiments.bench.cpu import decode, large_step, layer, layer_bfloat16, step
from comrope.experiments.bench.gpt import gpt
from comrope.experiments.bench.language import llama_block, llama_model
from comrope.experiments.bench.networks import attention, vit
from comrope.experiments.bench.report import described_machine, print_tables, write
from comrope.experiments.bench.rotations import liere, llama_rotation, rotation
from comrope.experiments.bench.runner import FAILURES, Part, run_part
from comrope.experiments.bench.sizes import sizes
from comrope.experiments.common.console import progress_bar, say
from comrope.experiments.common.errors import Interrupted, UserError

__all__ = ["DTYPES", "PRESETS", "SUITES", "Preset", "bench", "setting_of"]

SUITES: dict[str, tuple[Callable[[Setting], Part], ...]] = {
    "rotation": (rotation,),
    "attention": (attention,),
    "vit": (vit,),
    "llama": (llama_rotation, llama_block),
    "language": (llama_model,),
    "gpt": (gpt,),
    "liere": (liere,),
    "layer": (layer, layer_bfloat16),
    "step": (step, large_step),
    "decode": (decode,),
    "sizes": (sizes,),
}
ON_A_CPU = ("layer", "step", "decode", "sizes")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Preset:
    """Sizes and defaults of one scale."""

    batch: int
    rounds: int
    compile: bool
    sizes: dict[str, Any]
    runs: int = 1
    suites: tuple[str, ...] = tuple(suite for suite in SUITES if suite not in ON_A_CPU)


def _language(
    *, width: int, depth: int, heads: int, vocabulary: int, tokens: int
) -> dict[str, int]:
    """Return the configuration of a Llama; four query heads share a key head."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "max_position_embeddings": tokens,
        "tokens": tokens,
    }


def _gpt(name: str, *, depth: int, vocabulary: int, context: int, batch: int) -> dict[str, Any]:
    """Return the sizes of a GPT with a name of ``comrope.models.gpt.SIZES``."""
    sizes = {"depth": depth, "vocab_size": vocabulary, "context": context}
    return {"name": name, **sizes, "batch": batch}


PRESETS = {
    "small": Preset(
        batch=2,
        rounds=5,
        compile=False,
        sizes={
            "size": "small",
            "depth": 2,
            "grid": (4, 4),
            "llama_tokens": 128,
            "llama_heads": 4,
            "llama_key_heads": 2,
            "llama_head_dim": 32,
            "language": _language(width=64, depth=2, heads=4, vocabulary=128, tokens=32),
            "gpt": _gpt("gpt_nano", depth=2, vocabulary=128, context=32, batch=4),
            "copied_mib": 64,
        },
    ),
    "full": Preset(
        batch=128,
        rounds=20,
        compile=True,
        sizes={
            "size": "base",
            "depth": 12,
            "grid": (14, 14),
            "llama_tokens": 8192,
            "llama_heads": 32,
            "llama_key_heads": 8,
            "llama_head_dim": 128,
            "language": _language(width=2048, depth=16, heads=32, vocabulary=32000, tokens=4096),
            "gpt": _gpt("gpt_small", depth=12, vocabulary=50257, context=1024, batch=16),
            "copied_mib": 1024,
        },
    ),
    "cpu": Preset(
        batch=8,
        rounds=15,
        compile=True,
        runs=3,
        suites=ON_A_CPU,
        sizes={
            "size": "small",
            "depth": 12,
            "grid": (14, 14),
            "llama_tokens": 512,
            "llama_heads": 12,
            "llama_key_heads": 12,
            "llama_head_dim": 64,
            "language": _language(width=384, depth=6, heads=8, vocabulary=8192, tokens=512),
            "gpt": _gpt("gpt_nano", depth=4, vocabulary=256, context=256, batch=4),
            "copied_mib": 256,
        },
    ),
}


def setting_of(
    preset: str = "small",
    *,
    device: str = "auto",
    dtype: str | None = None,
    batch: int | None = None,
    rounds: int | None = None,
    runs: int | None = None,
    compiled: bool | None = None,
) -> Setting:
    """Return the setting of a preset with the options of a command."""
    chosen = PRESETS[_one_of("preset", preset, PRESETS)]
    place = _device(device)
    usual = "bfloat16" if place.type == "cuda" else "float32"
    return Setting(
        device=place,
        dtype=DTYPES[_one_of("dtype", dtype or usual, DTYPES)],
        rounds=_positive("rounds", rounds, chosen.rounds),
        runs=_positive("runs", runs, chosen.runs),
        compile=chosen.compile if compiled is None else compiled,
        batch=_positive("batch", batch, chosen.batch),
        **chosen.sizes,
    )


def bench(
    suites: Sequence[str],
    setting: Setting,
    out: Path,
    *,
    preset: str = "",
    only: Sequence[str] = (),
    progress: bool = True,
) -> dict[str, Any]:
    """Run the suites, write results to ``out`` after each, print the tables.

    Args:
        suites: Names of ``SUITES``, or ``"all"``; by default those of the preset.
        setting: Sizes, device and dtype.
        out: Folder for results.json and figure.png.
        preset: Name of the preset, for the record.
        only: Run only candidates whose names contain one of these, and the reference row.
        progress: Show a progress bar.

    Returns:
        The content of results.json; ``failures`` counts the rows whose check failed.
    """
    wanted = _suites(suites or (PRESETS[preset].suites if preset in PRESETS else ()))
    if out.exists() and not out.is_dir():
        raise UserError(f"out: {out} is a file, expected a folder")
    if setting.device.type == "cuda":
        torch.cuda.set_device(setting.device)
        _fill_workspaces(setting)
    results: dict[str, Any] = {
        "command": shlex.join(["comrope", *sys.argv[1:]]),
        "preset": preset,
        "suites": wanted,
        "finished": {},
        "machine": described_machine(setting.device),
        "setting": _plain(setting),
        "failures": 0,
        "rows": [],
    }
    for suite in wanted:
        begun = time.monotonic()
        try:
            with _stopped_by_signal() as came:
                for make in SUITES[suite]:
                    if (part := _select(make(setting), only)).candidates:
                        _run(part, setting, progress, results["rows"])
        except KeyboardInterrupt:
            _keep_timed(results, out)
            if not came:
                raise
            line = f"{suite}: stopped; the measured times are in {out}"
            raise Interrupted(line, came[0]) from None
        results["finished"][suite] = round(time.monotonic() - begun, 1)
        results["failures"] = sum(row["status"] in FAILURES for row in results["rows"])
        if results["rows"]:
            write(results, out)
        if suite != wanted[-1]:
            say(f"{suite}: {results['finished'][suite]:.0f} s, written to {out}")
    if not results["rows"]:
        raise UserError(f"only: no row's name contains {' or '.join(only)}")
    print_tables(results["rows"])
    for name in ("results.json", "figure.png"):
        print(f"{name}: {out / name}")
    return results


def _fill_workspaces(setting: Setting) -> None:
    """Make libraries allocate their workspaces, so that they do not count for a candidate."""
    x = torch.randn(256, 256, device=setting.device, dtype=setting.dtype, requires_grad=True)
    torch.nn.functional.linear(x, x, x[0]).sum().backward()


def _select(part: Part, only: Sequence[str]) -> Part:
    wanted = [
        candidate
        for candidate in part.candidates
        if candidate.name == part.reference_row or any(text in candidate.name for text in only)
    ]
    alone = all(candidate.name == part.reference_row for candidate in wanted)
    return replace(part, candidates=[] if alone else wanted) if only else part


@contextlib.contextmanager
def _stopped_by_signal() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt on SIGTERM and Ctrl-C; the list then holds the signal's number."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came  # only the main thread handles signals
        return

    def stop(number: int, _: Any) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keep_timed(results: dict[str, Any], out: Path) -> None:
    done = results["finished"]
    results["rows"] = [r for r in results["rows"] if r["suite"] in done or r["measures"]]
    results["failures"] = sum(row["status"] in FAILURES for row in results["rows"])
    if results["rows"]:
        write(results, out)


def _run(part: Part, setting: Setting, progress: bool, into: list[dict[str, Any]]) -> None:
    with progress_bar(progress, "checks and rounds") as bar:
        total = len(part.candidates) + (part.rounds or setting.rounds) * setting.runs
        task = bar.add_task(part.suite, total=total, note="")

        def advance(note: str) -> None:
            bar.update(task, advance=1, note=note)

        run_part(part, setting, advance, into)


def _plain(setting: Setting) -> dict[str, Any]:
    """Return the setting as plain JSON values."""
    values = {"device": str(setting.device), "dtype": setting.dtype_name}
    return vars(setting) | values | {"grid": list(setting.grid)}


def _suites(names: Sequence[str]) -> list[str]:
    """Return the names of the suites to run, each once, in the order of ``SUITES``."""
    for name in names:
        _one_of("suites", name, ("all", *SUITES))
    everything = "all" in names or not names
    return [suite for suite in SUITES if everything or suite in names]


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: this machine has {torch.cuda.device_count()} GPUs, got {name!r}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _one_of(label: str, name: str, choices: Any) -> str:
    if name not in choices:
        raise UserError(f"{label}: expected one of {', '.join(choices)}, got {name!r}")
    return name


def _positive(label: str, value: int | None, usual: int) -> int:
    if value is not None and value < 1:
        raise UserError(f"{label}: expected at least 1, got {value}")
    return value or usual
