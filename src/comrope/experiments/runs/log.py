"""The log of a run: JSON lines and TensorBoard."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from comrope.experiments.common.console import now
from comrope.experiments.common.files import write_text
from comrope.experiments.runs.directory import LOG

__all__ = ["Log", "read_log"]


class Log:
    """Append records of a run; a resume removes the records of the steps that it repeats."""

    def __init__(self, folder: Path, *, resume_from: int) -> None:
        self.path = folder / LOG
        if self.path.exists():
            kept = [r for r in read_log(self.path) if r.get("step", 0) <= resume_from]
            kept.append({"event": "resumed", "step": resume_from, "time": now()})
            write_text(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self.writer = _tensorboard(folder / "tensorboard", resume_from)

    def write(self, event: str, **values: Any) -> None:
        record = {"event": event, **values, "time": now()}
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
    """Return the records of a log, without an incomplete last line."""
    records = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def _tensorboard(folder: Path, resume_from: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=resume_from + 1)
