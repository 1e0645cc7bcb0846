"""The results store: one run per line of results/*.jsonl."""

from __future__ import annotations

import json
import random

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import run_id
from comrope.experiments.runs.records import Record, describe
from comrope.experiments.runs.store import JsonlStore
from fuzz.judge import require
from fuzz.target import Target, mutate_bytes, mutate_text

__all__ = ["Fuzz"]

RECORD = {
    "schema": 3,
    "id": "112b03a969b8",
    "name": "comrope-ld-b8-p1-s1-112b03a969b8",
    "legacy": None,
    "recipe": "digits",
    "config": {"model.name": "vit_nano_patch4_12", "augment.scale": [0.5, 1.0], "train.seed": 1},
    "runtime": {"data.root": "DATA/x", "evaluate.resolutions": [12, 24]},
    "parent": None,
    "result": {"top1": {"12": 50.5}, "steps": 3, "machine": {"comrope": "0.1.0"}},
    "evaluations": [{"step": 3, "epoch": 1, "top1": 2.5}],
    "measured": {"offset": {"about": {}, "found": {"offset": {"0.5": 1.5}}}},
    "loss": [[1, 2.5], [2, 1.5]],
    "code": "0.1.0",
}
OTHER = {
    **RECORD,
    "schema": 2,
    "id": "154183abc48a",
    "legacy": "old",
    "config": {"train.start_from": "@112b03a969b8", "model.near": 0.5, "train.rescale": 1.0},
    "parent": "112b03a969b8",
}


class Fuzz(Target):
    suffix = ".jsonl"
    errors = (UserError,)

    def seeds(self) -> list[bytes]:
        one, two = (json.dumps(record).encode() for record in (RECORD, OTHER))
        return [one + b"\n", one + b"\n" + two + b"\n"]

    def examine(self, data: bytes) -> bool:
        store = self.folder / "store"
        store.mkdir(exist_ok=True)
        file = store / "digits.jsonl"
        file.write_bytes(data)
        with self.watched():
            answer = self.ask(lambda: JsonlStore(store).records(), file)
            if not answer.accepted:
                return False
            records: list[Record] = answer.value
            stored: dict[str, dict[str, object]] = {}
            for line in map(json.loads, data.splitlines()):
                known = {name: value for name, value in line.items() if name in RECORD}
                known.pop("parent", None)  # follows from the fields
                same = stored.setdefault(line["id"], known) == known  # a line may be repeated
                require(same, "silent: two records of a run")
            require(len(records) == len(stored), "silent: lines without a record")
            for record in records:
                self._judge_record(record, stored[record.id], JsonlStore(store))
        self._judge_copy(records)
        return bool(records)

    def _judge_record(self, record: Record, stored: dict[str, object], store: JsonlStore) -> None:
        names = {"fields": "config", "runtime": "runtime", "result": "result", "losses": "loss"}
        for own, name in names.items():
            if "taken_for" not in json.dumps(stored):  # an earlier name
                require(getattr(record, own) == stored[name], f"silent: another {name}")
        config = self.ask(lambda: record.config, record.id)
        if config.accepted:
            found = self.ask(lambda: store.find(config.value), "run ")
            if found.accepted and found.value is not None:
                named = run_id(config.value, record.parent) == found.value.id
                require(named, "silent: a record of another configuration")
        self.ask(lambda: record.parent, record.id)
        self.ask(lambda: describe(record), record.id)
        require(Record.from_json(record.to_json()) == record, "a record changes when it is written")

    def _judge_copy(self, records: list[Record]) -> None:
        """Write the records to a second store, and read them again."""
        copy = self.folder / "copy"
        copy.mkdir(exist_ok=True)
        for file in copy.iterdir():
            file.unlink()
        with self.watched():
            self.ask(lambda: JsonlStore(copy).add(records), copy)
            again = {record.id: record for record in JsonlStore(copy).records()}
        require(again == {record.id: record for record in records}, "another copy of the store")

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        lines = data.splitlines() or self.seeds()[1].splitlines()
        place = rng.randrange(len(lines))
        if rng.random() < 0.1:
            return mutate_bytes(data, rng)
        if rng.random() < 0.1:
            lines.append(lines[place])
        else:
            lines[place] = mutate_text(lines[place], rng)
        return b"\n".join(lines) + rng.choice((b"\n", b""))
