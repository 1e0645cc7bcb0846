"""Print the size and the dependencies of the code, of one tree or of two beside each other.

python tools/structure.py                  # this tree
python tools/structure.py --before 66e724f # an earlier commit beside it
python tools/structure.py --check          # exit with 1 if a limit is exceeded
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from guards.cycles import cycles, imports

HERE = Path(__file__).resolve().parents[1]
EXPERIMENTS = "src/comrope/experiments"
# Code that asks for the kind of data, by fields and names that only some kinds have.
KIND_OF_DATA = re.compile(
    r"\.detects\b|\b(?:data|view)\.frames\b|\b(?:config|self)\.detect\."
    r"|\bdata\.name\s*(?:[!=]=\s*[\"']|(?:not\s+)?in\s+[(\[{A-Z])"
)
# These describe the kinds of data themselves, or what each of their fields means.
OWN_KINDS = ("tasks/", "config/")
LIMITS = {
    "result files": 12,
    "recipes": 18,
    "import cycles": 0,
    "places that ask for the kind of data": 0,
    "modules directly in experiments": 8,
}


def main() -> int:
    """Print the figures; return 1 if a limit is asked for and exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", metavar="COMMIT", help="a commit to show beside this tree")
    parser.add_argument("--check", action="store_true", help="fail if a limit is exceeded")
    asked = parser.parse_args()
    trees = {"now": figures(HERE)}
    if asked.before:
        with tempfile.TemporaryDirectory() as folder:
            trees = {asked.before: figures(_extract(asked.before, Path(folder))), **trees}
    _print(trees)
    exceeded = [name for name, most in LIMITS.items() if trees["now"][name] > most]
    for name in exceeded:
        print(f"{name}: expected at most {LIMITS[name]}, found {trees['now'][name]}")
    return int(asked.check and bool(exceeded))


def figures(tree: Path) -> dict[str, int]:
    """Return the figures of a tree by their names."""
    source = tree / "src"
    files = sorted((source / "comrope").rglob("*.py"))
    lines = Counter({_package(file, source): 0 for file in files})
    for file in files:
        lines[_package(file, source)] += len(file.read_text().splitlines())
    tests = sorted((tree / "tests").rglob("*.py"))
    experiments = tree / EXPERIMENTS
    found = {f"lines of {name}": count for name, count in sorted(lines.items())}
    found["lines of src"] = sum(lines.values())
    found["lines of tests"] = sum(len(file.read_text().splitlines()) for file in tests)
    found["longest module, lines"] = max(len(file.read_text().splitlines()) for file in files)
    found["modules directly in experiments"] = sum(
        file.name != "__init__.py" for file in experiments.glob("*.py")
    )
    found["most modules in a package"] = max(
        Counter(file.parent for file in files if file.name != "__init__.py").values()
    )
    found["result files"] = sum(path.is_file() for path in (tree / "results").rglob("*"))
    found["recipes"] = len(list((experiments).rglob("recipes/*.yaml")))
    found["import cycles"] = len(cycles(imports(source)))
    found["places that ask for the kind of data"] = len(kind_of_data(tree))
    found["longest kernel parameter list"] = longest_parameter_list(source)
    return found


def kind_of_data(tree: Path) -> list[str]:
    """Return "file:line" of code outside of tasks that asks for the kind of data."""
    root, found = tree / EXPERIMENTS, []
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if name.startswith(OWN_KINDS):
            continue
        found += [
            f"{name}:{number}"
            for number, line in enumerate(_code(file).splitlines(), 1)
            if KIND_OF_DATA.search(line)
        ]
    return found


def longest_parameter_list(source: Path) -> int:
    """Return the largest number of parameters of a function that Triton compiles."""
    most = 0
    for file in (source / "comrope/ops/kernels").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                most = max(most, len(node.args.args))
    return most


def _code(file: Path) -> str:
    """Return a file without its docstrings, with its lines where they are."""
    text = file.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[number - 1] = ""
    return "\n".join(lines)


def _package(file: Path, source: Path) -> str:
    """Return the package of a file: two levels in experiments, one in the library."""
    parts = file.relative_to(source).parts[:-1]
    return "/".join(parts[: 3 if "experiments" in parts or "ops" in parts else 2])


def _extract(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder and return it."""
    command = ["git", "-C", str(HERE), "archive", commit, "src", "tests", "results"]
    with tarfile.open(fileobj=io.BytesIO(subprocess.check_output(command))) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _print(trees: dict[str, dict[str, int]]) -> None:
    names = [*dict.fromkeys(name for found in trees.values() for name in found)]
    width = max(map(len, names))
    print(" " * width, *(f"{commit:>9}" for commit in trees))
    for name in names:
        values = (found.get(name, "-") for found in trees.values())
        print(f"{name:{width}}", *(f"{value:>9}" for value in values))


if __name__ == "__main__":
    raise SystemExit(main())
