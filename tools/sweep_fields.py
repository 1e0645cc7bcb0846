"""Train short runs with hostile values of every field; each must be refused in one line, or finish.

    python tools/sweep_fields.py                     # all fields of three tasks, about an hour
    python tools/sweep_fields.py optim. data.std     # some fields, by the beginning of their names
    python tools/sweep_fields.py --task moving       # one task

Prints every case that is neither, and the counts. The exit code is 1 if there is such a case.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
SECONDS = 60  # of one case
MEMORY = 8 * 2**30  # bytes of address space
ACCEPTED = {"refused", "refused late", "trained"}
LONG = {("train.epochs", value) for value in ("100", "99999", "1_000")}  # valid runs of hours
# Recipe -> fields of a run of a second.
TASKS = {
    "digits": ("model.name=vit_nano_patch4_12", "train.batch_size=32", "evaluate.resolutions=12"),
    "moving": ("train.batch_size=32", "evaluate.resolutions=12", "evaluate.frames=3"),
    "scenes": ("train.start_from=null", "train.batch_size=16", "detect.proposals=20"),
}
ANY = (
    "", "null", "~", "x", "X" * 5000, "é", "💥", "\u202ea", "a\tb", "a\nb", "\x1b[31m", "\udcff",
    "[", "[]", "{}", "{a: 1}", "[[1]]", "[x]", "[1,2]", "[1,2,3]", "1,2", "[" * 3000, "[" * 100_000,
    "{a: " * 3000, "&a [*a]", "&a {a: *a}", "*a", "!!python/object/apply:os.system [id]",
    "!!binary x", "!!int x", "!!float x", "!!timestamp x", "!!set {a, b}", "2001-99-99",
    "2001-01-01", "1:30", "1_000", "0x10", "0b2", "%", "@x", "`", "|", "- 1", "a: b: c", "true",
    "no", "0", "1", "2", "7", "-1", "-0.0", "0.5", "1.5", "1e-300", "1e-9", "1e-3", "100", "1e4",
    "99999", "1000000000", "1e9", "1e30", "1e300", "-1e300", "1e400", "9" * 400, "9" * 5000,
    "18446744073709551616", "nan", ".nan", ".inf", "-.inf", "inf", "NaN", "Infinity",
)  # fmt: skip
OF_LISTS = (
    "[.nan,1]", "[1,.nan]", ".nan,1", "nan,1", "[.inf,1]", "[1,-.inf]", "[0,0]", "[1,0.1]", "[2,3]",
    "[-1,1]", "[1,1]", "[0.1,1.5]", "[null,1]", "[1e300,1e300]", "[1e-300,1]", "[true,false]",
    "[1,x]", "[1,[2]]", "[" + "1," * 100_000 + "1]", "[0.5,0.5,0.5]", "[0,0,0]", "[1,2,3,4,5]",
    "[12,12]", "[12,16,12]", "[9" + "9" * 400 + ",1]",
)  # fmt: skip
OF_TEXTS = (
    "..", "/", "/dev/zero", "/proc/self/mem", "a/../../b", "con", "timm:", "timm:x",
    "timm:resnet50", "vit_nano_patch99999_12", "vit_nano_patch4_99999999", "vit_nano_patch0_12",
    "vit_nano_patch4_0", "vit_nano_patch5_12", "vit_huge_patch4_12", "@x",
    "vit_nano_patch4_" + "9" * 5000, "vit_x_patch4_12", "hfds/x", "tfds/x", "wds/x", "torch/x",
    "os:system", "os.path:join", "rand-m9",
    "rand-m99-n99999", "rand-", "rand-mx", "augmix-m3", "3a", "original", "random", "lanczos",
    "nearest", "sgd", "lamb", "lion", "adafactor", "lookahead_adamw", "lookahead_", "sgdp", "lbfgs",
    "lars", "muon", "kron", "plateau", "step", "multistep", "poly", "tanh", "isotropic", "zeros",
    "rope", "liere", "ape", "none", "avg", "token", "center", "unrotated", "relative", "patch",
)  # fmt: skip


class Case(NamedTuple):
    """A value of a field, as typed on a command line, and the recipe to train."""

    task: str
    field: str
    value: str


class Outcome(NamedTuple):
    """What happened: a name, and the last printed line.

    "refused late" is a run that began and stopped with one line, as when the loss is not finite.
    """

    name: str
    line: str


def main() -> int:
    """Run the sweep that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fields", nargs="*", metavar="FIELD", help="beginnings of names")
    parser.add_argument("--task", choices=TASKS, action="append", help="by default all")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    asked = parser.parse_args()
    every = [
        Case(task, field, value)
        for task in asked.task or TASKS
        for field, value in values()
        if not asked.fields or field.startswith(tuple(asked.fields))
    ]
    shrink_data()
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for case, found in outcomes(every, Path(folder)):
            counts[found.name] += 1
            if asked.verbose or found.name not in ACCEPTED:
                shown = case.value if len(case.value) < 60 else f"{case.value[:40]}..."
                print(f"{found.name:10} {case.task} {case.field}={shown!a}  {found.line}")
                sys.stdout.flush()
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))
    return int(bool(set(counts) - ACCEPTED))


