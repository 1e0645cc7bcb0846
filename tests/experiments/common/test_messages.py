"""Messages: short values, one line."""

from __future__ import annotations

import pytest

from comrope.experiments.common.messages import name_shown, one_line, shown


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, [[[[[[[[[[1]]]]]]]]]], [1] * 10**6, {"a": {"b": [1] * 1000}}, 10**5000, 10**4000,
     "a\nb", "\x1b", {frozenset(range(1000)): 1}],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_shown_value_is_short_and_on_one_line(value):
    text = shown(value)
    assert len(text) < 200
    assert text.isprintable()


def test_what_may_be_a_name_is_shown_as_it_is():
    assert name_shown("train.epochs") == "train.epochs"
    assert name_shown("é") == "é"
    assert [name_shown(name) for name in ("", "a b", "[", 3, None)] == [
        "''", "'a b'", "'['", "3", "None",
    ]  # fmt: skip
    assert len(name_shown("x" * 1000)) < 100


def test_one_line():
    assert one_line("a  b") == "a  b"
    assert one_line("\n a\r\n\n  b\t\n") == "a b"
    assert one_line("é \x1b[31m \udcff \u202fx") == "é \\x1b[31m \\udcff \\u202fx"
    assert len(one_line("x" * 10**6)) < 1000
