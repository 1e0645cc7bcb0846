"""Tasks: the data, model, training and evaluation of one kind of data each (see ``Task``)."""

from __future__ import annotations

import importlib
import reprlib
from typing import Any

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config
from comrope.experiments.tasks.base import Task

__all__ = ["TASKS", "Task", "task_of"]

# Name in recipes -> class, or "module:Class", which is imported when needed.
TASKS: dict[str, str | type[Task]] = {
    "images": "comrope.experiments.tasks.images:ImageTask",
    "clips": "comrope.experiments.tasks.clips:ClipTask",
    "detection": "comrope.experiments.tasks.detection:DetectionTask",
    "language": "comrope.experiments.tasks.language:LanguageTask",
}
# data.name -> task, for recipes that name no task; other data are images.
BY_DATA = {
    "ucf101": "clips",
    "moving": "clips",
    "coco": "detection",
    "scenes": "detection",
    "stdlib": "language",
    "text": "language",
}


def task_of(config: Config) -> Task:
    """Return the task of a configuration, and check the configuration.

    Raises:
        UserError: There is no such task, or a field is invalid for it.
    """
    name = config.task or BY_DATA.get(config.data.name, "images")
    return _class_of(name)(config)


def _class_of(name: str) -> type[Task]:
    found: Any = TASKS.get(name, name)
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), attribute)):
            raise UserError(
                f"task: expected one of {', '.join(TASKS)} or package.module:Class, got "
                f"{reprlib.repr(name)}"
            )
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(f"task: {reprlib.repr(name)} cannot be imported ({error})") from None
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(f"task: expected a subclass of Task, got {reprlib.repr(name)}")
    return found
