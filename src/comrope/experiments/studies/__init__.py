"""Studies: tables and figures of the paper (paper) and the fair comparison (fair)."""

from __future__ import annotations

import importlib

from comrope.experiments.common.errors import UserError
from comrope.experiments.config.build import suggest
from comrope.experiments.config.identity import run_name
from comrope.experiments.studies.fair import comparison, language, language_search, tuning, values
from comrope.experiments.studies.paper import (
    block_size,
    classification,
    cost,
    detection,
    distribution,
    finetune,
    offset,
    perturbation,
    video,
)
from comrope.experiments.studies.study import PRESETS, Preset, Row, Study

__all__ = ["PRESETS", "STUDIES", "Preset", "Row", "Study", "find_study", "run_name"]

_PAPER = (
    classification, video, detection, finetune, offset, block_size, perturbation, distribution, cost
)  # fmt: skip
_FAIR = (comparison, tuning, values, language, language_search)
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in (*_PAPER, *_FAIR)}


def find_study(name: str) -> Study:
    """Return a study by name, or by import path, "package.module:STUDY"."""
    module, colon, attribute = name.partition(":")
    if colon:
        try:
            study = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(f"name: {name!r} cannot be imported ({error})") from None
        if not isinstance(study, Study):
            raise UserError(f"name: {name!r} is a {type(study).__name__}; expected a Study")
        return study
    if name not in STUDIES:
        raise UserError(
            f"name: expected one of {', '.join(STUDIES)}, or package.module:STUDY; got {name!r}"
            f"{suggest(name, STUDIES)}"
        )
    return STUDIES[name]
