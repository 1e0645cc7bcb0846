"""Which fields of a configuration go together, whatever its task; tasks check the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comrope.experiments.common.errors import UserError

if TYPE_CHECKING:
    from comrope.experiments.config import Config

__all__ = ["TIMM", "checked"]

TIMM = "timm:"  # in front of a name of timm's


def checked(config: Config) -> Config:
    """Return the configuration if its fields go together; raise otherwise."""
    if (config.train.precision, config.train.strategy) == ("fp16", "fsdp2"):
        raise UserError("train.precision: expected no or bf16 with train.strategy=fsdp2, got fp16")
    parts = config.train.accumulate
    if config.train.batch_size % parts:
        raise UserError(
            f"train.accumulate: expected a divisor of train.batch_size {config.train.batch_size}, "
            f"got {parts}"
        )
    return config
