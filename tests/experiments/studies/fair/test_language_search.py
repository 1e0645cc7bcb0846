"""The search for the study of language models."""

from __future__ import annotations

import pytest
from support.studies import plan_of

from comrope.experiments.common.figures import save
from comrope.experiments.config import decisive
from comrope.experiments.studies.fair.language import SCALES
from comrope.experiments.studies.fair.language_pairs import METRIC
from comrope.experiments.studies.fair.language_search import (
    BASES,
    FEWER,
    HELD_OUT,
    RATE,
    RATES,
    STUDY,
    best,
)
from comrope.experiments.studies.study import packaged
from comrope.experiments.studies.tables import spread


def trial(method: str, label: str, bits: float, **fields: object) -> dict:
    return {"method": method, "label": label, "fields": fields, METRIC: {"256": spread([bits])}}


ROWS = [
    trial("rope", "RoPE, base 10,000", 2.3, **{"model.base": 1e4}),
    trial("rope", "RoPE, base 60", 2.1, **{"model.base": 60.0}),
    trial("comrope-ld", "LD", 2.2, **{RATE: 1.0}),
    trial("comrope-ld", "LD", 2.0, **{RATE: 3.0}),
    trial("comrope-ld", "LD", 2.4, **{RATE: 10.0}),
]


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_the_trials_have_held_out_text_and_every_base_and_rate(preset):
    bases, rates = FEWER.get(preset, (BASES, RATES))
    plan = plan_of("language-search", preset, gather=True).rows
    fields = [decisive(configs[0]) for configs in plan.values()]
    assert {each["data.holdout"] for each in fields} == {HELD_OUT}
    assert [f["model.base"] for f in fields if f["model.position"] == "rope"] == [*bases]
    learned = [f for f in fields if f["model.position"] != "rope"]
    assert {f.get(RATE, 1.0) for f in learned} == {*rates}
    assert len({tuple(map(str, each.values())) for each in fields}) == len(fields)


def test_the_trial_with_the_fewest_bits_is_the_best(tmp_path):
    assert best({"rows": ROWS}) == {"base": 60.0, "rates": {"LD": 3.0}}
    results = {"rows": ROWS, "preset": "tiny", "data": "made up"}
    assert "LD: 3.0" in STUDY.table(results)
    save(STUDY.figure(results), tmp_path / "figure.png")


def test_stored_settings_are_of_rows_that_exist():
    stored = packaged("fair/language.yaml")
    presets = {scale.recipe: preset for preset, scale in SCALES.items() if preset != "demo"}
    assert {*presets} >= {*stored}
    for recipe, found in stored.items():
        names = {row.name for row in plan_of("language", presets[recipe], gather=True).rows}
        assert names >= {*found["rates"]}
