"""The source tree under test, and helpers of all guards.

Code that depends on names in the package is inside functions, so a renamed module or field changes
one place.
"""

from __future__ import annotations

import hashlib
import importlib
import platform
import sys
from pathlib import Path
from typing import Any

from identity_v1 import FIELDS, RENAMED_FIELDS, RENAMED_VALUES, to_v1

__all__ = [
    "ERRORS",
    "GOLDEN",
    "HERE",
    "RUN_NAME",
    "Skipped",
    "api",
    "bytes_digest",
    "config_of",
    "fingerprint",
    "live",
    "pick",
    "root",
    "v1_of",
    "without_later_fields",
]

HERE = Path(__file__).resolve().parents[2]
GOLDEN = HERE / "tests" / "golden"


ERRORS = ("experiments.common.errors", "experiments.errors")
RUN_NAME = ("experiments.config", "experiments.studies")


class Skipped(Exception):
    """A guard cannot be checked on this machine; the message gives the reason."""


_chosen = HERE


def pick(tree: Path) -> None:
    """Test the package in ``tree / "src"`` instead of the installed one."""
    global _chosen
    _chosen = tree.resolve()
    sys.path.insert(0, str(_chosen / "src"))


def root() -> Path:
    """Return the tree that ``pick`` chose."""
    return _chosen


def api(name: str, *modules: str) -> Any:
    """Return an attribute from the first of some modules of comrope that has it.

    Guards run on trees in which it is in different modules.
    """
    for module in modules:
        try:
            found = importlib.import_module(f"comrope.{module}")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("comrope"):
                raise
            continue
        if hasattr(found, name):
            return getattr(found, name)
    raise ImportError(f"{name}: not in {', '.join(modules)}; name the module that has it now")


def fingerprint() -> dict[str, str]:
    """Return the properties of a machine that the last bits of results depend on."""
    import torch

    model = ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else ""
    return {
        "torch": torch.__version__,
        "cpu": model or platform.processor(),
        "vector": torch.backends.cpu.get_cpu_capability(),
    }


def bytes_digest(*parts: bytes) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the parts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def live(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with the present names and values, from the first ones."""
    from comrope.experiments.config import Config

    usual, found = Config(), {}
    for name, value in fields.items():
        section, _, key = name.partition(".")
        value = _live_value(name, value)
        if not hasattr(getattr(usual, section), key):
            name = RENAMED_FIELDS.get(name, name)
        found[name] = value
    return found


def _live_value(name: str, value: Any) -> Any:
    """Return the name of an initialization in the package under test."""
    renamed = RENAMED_VALUES.get(name, {})
    if isinstance(value, str) and value in renamed:
        source = "".join(p.read_text() for p in (root() / "src/comrope").rglob("*.py"))
        return renamed[value] if f'"{renamed[value]}"' in source else value
    return value


def config_of(recipe: str, **fields: Any) -> Any:
    """Return a recipe with fields by their first names, dots written as two underscores."""
    from comrope.experiments.config import load_recipe

    overrides = live({name.replace("__", "."): value for name, value in fields.items()})
    return load_recipe(recipe).with_overrides(overrides)


def v1_of(config: Any, aliases: dict[str, str] | None = None) -> dict[str, Any]:
    """Return a configuration of the package with the first names of fields.

    Raises:
        ValueError: A field that was added since has another value than its default.
    """
    from comrope.experiments.config import to_dict

    return to_v1(without_later_fields(to_dict(config)), aliases)


def without_later_fields(tree: dict[str, Any]) -> dict[str, Any]:
    """Return sections with fields, without the defaults of fields that the first schema lacks."""
    from comrope.experiments.config import Config, to_dict

    usual: dict[str, Any] = to_dict(Config())

    def is_kept(section: str, key: str, value: Any) -> bool:
        own, default = FIELDS.get(section, {}), usual.get(section, {})
        return key in own or key not in default or value != default[key]

    return {
        section: {k: v for k, v in keys.items() if is_kept(section, k, v)}
        if isinstance(keys, dict)
        else keys
        for section, keys in tree.items()
    }
