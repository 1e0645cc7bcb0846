"""Golden values against those that are observed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from guards.tree import Skipped, fingerprint

__all__ = ["count", "differences", "require_same_machine"]


def require_same_machine(golden: dict[str, Any]) -> None:
    """Raise ``Skipped`` where the last bits may be others than in the golden values."""
    if "machine" not in golden:
        return
    here, there = fingerprint(), golden["machine"]
    if different := [key for key in there if there[key] != here.get(key)]:
        key = different[0]
        raise Skipped(f"other machine ({key}: golden {there[key]}, here {here.get(key)})")


def differences(
    golden: Any, found: Any, where: str = "", *, may_go: Collection[str] = ()
) -> list[str]:
    """Return a line for each value that differs: what, expected, found.

    Entries whose key begins with one of ``may_go`` may be missing.
    """
    lines = []
    if isinstance(golden, dict) and isinstance(found, dict):
        for key in [*golden, *(key for key in found if key not in golden)]:
            name = f"{where}, {key}" if where else key
            if key in golden and key in found:
                lines += differences(golden[key], found[key], name, may_go=may_go)
            elif key not in golden:
                lines.append(f"{name}: not in the golden values, found {_short(found[key])}")
            elif not key.startswith(tuple(may_go)):
                lines.append(f"{name}: expected {_short(golden[key])}, found nothing")
        return lines
    if isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        for at, (a, b) in enumerate(zip(golden, found, strict=True)):
            lines += differences(a, b, f"{where}[{at}]", may_go=may_go)
        return lines
    if golden != found:
        lines.append(f"{where}: expected {_short(golden)}, found {_short(found)}")
    return lines


def count(golden: Any) -> int:
    """Return how many single values there are."""
    if isinstance(golden, dict):
        return sum(count(value) for key, value in golden.items() if key != "machine")
    return sum(map(count, golden)) if isinstance(golden, list) else 1


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
