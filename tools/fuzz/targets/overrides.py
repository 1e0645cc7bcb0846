"""Overrides of fields, as typed on a command line: ``train.epochs=3``, one per line."""

from __future__ import annotations

import random

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config, load_recipe, option_fields
from fuzz import trees
from fuzz.target import Target, mutate_bytes
from fuzz.targets.recipes import check_config

__all__ = ["Fuzz"]

SEEDS = (
    "train.epochs=3",
    "augment.scale=0.5,1\nevaluate.resolutions=[12, 24]",
    "optim.clip_grad=null\noptim.lr=1e-3\ndata.root=",
    "options.x=1\noptions.y=yes\noptions.z=1e-3",
    "model.init=turned\ntrain.rescale=1.0",
    "model.class_token=false\ntrain.seed=16\ndata.mean=.5",
)
VALUES = (
    "null",
    "~",
    "",
    "yes",
    "[1",
    "{a: 1}",
    "*a",
    "!!int 3",
    "1,2,3",
    "1e-3",
    "-1",
    "a: b",
    "'",
)


class Fuzz(Target):
    suffix = ".args"
    errors = (UserError,)
    longest = 2**10

    def seeds(self) -> list[bytes]:
        return [text.encode() for text in SEEDS]

    def examine(self, data: bytes) -> bool:
        try:
            texts = data.decode().split("\n")
        except UnicodeDecodeError:
            return False
        base = load_recipe("digits")
        names = [text.partition("=")[0].strip()[:8] for text in texts]
        related = [
            *names,
            *(repr(name)[1:-1] for name in names),
            "train.accumulate",
            "train.precision",
        ]
        with self.watched():
            answer = self.ask(lambda: base.with_overrides(texts), *related)
            if not answer.accepted:
                return False
            config: Config = answer.value
            check_config(config)
            self.ask(lambda: config.with_overrides(texts), *related)
        return True

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        lines = data.decode("utf-8", "replace").split("\n")
        kind = rng.random()
        if kind < 0.2:
            return mutate_bytes(data, rng)
        name = rng.choice([*option_fields(Config), "options.x", "model", "train.", ".", "a.b.c"])
        value = (
            rng.choice(VALUES) if kind < 0.5 else trees.dump(rng.choice(trees.HOSTILE), yaml=True)
        )
        return "\n".join([*lines[-2:], f"{name}={value}"]).encode("utf-8", "replace")
