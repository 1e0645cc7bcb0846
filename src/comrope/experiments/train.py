"""Deprecated name of ``comrope.experiments.training.train``; removed in 0.3."""

from __future__ import annotations

import warnings

from comrope.experiments.training.train import is_finished, train

__all__ = ["is_finished", "train"]

warnings.warn(
    "comrope.experiments.train is deprecated; use comrope.experiments.training.train",
    DeprecationWarning,
    stacklevel=2,
)
