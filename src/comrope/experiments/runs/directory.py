"""The folder of a run: its configuration, result and weights, and the checks when they are read."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from comrope._checks import name_shown, nonfinite, one_line
from comrope._files import sha256_of
from comrope._json import COUNT, NUMBER, SHA256, TEXT, Entries, Items, Nullable, read_bytes
from comrope.experiments.common.console import say
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.files import save_tensors, write_files, write_text
from comrope.experiments.common.json_files import check_json, read_json
from comrope.experiments.config import (
    CONFIG,
    Config,
    differences,
    load_recipe,
    read_config,
    start_id,
    to_yaml,
)
from comrope.experiments.runs import seal as seals

__all__ = [
    "CONFIG",
    "LOCK",
    "LOG",
    "RESULT",
    "RESULT_SCHEMA",
    "TO_RESTORE",
    "WEIGHTS",
    "check_config",
    "check_run_dir",
    "headline_of",
    "read_result",
    "read_weights",
    "reseal",
    "upgrade_result",
    "write_config",
    "write_finished",
    "write_result",
]

LOG, RESULT, WEIGHTS = "log.jsonl", "result.json", "model.safetensors"
LOCK = ".lock"
RENAMED = {"taken_for": "confusion"}  # entries of results that earlier versions wrote
TO_RESTORE = "remove the file and repeat `comrope train` to evaluate the run again"
TO_REPEAT = f"restore it; or remove {RESULT} and repeat `comrope train`, which writes it again"
SEALED = (CONFIG, WEIGHTS)  # the files that have a digest in the seal
RESULT_SCHEMA = Entries(
    optional={
        seals.SEAL: Entries(dict.fromkeys((*SEALED, seals.ENTRIES), SHA256), others=None),
        "classes": Nullable(Items(TEXT)),
        "confusion": Items(Items(COUNT)),
        "data_root": Nullable(TEXT),
        "evaluation_seconds": NUMBER,
        "figures": Entries(others=Entries()),
        "left_out": Entries(others=COUNT),
        "machine": Entries(others=TEXT),
        "parameters": COUNT,
        "peak_memory_gib": NUMBER,
        "position_parameters": COUNT,
        "processes": COUNT,
        "steps": COUNT,
        "unreadable": Entries(others=NUMBER),
        "view_seconds": Entries(others=NUMBER),
        "waiting_for_data": Nullable(NUMBER),
    }
)
VIEWS = Entries(others=Nullable(NUMBER), expected="a number for every view")


def check_run_dir(config: Config, out: Path) -> None:
    """Raise unless ``out`` is new, empty, or contains a run of the same configuration."""
    if out.exists() and not out.is_dir():
        raise UserError(f"out: {out} is a file, expected a folder")
    if not out.exists() or all(path.name.startswith(".") for path in out.iterdir()):
        return  # an interrupted first write leaves a hidden file
    if not (out / CONFIG).is_file():
        parts = [part for part in ("checkpoints", LOG, WEIGHTS, RESULT) if (out / part).exists()]
        if parts:
            raise UserError(
                f"out: {out} has {', '.join(parts)} of a run, but no {CONFIG}; nothing was "
                f"changed. Restore {CONFIG}, or choose another folder"
            )
        raise UserError(
            f"out: {out} holds something else than a run; nothing was changed. Choose another "
            "folder"
        )
    if not (out / RESULT).exists() and not any((out / "checkpoints").glob("step-*")):
        return  # it stopped before its first checkpoint
    if different := differences(config, *read_config(out)):
        raise UserError(
            f"out: {out} holds another run ({one_line('; '.join(different[:5]))}); nothing was "
            "changed. "
            "Choose another folder"
        )


def write_config(out: Path, config: Config) -> str:
    """Write the configuration of a run, with the identity of its initial weights; return the text.

    If these weights no longer exist when a run is resumed, the stored identity is kept.
    """
    start, stored = config.train.start_from, None
    if (out / CONFIG).is_file():
        before, parent = read_config(out)
        stored = parent if before.train.start_from == start else None
    text = to_yaml(config, start_id(start, stored))
    write_text(out / CONFIG, text)
    return text


def read_result(out: Path, *, sealed: bool = True) -> dict[str, Any] | None:
    """Return the result of a finished run, without its seal; None for other folders.

    Args:
        out: The folder.
        sealed: Whether to raise if the result does not have the digest in its seal.
    """
    if (stored := _read(out)) is None:
        return None
    result, seal = stored
    if sealed and seal is not None and not seals.is_intact(result, seal):
        raise _changed(out, RESULT)
    return upgrade_result(result)


def upgrade_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the present names of its entries."""
    return {RENAMED.get(name, name): value for name, value in dict(result).items()}


def headline_of(result: dict[str, Any], headline: str, where: Path | str) -> dict[str, Any]:
    """Return the main metric of a result, by view.

    Args:
        result: The result.
        headline: The name of the metric (``Task.headline``).
        where: The origin of the result, for messages.

    Raises:
        UserError: The result does not have this metric, or its values are not finite numbers.
    """
    check_json(result, Entries(required={headline: VIEWS}), str(where), TO_RESTORE)
    found: dict[str, Any] = result[headline]
    return found


