"""Read JSON files of experiments (see ``comrope._json``); their errors are user errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comrope import _json
from comrope.experiments.common.errors import UserError

__all__ = ["check_json", "read_json"]


def read_json(path: Path, schema: _json.Schema, todo: str) -> Any:
    """Return the content of a JSON file.

    Args:
        path: The file.
        schema: The form of its content.
        todo: What to do if it does not have this form, for the message.

    Raises:
        FileNotFoundError: There is no such file.
        UserError: It cannot be read, or does not have this form.
    """
    try:
        return _json.read(path, schema)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {todo}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; {todo}") from None


def check_json(value: Any, schema: _json.Schema, where: str, todo: str) -> None:
    """Raise ``UserError`` unless a value that was read has its form; ``where`` is its origin."""
    try:
        _json.check(value, schema)
    except ValueError as error:
        raise UserError(f"{where}: {error}; {todo}") from None
