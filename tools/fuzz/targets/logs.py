"""Logs: no content stops a run, and no record is lost because of another line."""

from __future__ import annotations

import json
import random

from comrope.experiments.runs.directory import LOG
from comrope.experiments.runs.log import Log, read_log
from comrope.experiments.training.metrics import summarize_speed
from fuzz.judge import require
from fuzz.target import Target, mutate_bytes, mutate_text

__all__ = ["Fuzz"]

RECORDS = (
    {"event": "started", "step": 0, "time": "now"},
    {"event": "train", "step": 1, "loss": 2.5, "images_per_second": 9.5, "waiting": 0.1},
    {"event": "evaluation", "step": 1, "epoch": 1, "top1": 50.0},
    {"event": "resumed", "step": 1, "time": "now"},
    {"event": "result", "step": 2, "top1": {"12": 50.0}},
)
GOOD = b'{"event": "train", "step": 7, "loss": 1.5}'


class Fuzz(Target):
    suffix = ".jsonl"

    def seeds(self) -> list[bytes]:
        return [b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)]

    def examine(self, data: bytes) -> bool:
        file = self.folder / LOG
        file.write_bytes(data)
        with self.watched() as printed:
            records = self.ask(lambda: read_log(file), file).value
            steps = [record for record in records if record["event"] == "train"]
            self.ask(lambda: summarize_speed(steps, "images_per_second"), file)
            for record in records:
                json.dumps(record)
            lines = [line for line in data.split(b"\n") if line]
            said = " ".join(printed.getvalue().split())
        if len(records) < len(lines) - 1:  # the last line may be incomplete
            require(str(file) in said, "silent: records are left out", said)
        file.write_bytes(GOOD + b"\n" + data + b"\n" + GOOD + b"\n")
        with self.watched():
            kept = self.ask(lambda: read_log(file), file).value
            require(kept[0]["step"] == kept[-1]["step"] == 7, "a record is lost")
            self.ask(lambda: self._continue(), file)
        return len(records) == len(lines)

    def _continue(self) -> None:
        log = Log(self.folder, resume_from=1)
        log.write("train", step=2, loss=1.0)
        require(read_log(self.folder / LOG)[-1]["step"] == 2, "a record is lost")

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        lines = data.splitlines() or self.seeds()[0].splitlines()
        place = rng.randrange(len(lines))
        if rng.random() < 0.1:
            return mutate_bytes(data, rng)
        lines[place] = mutate_text(lines[place], rng)
        return b"\n".join(lines) + rng.choice((b"\n", b""))
