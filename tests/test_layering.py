"""The rooms of the house: imports only ever point backwards, and stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import comrope

ROOT = Path(comrope.__file__).parent
# In the order in which data goes: each room may import the rooms before it.
ROOMS = (
    "_checks", "_dtypes", "_files", "angles", "methods", "positions", "ops", "_inputs", "rotary",
    "analysis", "optim", "integrations", "models", "experiments",
)  # fmt: skip
STRANGERS = {
    ("methods", "positions"), ("ops", "methods"), ("ops", "positions"), ("models", "integrations"),
}  # fmt: skip


def imports_by_room() -> set[tuple[str, str, str]]:
    """(file, its room, a room it imports) for every import of comrope inside comrope."""
    found = set()
    for file in ROOT.rglob("*.py"):
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
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
                if parts[0] == "comrope":
                    found.add((str(file.relative_to(ROOT)), room, parts[1]))
    return found


def test_every_room_is_known():
    rooms = {path.name.removesuffix(".py") for path in ROOT.iterdir() if path.name[:2] != "__"}
    assert rooms - {"py.typed"} == set(ROOMS)


def test_imports_point_backwards():
    for file, room, imported in imports_by_room():
        if room in ("__init__", "__main__") or room == imported:
            continue
        assert ROOMS.index(imported) < ROOMS.index(room), f"{file} imports {imported}"
        assert (room, imported) not in STRANGERS, f"{file} imports {imported}"


def test_ops_hold_no_modules():
    for file in (ROOT / "ops").glob("*.py"):
        assert "nn.Module" not in file.read_text(), file


def test_import_loads_torch_and_nothing_heavier():
    heavy = (
        "timm", "transformers", "triton", "matplotlib", "torchvision", "sklearn", "accelerate",
        "rich", "typer", "tensorboard", "safetensors",
    )  # fmt: skip
    code = f"import sys, comrope; print([name for name in {heavy!r} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
