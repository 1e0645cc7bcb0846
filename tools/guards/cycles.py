"""G9: import cycles, including imports inside functions and by name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from guards.tree import root

__all__ = ["cycles", "differences", "imports", "observe"]


def observe() -> dict[str, Any]:
    """Return every import cycle as a sorted list, and the last names of all modules."""
    graph = imports(root() / "src")
    return {"cycles": cycles(graph), "names": sorted({_last(module) for module in graph})}


def differences(golden: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return new cycles. Cycles may shrink, and modules may move.

    A moved module is identified by the last part of its name. A renamed module may be in any cycle,
    but the number of modules in cycles must not grow.
    """
    golden_names, lines = set(golden["names"]), []
    before = [{_last(module) for module in cycle} for cycle in golden["cycles"]]
    for cycle in found["cycles"]:
        names = {_last(module) for module in cycle} & golden_names
        if not any(names <= some for some in before):
            lines.append(f"new import cycle: {', '.join(cycle)}")
    most, here = (sum(map(len, some["cycles"])) for some in (golden, found))
    if here > most:
        lines.append(f"modules in cycles: expected at most {most}, found {here}")
    return lines


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def imports(source: Path, package: str = "comrope") -> dict[str, set[str]]:
    """Return module -> modules of the package that it imports or names in a text.

    An import of a name from a package counts for the module that has this name, if there is one,
    else for the package. Imports for type checkers only are left out.
    """
    files = {_module(file, source): file for file in sorted((source / package).rglob("*.py"))}
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        tree = ast.parse(file.read_text())
        parent = module if file.name == "__init__.py" else module.rpartition(".")[0]
        found[module] = {
            name for name in _named(tree, parent, files) if name in files and name != module
        }
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one module, the largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:  # Tarjan
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return sorted(found, key=lambda component: (-len(component), component))


def _module(file: Path, source: Path) -> str:
    parts = file.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _named(tree: ast.AST, parent: str, known: Any) -> set[str]:
    found: set[str] = set()
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if _for_types(node) or _is_files(node)
        for inner in _inside(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = parent.split(".")[: len(parent.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.add(name if name in known else base)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]  # "package.module:Class" too
            if "." in module:
                found.add(f"{parent}{module}" if module.startswith(".") else module)
    return found


def _is_files(node: ast.AST) -> bool:
    """Whether this is ``resources.files(...)``, which names where data lies."""
    return isinstance(node, ast.Call) and "files" in (
        getattr(node.func, "attr", ""),
        getattr(node.func, "id", ""),
    )


def _for_types(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _inside(node: ast.AST) -> list[ast.AST]:
    parts = node.body if isinstance(node, ast.If) else getattr(node, "args", [])
    return [inner for part in parts for inner in ast.walk(part)]
