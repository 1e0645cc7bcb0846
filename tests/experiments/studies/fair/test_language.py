"""The study of language models: its rows, table and measurement."""

from __future__ import annotations

import pytest
import torch
from support.language_results import made_up_results
from support.studies import plan_of

from comrope.experiments.config import decisive, load_recipe
from comrope.experiments.studies.fair import language
from comrope.experiments.studies.fair.language import STUDY
from comrope.experiments.studies.fair.language_pairs import SUFFIX, VALUES
from comrope.experiments.tasks import task_of


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


def test_fewer_bits_are_better_in_the_table():
    lines = STUDY.table(made_up_results()).splitlines()
    (better,) = [line for line in lines if line.startswith("| LD | RoPE, base 60 |")]
    (worse,) = [line for line in lines if line.startswith("| RoPE, base 10,000 | RoPE")]
    assert better.count("better") == 2
    assert "-0.1" in better
    assert worse.count("worse") == 2


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
