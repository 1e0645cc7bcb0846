"""Check that behaviour has not changed: compare this tree with golden values in tests/golden.

    python tools/guard.py               # all guards, some minutes on two cores
    python tools/guard.py --fast        # only fast guards
    python tools/guard.py ptx states    # some guards
    python tools/guard.py --update ptx  # write the golden values instead

The exit code is 1 if a guard differs. Guards that depend on the last bits of floating-point results
are skipped on machines other than the one that wrote the golden values. On such a machine, write
the golden values of an earlier tree to another folder, and compare with these:

    git worktree add /tmp/earlier 66e724f
    python tools/guard.py --tree /tmp/earlier --golden /tmp/golden --update
    python tools/guard.py --golden /tmp/golden
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from guards import compare, tree

# Name -> number in the plan, whether it takes seconds only, what it checks.
GUARDS = {
    "identity": ("G1", True, "names and contents of runs, plans and recipes"),
    "docs": ("G2", True, "numbers in generated tables of documents"),
    "gather": ("G3", False, "results of studies from the kept runs"),
    "training": ("G4", False, "weights after short trainings"),
    "ptx": ("G5", False, "machine code of the kernels"),
    "batches": ("G6", False, "batches of training and evaluation"),
    "states": ("G7", True, "weights that models start with"),
    "outputs": ("G8", True, "outputs of folded, exported and swapped models"),
    "cycles": ("G9", True, "imports in a circle"),
    "commands": ("G10", True, "options and errors of the command line"),
}


def main() -> int:
    """Run the guards that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(GUARDS))
    parser.add_argument("--fast", action="store_true", help="only guards that take seconds")
    parser.add_argument("--update", action="store_true", help="write the golden values")
    parser.add_argument("--tree", type=Path, default=tree.HERE, help="the tree to check")
    parser.add_argument("--golden", type=Path, default=tree.GOLDEN, help="the golden values")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in GUARDS]:
        parser.error(f"NAME: expected some of {', '.join(GUARDS)}, got {unknown[0]}")
    tree.pick(asked.tree)
    names = asked.names or [name for name, (_, fast, _) in GUARDS.items() if fast or not asked.fast]
    return max([_run(name, asked.golden, asked.update) for name in names], default=0)


def _run(name: str, folder: Path, update: bool) -> int:
    """Check one guard, print one line (and the differences); return 1 if it differs."""
    number, _, about = GUARDS[name]
    label, begun = f"{number:3} {name:9}", time.perf_counter()
    file = folder / f"{name}.json"
    module = importlib.import_module(f"guards.{name}")
    golden = json.loads(file.read_text()) if file.is_file() else None
    try:
        if golden is not None and not update:
            compare.require_same_machine(golden)
        found = json.loads(json.dumps(module.observe()))
    except tree.Skipped as reason:
        print(f"{label} skipped: {reason}", flush=True)
        return 0
    except Exception:
        print(f"{label} differs: {about} cannot be observed", flush=True)
        traceback.print_exc()
        return 1
    took = f"{time.perf_counter() - begun:.0f} s"
    if update:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")
        print(f"{label} written: {file} ({took})", flush=True)
        return 0
    if golden is None:
        print(f"{label} differs: no golden values, expected {file}", flush=True)
        return 1
    check = getattr(module, "differences", compare.differences)
    differences: list[str] = check(golden, found)
    if not differences:
        remark = getattr(module, "remark", lambda *_: "")(golden, found)
        remark = f"; {remark}" if remark else ""
        print(f"{label} ok: {about}, {compare.count(golden)} values{remark} ({took})", flush=True)
        return 0
    print(f"{label} differs: {about} ({took})")
    for line in differences[:20]:
        print(f"      {line}")
    if len(differences) > 20:
        print(f"      and {len(differences) - 20} more")
    sys.stdout.flush()
    return 1


if __name__ == "__main__":
    _code: Any = main()
    raise SystemExit(_code)
