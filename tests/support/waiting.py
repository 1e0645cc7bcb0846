"""A task that waits at one place, so that a signal comes there; for processes of their own.

Environment variables: PLACE; NOTE, the file that appears when it waits; SECONDS, for how long.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from support.toy import Curve


def wait(place: str) -> None:
    if place == os.environ["PLACE"]:
        Path(os.environ["NOTE"]).touch()
        time.sleep(float(os.environ["SECONDS"]))


class Waiting(Curve):
    def open(self, **options: Any) -> Any:
        wait("start")
        return super().open(**options)

    def loss(self, *arguments: Any) -> Any:
        wait("step")
        try:
            wait("library")
        except BaseException:
            raise RuntimeError("not what was raised") from None
        return super().loss(*arguments)

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        wait("evaluation")
        return super().evaluate(*arguments, **options)
