"""The seal of a finished run: SHA-256 digests of its files and of its result, in the result's file.

A seal shows that a file has changed since the run has finished. It is no signature: whoever can
change a file can also change its digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from comrope._files import sha256_of

__all__ = ["ENTRIES", "SEAL", "changed_files", "is_intact", "sealed", "split"]

SEAL = "seal"  # the entry in the result's file: the digest of every file, and
ENTRIES = "result"  # that of all other entries


def sealed(result: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """Return a result with a seal.

    Args:
        result: The result, without a seal.
        digests: The digests of the run's files, by name.
    """
    return {**result, SEAL: {**digests, ENTRIES: _digest(result)}}


def split(stored: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return a result and its seal, or None for a run of an earlier version, which has none."""
    return {name: value for name, value in stored.items() if name != SEAL}, stored.get(SEAL)


def is_intact(result: Mapping[str, Any], seal: Mapping[str, str]) -> bool:
    """Return whether the entries of a result have the digest in its seal."""
    return _digest(result) == seal[ENTRIES]


def changed_files(folder: Path, seal: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return the files of a run, among some names, that do not have the digests in its seal."""
    return [name for name in names if sha256_of(folder / name) != seal[name]]


def _digest(result: Mapping[str, Any]) -> str:
    """Return the digest of JSON values, whatever the order of the entries."""
    plain = json.loads(json.dumps(result))  # names are texts, as in the file
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
