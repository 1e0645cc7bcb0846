"""Old names of what tasks know about views; studies still use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comrope.experiments.config import Config
from comrope.experiments.tasks import task_of
from comrope.experiments.tasks.build import training_resolution

__all__ = ["resolution_of", "said", "usual_view", "views_of"]


def resolution_of(config: Config) -> tuple[int, int]:
    return training_resolution(config.model.name)


def usual_view(config: Config) -> Any:
    return task_of(config).training_view


def views_of(config: Config, resolutions: Sequence[int] | None = None) -> dict[str, Any]:
    return task_of(config).views(resolutions)


def said(name: str) -> str:
    return f"{name} px" if name.isdigit() else name
