"""G6: the batches of training and evaluation: which samples, in which order, augmented how."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import islice
from typing import Any

from guards.tree import bytes_digest, config_of, fingerprint

__all__ = ["observe"]

KINDS = {"images": "digits", "clips": "moving", "boxes": "scenes"}
FIRST = 20
AUGMENTED = {
    "augment__auto_augment": "rand-m9-mstd0.5", "augment__hflip": 0.5, "augment__erase": 0.25,
    "augment__color_jitter": 0.3, "augment__repeats": 3,
}  # fmt: skip


def observe() -> dict[str, Any]:
    """Return kind of data, number of processes and of workers -> digests of batches."""
    found: dict[str, Any] = {}
    for kind, recipe in KINDS.items():
        task = _task(recipe)
        splits = task.open()
        found[f"{kind}, 1 process"] = _batches(task, splits)
        for rank in (0, 1):
            name = f"{kind}, process {rank} of 2"
            found[name] = _batches(task, splits, views=2, process=rank, processes=2)
        found[f"{kind}, 2 workers"] = _batches(_task(recipe, data__workers=2), splits, views=0)
    task = _task("digits", **AUGMENTED)
    found["images, augmented in every way"] = _batches(task, task.open(), views=1)
    return {**found, "machine": fingerprint()}


def _task(recipe: str, **fields: Any) -> Any:
    from comrope.experiments.tasks import task_of

    start = {"train__start_from": "timm:x"} if recipe == "scenes" else {}  # it must be given
    return task_of(config_of(recipe, **start, **fields))


def _batches(task: Any, splits: Any, *, views: int | None = None, **share: int) -> dict[str, str]:
    """Digests of the first batches of training, and of all batches of evaluations."""
    keys = task.training_batches(len(splits.train), **share)
    training = iter(task.training_loader(splits.train, keys))
    found = {"training": _digest(islice(training, FIRST))}
    del training
    validation = task.validation(splits.validation, **share)
    for name, view in islice(task.views().items(), views):
        found[f"evaluation {name}".strip()] = _digest(validation.batches(view))
    validation.close()
    return found


def _digest(batches: Iterable[Any]) -> str:
    count, parts = 0, []
    for batch in batches:
        count += 1
        parts += list(_parts(batch))
    return f"{count} {bytes_digest(*parts)}"


def _parts(value: Any) -> Iterable[bytes]:
    """The bytes of a batch, whatever it is made of; names of fields do not count."""
    if hasattr(value, "numpy"):
        yield f"{tuple(value.shape)} {value.dtype}".encode()
        yield value.detach().contiguous().numpy().tobytes()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, dict):
        for part in value.values():
            yield from _parts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _parts(part)
    else:
        yield repr(value).encode()