def values() -> Iterator[tuple[str, str]]:
    """Yield the name of a field and a value as typed on a command line."""
    from comrope.experiments.config import Config, option_fields

    for name, field in {**option_fields(Config), "options.a": None}.items():
        kind = "str" if field is None else str(field.type)
        lists = OF_LISTS if kind.startswith("tuple") else ()
        texts = OF_TEXTS if "str" in kind else ()
        for value in dict.fromkeys((*ANY, *lists, *texts)):
            if (name, value) not in LONG:
                yield name, value


def shrink_data() -> None:
    """Leave 64 samples of the embedded data sets, and import what every child needs."""
    import comrope.experiments.training.train  # noqa: F401
    from comrope.experiments.data import clips, images, scenes

    class Few(images.Digits):
        def __len__(self) -> int:
            return 64

    images.Digits = Few
    clips.MOVING_CLIPS.update(train=64, val=16)
    scenes.SCENES.update(train=32, val=8)


def outcomes(cases: list[Case], folder: Path) -> Iterator[tuple[Case, Outcome]]:
    """Yield every case with its outcome; a child process tries them until it ends or hangs."""
    done = 0
    while done < len(cases):
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reader)
            try:
                for case in cases[done:]:
                    os.write(writer, (json.dumps(tried(case, folder)) + "\n").encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, encoding="utf-8") as lines:
            while select.select([lines], [], [], SECONDS)[0] and (line := lines.readline()):
                yield cases[done], Outcome(*json.loads(line))
                done += 1
        os.kill(process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if done < len(cases):
            name = "timeout" if code == -signal.SIGKILL else "crash"
            yield cases[done], Outcome(name, (folder / "said").read_text(errors="replace")[-200:])
            done += 1


def tried(case: Case, folder: Path) -> Outcome:
    """Train a case in this process; return what happened."""
    import torch

    from comrope.experiments.cli import main as run

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    out, code = folder / "run", 0
    shutil.rmtree(out, ignore_errors=True)  # of a case that was ended
    override = f"{case.field}={case.value}"
    sys.argv = ["comrope", "train", case.task, "train.epochs=1", *TASKS[case.task], override]
    sys.argv += ["--out", str(out), "--quiet"]
    with (folder / "said").open("w", encoding="utf-8", errors="backslashreplace") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    try:
        run()
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    text = (folder / "said").read_text(encoding="utf-8", errors="replace")
    left = sorted(path.name for path in out.iterdir()) if out.exists() else []
    lines = text.splitlines() or [""]
    name = "other"
    if "Traceback" in text:
        name = "traceback"
    elif code == 2 and lines[-1].startswith("comrope: ") and len(text) < 1000 and len(lines) < 4:
        name = "refused late" if left else "refused"
    elif code == 0 and "result.json" in left:
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
        found = (result.get("top1") or result.get("AP")).values()
        name = "trained" if all(v is None or math.isfinite(v) for v in found) else "not finite"
    shutil.rmtree(out, ignore_errors=True)
    return Outcome(name, lines[-1][:300])


if __name__ == "__main__":
    sys.exit(main())
