"""Fuzz one target with atheris: a process that ``run.py`` starts.

python tools/fuzz/child.py NAME --out FOLDER --seconds 60
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import random
import re
import signal
import sys
import time
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # before instrumentation: its branches are no coverage

from fuzz.judge import Finding
from fuzz.kept import failures_in

# The modules whose branches are counted as coverage.
OWN = (
    "comrope._checks",
    "comrope._files",
    "comrope._json",
    "comrope.experiments",
    "comrope.models",
)
OTHERS = ("PIL", "tarfile")
RAW = 0.2  # share of the mutations that libFuzzer makes itself
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
EVERY = 2.0  # seconds between lines of progress
LIMITS = ("-timeout=60", "-report_slow_units=600", "-rss_limit_mb=6144", "-len_control=0")


def main() -> None:
    """Fuzz until the time is over. Failures are files; they do not end the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    asked = parser.parse_args()
    ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    torch.set_num_threads(1)
    sys.modules.pop("tarfile", None)  # torch has imported it
    with atheris.instrument_imports(include=[*OWN, *OTHERS]):
        from fuzz import targets

        target = targets.create(asked.name, asked.out / "work")
    target.alarm = False
    failures = asked.out / "failures"
    seen = failures_in(failures)
    runs, last = 0, 0.0

    def one(data: bytes) -> None:
        nonlocal runs, last
        runs += 1
        if time.monotonic() - last > EVERY:
            last = time.monotonic()
            print(f"@ {runs}", flush=True)
        try:
            target.run(data)
        except Finding as found:
            if found.kind not in seen:
                seen.add(found.kind)
                _keep(failures, found, data, target.suffix)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < RAW:
            return atheris.Mutate(data, most)
        return target.mutate(data, rng)[:most]

    options = [
        f"-max_total_time={asked.seconds}",
        f"-max_len={target.longest}",
        f"-artifact_prefix={failures}/native-",
        *LIMITS,
    ]
    atheris.Setup([sys.argv[0], *options, str(asked.out / "corpus")], one, custom_mutator=mutate)
    atheris.Fuzz()


def _keep(folder: Path, found: Finding, data: bytes, suffix: str) -> None:
    """Write a failing input, and what is wrong."""
    slug = re.sub(r"\W+", "-", found.kind)[:50].strip("-")
    path = folder / f"{slug}-{hashlib.sha256(data).hexdigest()[:8]}{suffix}"
    path.write_bytes(data)
    path.with_name(f"{path.name}.txt").write_text(f"{found.kind}\n\n{found}\n")
    print(f"! {found.kind}", flush=True)


if __name__ == "__main__":
    main()
