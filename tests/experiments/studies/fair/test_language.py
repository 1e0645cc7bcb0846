"""The study of language models: its rows, pairs and figures, from kept results and made-up ones."""

from __future__ import annotations

import pytest
import torch
from support.studies import plan_of

from comrope.experiments.common.figures import save
from comrope.experiments.config import decisive, load_recipe
from comrope.experiments.studies.fair import language
from comrope.experiments.studies.fair.language import METRIC, STUDY, SUFFIX, VALUES
from comrope.experiments.studies.tables import row_name, spread
from comrope.experiments.tasks import task_of
from comrope.experiments.tasks.token_scores import position_edges

SHARE = "model.rotated_share"


def test_every_rotation_has_a_row_with_rotated_values():
    plan = plan_of("language", "tiny", gather=True).rows
    by_name = {row.name: decisive(configs[0]) for row, configs in plan.items()}
    assert by_name.pop("no positions")["model.position"] == "none"
    plain = [name for name in by_name if not name.endswith(SUFFIX)]
    assert len(by_name) == 2 * len(plain)
    for name in plain:
        mine, other = by_name[name], by_name[name + SUFFIX]
        assert {key for key in mine if mine[key] != other[key]} == {VALUES}
    assert {fields["model.base"] for fields in by_name.values()} == {1e4, 60.0}  # what was searched
    assert len({tuple(map(str, fields.values())) for fields in by_name.values()}) == len(by_name)


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
        "wavelengths": {str(q): spread([1.0, 1.0, 1.0]) for q in language.QUANTILES},
        "scaled": {name: spread([1.0, 1.0, 1.0]) for name in ("NTK", "YaRN")},
    }


def results() -> dict:
    return {
        "data": "made up",
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


def test_rows_are_compared_with_the_searched_base_and_with_themselves_without_values():
    pairs = [(row_name(mine), row_name(other)) for mine, other in language._pairs(results())]
    assert pairs == [
        ("RoPE, base 10,000", "RoPE, base 60"),
        ("p-RoPE", "RoPE, base 60"),
        ("LD", "RoPE, base 60"),
        ("LD" + SUFFIX, "RoPE, base 60" + SUFFIX),
        ("RoPE, base 60" + SUFFIX, "RoPE, base 60"),
        ("LD" + SUFFIX, "LD"),
    ]


def test_fewer_bits_are_better_in_the_table(tmp_path):
    lines = STUDY.table(results()).splitlines()
    (better,) = [line for line in lines if line.startswith("| LD | RoPE, base 60 |")]
    (worse,) = [line for line in lines if line.startswith("| RoPE, base 10,000 | RoPE")]
    assert better.count("better") == 2
    assert "-0.1" in better
    assert worse.count("worse") == 2
    save(STUDY.figure(results()), tmp_path / "figure.png")


@pytest.mark.parametrize("position", ["rope", "none"])
def test_wavelengths_are_those_of_the_frequencies(position):
    config = load_recipe("language").with_overrides({"model.position": position})
    with torch.no_grad():
        found = language._wavelengths(task_of(config).create_model(), 256)
    if position == "none":
        assert found == {}
    else:  # 16 planes from 1 to 10000^(-15/16) radians a token
        shortest = 2 * torch.pi / 256
        assert found["0.0"] == pytest.approx(shortest, rel=1e-5)
        assert found["1.0"] == pytest.approx(shortest * 1e4 ** (15 / 16), rel=1e-4)
