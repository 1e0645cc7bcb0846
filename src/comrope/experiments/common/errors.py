"""Exceptions with a cause outside of the program; the command line prints one line for them."""

from __future__ import annotations

__all__ = ["Interrupted", "UserError"]


class UserError(Exception):
    """An error that the user can correct, shown without a traceback."""


class Interrupted(Exception):
    """A run received a signal to stop; its state is saved and it can be resumed."""
