"""Made-up results of the study of language models."""

from __future__ import annotations

from comrope.experiments.studies.fair.language import QUANTILES
from comrope.experiments.studies.fair.language_pairs import METRIC, SUFFIX, VALUES
from comrope.experiments.studies.tables import spread
from comrope.experiments.tasks.token_scores import position_edges

SHARE = "model.rotated_share"


def made_up(method: str, label: str, bits: float, **fields: object) -> dict:
    views, seeds = ("256", "1024"), (0, 1, 2)
    positions = [1.0] * (len(position_edges(1024)) - 1)
    runs = [
        {
            "seed": seed,
            METRIC: dict.fromkeys(views, bits + 0.01 * seed * (1 + bits % 1)),
            "figures": {view: {"bits_by_position": positions} for view in views},
        }
        for seed in seeds
    ]
    return {
        "method": method,
        "label": label,
        "finetuned": False,
        "fields": fields,
        "runs": runs,
        METRIC: {view: spread([run[METRIC][view] for run in runs]) for view in views},
        "wavelengths": {str(q): spread([1.0, 1.0, 1.0]) for q in QUANTILES},
        "scaled": {name: spread([1.0, 1.0, 1.0]) for name in ("NTK", "YaRN")},
    }


def made_up_results() -> dict:
    return {
        "data": "made up",
        "title": "Made up",
        "recipe": {"language": {"context": 256}},
        "rows": [
            {**made_up("none", "", 3.0), "wavelengths": {}},
            made_up("rope", "RoPE, base 10,000", 2.3, **{"model.base": 1e4}),
            made_up("rope", "RoPE, base 60", 2.2, **{"model.base": 60.0}),
            made_up("rope", "p-RoPE", 2.25, **{"model.base": 1e4, SHARE: 0.75}),
            made_up("comrope-ld", "LD", 2.1, **{"model.base": 60.0}),
            made_up("rope", "RoPE, base 60" + SUFFIX, 2.0, **{"model.base": 60.0, VALUES: True}),
            made_up("comrope-ld", "LD" + SUFFIX, 2.05, **{"model.base": 60.0, VALUES: True}),
        ],
    }
