"""What went wrong outside the program, in one line, for whoever gave the command."""

from __future__ import annotations

__all__ = ["Interrupted", "UserError"]


class UserError(Exception):
    """Something to be put right by the user: no traceback is shown for it."""


class Interrupted(Exception):
    """A run was told to stop; it has saved itself and can be resumed."""
