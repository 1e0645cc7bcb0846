"""Rows of the fair comparison, and the settings that a search found for them."""

from __future__ import annotations

import pytest

from comrope.experiments.config import load_recipe
from comrope.experiments.studies import PRESETS, STUDIES, run_name
from comrope.experiments.studies.fair import rows
from comrope.experiments.tasks import task_of

SMALL, COMPARISON = PRESETS["small"], STUDIES["comparison"]


@pytest.fixture
def found(monkeypatch):
    """Replaces the content of the files that a search writes."""

    def replace(**files):
        named = {f"fair/{name}.yaml": content for name, content in files.items()}
        monkeypatch.setattr(rows, "packaged", named.__getitem__)

    return replace


def test_every_row_gets_what_a_search_found_for_it(found):
    found(tuned={"imagenette": {"vanilla RoPE, patch units": {"model.base": 100}, "none": None}})
    for preset, wanted in (("small", 100), ("demo", None)):
        for row in COMPARISON.rows(PRESETS[preset]):
            if not set(rows.EXTENSIONS) & set(dict(row.fields)):  # those have their own
                config = row.config(load_recipe(PRESETS[preset].recipe), 0)
                assert config.model.base == (wanted if "patch" in row.label else None)


def test_what_was_found_with_ape_holds_for_every_row(found):
    found(tuned={"imagenette": {"every row": {"optim.lr": 0.5}, "liere": {"model.base": 7}}})
    for row in COMPARISON.rows(SMALL):
        fields = dict(row.fields)
        assert fields["optim.lr"] == 0.5
        if not set(rows.EXTENSIONS) & set(fields):
            assert fields.get("model.base") == (7 if row.method == "liere" else None)


def test_an_extended_row_is_searched_or_has_common_settings(found):
    own = {rows.EXTENSIONS[1]: 8.0, "model.base": 10.0}
    found(tuned={"imagenette": {"vanilla RoPE, extended": own}})
    fields = {row.label: dict(row.fields) for row in COMPARISON.rows(SMALL)}
    assert fields["vanilla RoPE, extended"] == {"model.rotate_values": True, **own}
    assert fields["comrope-torus, extended"][rows.EXTENSIONS[1]] == 4.0
    bases = {some["model.base"] for label, some in fields.items() if "extended" in label}
    assert bases == {10.0, 100.0}


def test_what_was_found_is_of_existing_rows_that_can_be_built():
    known = {rows.row_id(row) for row in (*rows.ROWS, *rows.extended_rows(), rows.CONTROL)}
    for recipe, some in rows.packaged("fair/tuned.yaml").items():
        assert set(some) <= known | {rows.EVERY}
        (preset,) = (p for p in PRESETS.values() if p.recipe == recipe)
        small = load_recipe("digits").with_overrides({"model.name": "vit_nano_patch4_12"})
        for row in COMPARISON.rows(preset):
            task_of(row.config(small, 0)).build_model()


def test_rows_without_settings_share_the_runs_of_the_classification_study():
    base = load_recipe("imagenette")
    shared = {run_name(row.config(base, 0)) for row in STUDIES["classification"].rows(SMALL)}
    plain = [row for row in COMPARISON.rows(SMALL) if not row.fields and row.method != "none"]
    assert {run_name(row.config(base, 0)) for row in plain} <= shared


def test_a_model_with_extensions_is_built():
    bias = rows.EXTENSIONS[1]
    config = load_recipe("imagenette32").with_overrides({"model.rotate_values": True, bias: 4.0})
    for block in task_of(config).build_model().blocks:
        assert block.attn.rotate_values
        assert block.attn.qkv.bias.any()
