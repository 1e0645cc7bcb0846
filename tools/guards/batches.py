"""G6: the batches of training and evaluation: which samples, in which order, augmented how."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import islice
from typing import Any

from guards.tree import api, bytes_digest, config_of, fingerprint

__all__ = ["observe"]

KINDS = {"images": "digits", "clips": "moving", "boxes": "scenes"}
FIRST = 20
AUGMENTED = {
    "augment__auto_augment": "rand-m9-mstd0.5", "augment__hflip": 0.5, "augment__erase": 0.25,
    "augment__color_jitter": 0.3, "augment__repeats": 3,
}  # fmt: skip
BATCHES = ("experiments.data.batches", "experiments.data")
SOURCES = ("experiments.data.images", "experiments.data", "experiments.sources")
VIEWS = ("experiments.tasks.views", "experiments.views")


def observe() -> dict[str, Any]:
    """Return kind of data, number of processes and of workers -> digests of batches."""
    found: dict[str, Any] = {}
    for kind, recipe in KINDS.items():
        config = _config(recipe)
        sources = api("open_sources", *SOURCES)(config)
        found[f"{kind}, 1 process"] = _batches(config, sources)
        for rank in (0, 1):
            name = f"{kind}, process {rank} of 2"
            found[name] = _batches(config, sources, rank=rank, world=2, views=2)
        found[f"{kind}, 2 workers"] = _batches(_config(recipe, data__workers=2), sources, views=0)
    config = _config("digits", **AUGMENTED)
    sources = api("open_sources", *SOURCES)(config)
    found["images, augmented in every way"] = _batches(config, sources, views=1)
    return {**found, "machine": fingerprint()}


def _config(recipe: str, **fields: Any) -> Any:
    start = {"train__start_from": "timm:x"} if recipe == "scenes" else {}  # it must be given
    return config_of(recipe, **start, **fields)


def _batches(
    config: Any, sources: Any, *, rank: int = 0, world: int = 1, views: int | None = None
) -> dict[str, str]:
    """Digests of the first batches of training, and of all batches of evaluations."""
    share = {"rank": rank, "world": world}
    keys = api("TrainBatches", *BATCHES)(config, len(sources[0]), **share)
    training = iter(api("train_loader", *BATCHES)(config, sources[0], keys))
    found = {"training": _digest(islice(training, FIRST))}
    del training
    validation = api("Validation", *BATCHES)(config, sources[1], **share)
    for name, view in islice(api("views_of", *VIEWS)(config).items(), views):
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
