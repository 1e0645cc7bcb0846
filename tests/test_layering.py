"""Imports inside the library only point backwards."""

from __future__ import annotations

import ast
from pathlib import Path

import comrope

ROOT = Path(comrope.__file__).parent
# In the order in which data flows: each package may import those before it.
PACKAGES = (
    "_checks", "_deprecated", "_dtypes", "_files", "angles", "inits", "methods", "positions",
    "ops", "_inputs", "rotary", "analysis", "optim", "integrations", "models", "experiments",
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


def test_ops_hold_no_modules():
    for file in (ROOT / "ops").glob("*.py"):
        assert "nn.Module" not in file.read_text(), file
