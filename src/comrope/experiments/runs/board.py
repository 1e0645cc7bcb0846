"""Scalars of a run, for TensorBoard.

torch's ``SummaryWriter`` is not used: it writes in a thread. If that cannot write, it prints a
traceback, and the next scalar ends the training.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comrope.experiments.common.console import say

__all__ = ["Board"]

VERSION = "brain.Event:2"  # of the format of the file


class Board:
    """Append scalars to an event file; if it cannot be written, say so once.

    Without the package tensorboard, there is no file.

    Args:
        folder: The folder of the event files.
        resume_from: The step after which the run continues. TensorBoard then does not show what
            other files have of later steps.
    """

    def __init__(self, folder: Path, *, resume_from: int) -> None:
        self.path: Path | None = None
        try:
            from tensorboard.compat.proto import event_pb2
        except ImportError:
            return
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
        self.path = folder / name
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._append(
            event_pb2.Event(file_version=VERSION),
            event_pb2.Event(step=resume_from + 1, session_log=start),
        )

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append scalars of a step, by their names."""
        if self.path is None or not scalars:
            return
        from tensorboard.compat.proto import event_pb2, summary_pb2

        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in scalars.items()
        ]
        self._append(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=values)))

    def _append(self, *events: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self.path is not None
        try:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("ab") as file:
                writer = RecordWriter(file)
                for event in events:
                    event.wall_time = time.time()
                    writer.write(event.SerializeToString())
        except OSError as error:
            say(f"{self.path} cannot be written ({error.strerror}); the run has no more of it")
            self.path = None
