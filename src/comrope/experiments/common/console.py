"""What a run tells while it goes on: progress on the terminal, JSON lines, TensorBoard."""

from __future__ import annotations

import contextlib
import json
import platform
import resource
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from comrope.experiments.runs.directory import LOG
from comrope.experiments.training.checkpoint import write_atomically

__all__ = ["Log", "console", "machine", "peak_memory", "progress_bar", "read_log", "say"]

console = Console(stderr=True, highlight=False)
TORCH_PACKAGES = ("torch", "timm", "accelerate")


def say(text: str) -> None:
    """A line to whoever watches, as it is: paths are neither broken nor read as markup."""
    console.print(text, soft_wrap=True, markup=False)


class Log:
    """JSON lines and TensorBoard of a run; records of steps that a resume repeats are dropped."""

    def __init__(self, folder: Path, *, resume_from: int) -> None:
        self.path = folder / LOG
        if self.path.exists():
            kept = [r for r in read_log(self.path) if r.get("step", 0) <= resume_from]
            kept.append({"event": "resumed", "step": resume_from, "time": _now()})
            write_atomically(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self.writer = _tensorboard(folder / "tensorboard", resume_from)

    def write(self, event: str, **values: Any) -> None:
        record = {"event": event, **values, "time": _now()}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self.writer is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and name != "step":
                    self.writer.add_scalar(f"{event}/{name}", value, values.get("step", 0))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log; a last line that was cut off by a kill is left out."""
    records = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


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
    """GiB at most so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**30 if platform.system() == "Darwin" else 2**20)


def machine(device: torch.device) -> dict[str, str]:
    """The hardware, versions and date that a number belongs to."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else _cpu_name()
    versions = {package: metadata.version(package) for package in TORCH_PACKAGES}
    return {"device": name, "python": platform.python_version(), **versions, "date": _now()[:10]}


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _tensorboard(folder: Path, resume_from: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=resume_from + 1)
