"""tools/glossary.py finds words that were replaced, and only those."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import glossary


@pytest.mark.parametrize(
    ("name", "text", "line", "old"),
    [
        ("src/comrope/optim.py", "x = 1\nx = rope.unrotate(x)\n", 2, "unrotate"),
        ("src/comrope/optim.py", "from comrope.angles import Torus\n", 1, "Torus"),
        ("tests/test_rotary.py", 'rope = make(init="turned")\n', 1, "turned"),
        ("docs/theory.md", "## Values that turn\n", 1, "Values that turn"),
        ("docs/adopt.md", "With `near=4`, heads\n", 1, "near"),
        ("docs/results.md", "1\n2, which is not told the\ntime\n", 2, "not told the time"),
        ("src/comrope/optim.py", "# Written whole\n# or not at all.\n", 1, "whole or not at all"),
    ],
)
def test_a_planted_word_is_found(name, text, line, old):
    assert [match[:2] for match in glossary.disallowed(text, name)] == [(line, old)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("src/comrope/ops/kernels/jacobi.py", "near = 1\n"),
        ("src/comrope/models/vit.py", "class_position == 'unrotated'  # rotate values too\n"),
        ("src/comrope/experiments/studies/plots.py", "class Line(NamedTuple):\n"),
        ("docs/results.md", "Torus is near zero.\n"),
        ("docs/reproduce.md", "UCF-101 as it is distributed, digits scattered over a canvas\n"),
    ],
)
def test_another_meaning_of_a_word_is_not_found(name, text):
    assert not glossary.disallowed(text, name)


@pytest.mark.parametrize("name", sorted(glossary.ALLOWED))
def test_old_names_are_allowed_where_they_are_needed(name):
    text = (glossary.HERE / name).read_text()
    old = {match.old for match in glossary.matches(text, name)}
    assert old >= glossary.ALLOWED[name]
    assert not {match.old for match in glossary.disallowed(text, name)} & glossary.ALLOWED[name]
