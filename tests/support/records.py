"""Finished runs in folders, without training and without weights."""

from __future__ import annotations

import json

from comrope.experiments.config import CONFIG, Config, load_recipe, start_id, to_yaml
from comrope.experiments.runs.directory import LOG, RESULT

OFFSETS = {"about": {"root": "there"}, "found": {"offset": {"0.5": 1 / 3}}}


def config_of(seed: int = 0, recipe: str = "digits", **fields) -> Config:
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return load_recipe(recipe).with_overrides({"train.seed": seed, **named})


def finish(folder, config, top1=None, *, finished=True):
    """A folder as a run leaves it, except for its weights."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(to_yaml(config, start_id(config.train.start_from)))
    log = [{"event": "train", "step": step, "loss": 1 / step} for step in range(1, 100)]
    log.insert(50, {"event": "evaluation", "step": 50, "epoch": 5, "top1": 2 / 3, "time": "now"})
    (folder / LOG).write_text("".join(json.dumps(record) + "\n" for record in log))
    if finished:
        found = {"top1": top1 or {"12": 100 / 3, "8": 0.1}, "machine": {"comrope": "0.1.0"}}
        (folder / RESULT).write_text(json.dumps(found))
    return folder
