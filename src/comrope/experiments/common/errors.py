"""Exceptions with a cause outside of the program; the command line prints one line for them."""

from __future__ import annotations

import signal

__all__ = ["Interrupted", "UserError"]


class UserError(Exception):
    """An error that the user can correct, shown without a traceback."""


class Interrupted(Exception):
    """A run received a signal to stop; its state is saved and it can be resumed.

    Args:
        message: What was stopped, and how it continues.
        number: The signal, for the exit code.
    """

    def __init__(self, message: str, number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.number = int(number)