def read_weights(
    out: Path, label: str = "run", *, sealed: bool = True
) -> tuple[Config, dict[str, Tensor]]:
    """Return the configuration and the evaluated weights of a finished run.

    Args:
        out: The folder.
        label: The argument or field that names the folder, for messages.
        sealed: Whether to raise if a file does not have the digest in the run's seal.

    Raises:
        UserError: The run is not finished, its files have changed, or weights are not finite.
    """
    weights = out / WEIGHTS
    if str(out).startswith("@"):
        raise UserError(
            f"{label}: {out} is a stored run without weights; train it with `comrope train {out} "
            "--out FOLDER`, and pass that folder"
        )
    if not (out / CONFIG).is_file():
        raise UserError(f"{label}: {out} holds no run (no {CONFIG})")
    for name in (WEIGHTS, RESULT):
        if not (out / name).is_file():
            raise UserError(f"{label}: {out} is not finished (no {name}); train it first")
    seal = check_config(out, label) if sealed else None
    try:
        config, tensors = load_recipe(str(out / CONFIG)), load_file(weights)
    except (SafetensorError, OSError, MemoryError) as error:
        reason = one_line(error)
        raise UserError(f"{label}: {weights} cannot be read ({reason}); {TO_REPEAT}") from None
    if wrong := nonfinite(tensors):
        more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
        raise UserError(
            f"{label}: {weights}: {name_shown(wrong[0])}{more} has values that are not finite; "
            f"{TO_REPEAT}"
        )
    if seal is not None and seals.changed_files(out, seal, [WEIGHTS]):
        raise _changed(out, WEIGHTS, label)
    if sealed and seal is None:
        _note_no_seal(out)
    return config, tensors


def check_config(out: Path, label: str = "run") -> dict[str, str] | None:
    """Return the seal of a finished run, if any; raise if configuration or result have changed."""
    if (stored := _read(out)) is None:
        return None
    result, seal = stored
    if seal is not None and not seals.is_intact(result, seal):
        raise _changed(out, RESULT, label)
    if seal is not None:
        try:
            read_bytes(out / CONFIG)  # within the limit of its size, and no pipe
            is_changed = seals.changed_files(out, seal, [CONFIG])
        except (OSError, ValueError) as error:
            reason = one_line(error)
            raise UserError(f"{label}: {out / CONFIG} cannot be read ({reason})") from None
        if is_changed:
            raise _changed(out, CONFIG, label)
    return seal


def write_finished(
    out: Path, config: str, weights: Mapping[str, Tensor], result: dict[str, Any]
) -> None:
    """Write configuration, weights and sealed result of a run, all or none.

    Args:
        out: The folder of the run.
        config: The text that ``write_config`` returned. It is written again, because the file may
            have been changed during training.
        weights: The evaluated weights.
        result: The result.

    Raises:
        UserError: A file cannot be written, or weights are not finite.
    """
    if wrong := nonfinite(weights):
        raise UserError(
            f"{out}: {wrong[0]} is not finite after the last step, so the run cannot finish. Try a "
            "smaller optim.lr or optim.clip_grad"
        )
    digests = {}

    def write_first(file: Path) -> None:
        file.write_text(config, encoding="utf-8")
        digests[CONFIG] = sha256_of(file)

    def write_second(file: Path) -> None:
        save_tensors(weights, file)
        digests[WEIGHTS] = sha256_of(file)

    def write_last(file: Path) -> None:
        file.write_text(_to_text(seals.sealed(result, digests)), encoding="utf-8")

    write_files({out / CONFIG: write_first, out / WEIGHTS: write_second, out / RESULT: write_last})


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Write the result of a run. If it was sealed, the digests of the other files stay."""
    _, seal = _read(out) or ({}, None)
    if seal is not None:
        result = seals.sealed(result, {name: seal[name] for name in SEALED})
    write_text(out / RESULT, _to_text(result))


def reseal(out: Path) -> None:
    """Seal a finished run with its present files, which the caller has checked."""
    result = read_result(out, sealed=False)
    assert result is not None
    digests = {name: sha256_of(out / name) for name in SEALED}
    write_text(out / RESULT, _to_text(seals.sealed(result, digests)))


def _read(out: Path) -> tuple[dict[str, Any], dict[str, str] | None] | None:
    """Return the result of a run as it is stored, and its seal if any; None without a result."""
    try:
        return seals.split(read_json(out / RESULT, RESULT_SCHEMA, TO_RESTORE))
    except FileNotFoundError:
        return None


def _to_text(result: dict[str, Any]) -> str:
    return json.dumps(result, indent=1) + "\n"


def _changed(out: Path, name: str, label: str = "run") -> UserError:
    return UserError(
        f"{label}: {out / name} has changed since the run was finished (SHA-256); restore it, or "
        f"accept the change with `comrope results reseal {shlex.quote(str(out))}`"
    )


@functools.cache
def _note_no_seal(out: Path) -> None:
    say(
        f"{out}: is not sealed, like runs of earlier versions, so a change of its files cannot be "
        f"detected; `comrope results reseal {shlex.quote(str(out))}` seals it"
    )
