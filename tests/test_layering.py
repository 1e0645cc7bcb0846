"""The structure of the package: imports only point backwards, and each rule of CONTRIBUTING."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import comrope

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import structure
from guards.cycles import cycles, imports

ROOT = Path(comrope.__file__).parent
# In the order in which data flows: each package may import those before it.
PACKAGES = (
    "_checks", "_deprecated", "_dtypes", "_files", "_json", "_weights", "angles", "inits",
    "methods", "positions", "ops", "_inputs", "rotary", "analysis", "scaling", "optim",
    "rotation_files", "integrations", "models", "experiments",
)  # fmt: skip
EXPERIMENTS = (
    "common", "config", "runs", "data", "tasks", "training", "launch", "cluster", "inspect",
    "export", "studies", "bench", "cli_results", "cli", "train",
)  # fmt: skip
FORBIDDEN = {
    ("methods", "positions"), ("ops", "methods"), ("ops", "positions"), ("models", "integrations"),
}  # fmt: skip


def imports_by_package() -> set[tuple[str, str, str]]:
    """(file, its package, a package that it imports) for every import of comrope inside comrope."""
    found = set()
    for file in ROOT.rglob("*.py"):
        package = file.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import"
                module = node.module or ""
                names = [
                    f"{module}.{a.name}" if module == "comrope" else module for a in node.names
                ]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                parts = name.split(".")
                if parts[0] == "comrope" and len(parts) > 1:
                    found.add((str(file.relative_to(ROOT)), package, parts[1]))
    return found


def test_every_package_is_listed():
    packages = {path.name.removesuffix(".py") for path in ROOT.iterdir() if path.name[:2] != "__"}
    assert packages - {"py.typed"} == set(PACKAGES)


def test_imports_point_backwards():
    for file, package, imported in imports_by_package():
        if package in ("__init__", "__main__") or package == imported:
            continue
        if imported not in PACKAGES:  # a public name, such as comrope.__version__
            assert package == "experiments", f"{file} imports comrope.{imported}"
            continue
        assert PACKAGES.index(imported) < PACKAGES.index(package), f"{file} imports {imported}"
        assert (package, imported) not in FORBIDDEN, f"{file} imports {imported}"


def test_imports_of_experiments_point_backwards():
    graph = imports(ROOT.parent)
    prefix = "comrope.experiments."
    inside = [name for name in graph if name.startswith(prefix)]
    assert {name.split(".")[2] for name in inside} == set(EXPERIMENTS)
    for name in inside:
        for other in graph[name]:
            if other.startswith(prefix):
                package, imported = name.split(".")[2], other.split(".")[2]
                assert EXPERIMENTS.index(imported) <= EXPERIMENTS.index(package), (name, other)


def test_no_imports_in_a_circle(tmp_path):
    assert cycles(imports(ROOT.parent)) == []
    package = tmp_path / "comrope"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("from comrope import b\n")
    (package / "b.py").write_text("def f():\n    from comrope.a import g\n")
    assert cycles(imports(tmp_path)) == [["comrope.a", "comrope.b"]]


def test_only_tasks_ask_for_the_kind_of_data(tmp_path):
    assert structure.kind_of_data(ROOT.parents[1]) == []
    module = tmp_path / structure.EXPERIMENTS / "training" / "train.py"
    module.parent.mkdir(parents=True)
    module.write_text('"""config.detects"""\nif data.name == "coco":\n    view.frames\n')
    assert structure.kind_of_data(tmp_path) == ["training/train.py:2", "training/train.py:3"]


def test_the_trainer_sees_no_path_no_signal_and_no_lock():
    imported = set()
    for node in ast.walk(ast.parse((ROOT / "experiments/training/trainer.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {"fcntl", "os", "pathlib", "shutil", "signal", "tempfile", "threading"}


def test_model_libraries_are_imported_where_they_belong():
    """Our models are made of timm's layers; only integrations see the models of others."""
    allowed = {"models": {"timm"}, "integrations": {"timm", "transformers"}}
    allowed["models"].add("torchvision")  # detection heads
    for file in ROOT.rglob("*.py"):
        package = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if package == "experiments":
            continue
        found = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
        found &= {"timm", "transformers", "diffusers", "torchvision", "peft"}
        assert found <= allowed.get(package, set()), f"{file} imports {found}"


def test_sizes_are_within_their_limits():
    found = structure.figures(ROOT.parents[1])
    assert {n: found[n] for n, most in structure.LIMITS.items() if found[n] > most} == {}


def test_ops_hold_no_modules():
    for file in (ROOT / "ops").glob("*.py"):
        assert "nn.Module" not in file.read_text(), file
