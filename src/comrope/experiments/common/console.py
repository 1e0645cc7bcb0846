"""Terminal output, facts about the machine, peak memory."""

from __future__ import annotations

import contextlib
import platform
import resource
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from comrope import __version__

__all__ = ["console", "machine", "now", "peak_memory", "progress_bar", "say"]

console = Console(stderr=True, highlight=False)
TORCH_PACKAGES = ("torch", "timm", "accelerate")


def say(text: str) -> None:
    """Print one line to stderr, without line breaks in paths and without markup."""
    console.print(text, soft_wrap=True, markup=False)


@contextlib.contextmanager
def progress_bar(shown: bool, unit: str) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not shown, refresh_per_second=4) as bar:
        yield bar


def peak_memory(device: torch.device) -> float:
    """Return the peak memory so far in GiB, of the GPU or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**30 if platform.system() == "Darwin" else 2**20)


def machine(device: torch.device) -> dict[str, str]:
    """Return hardware, versions and date, which every reported number needs."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else _cpu_name()
    versions = {package: metadata.version(package) for package in TORCH_PACKAGES}
    about = {"device": name, "python": platform.python_version(), "comrope": __version__}
    return {**about, **versions, "date": now()[:10]}


def _cpu_name() -> str:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
