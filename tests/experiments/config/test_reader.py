"""YAML of plain values: its numbers, its limits, the place of an error."""

from __future__ import annotations

import math

import pytest

from comrope.experiments.config import reader


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("3", 3), ("-3", -3), ("+0", 0), ("1_000", 1000), ("1.5", 1.5),
        ("1.0e-3", 1e-3), (".5", 0.5), ("-.inf", -math.inf), ("true", True), ("no", False),
        ("[1, [2]]", [1, [2]]), ("{a: b}", {"a": "b"}), ("'3'", "3"), ("1e-3", "1e-3"),
        # numbers and dates of YAML 1.1 only
        ("010", "010"), ("0x10", "0x10"), ("0b1", "0b1"), ("1:30", "1:30"), ("1:30.5", "1:30.5"),
        ("2001-01-01", "2001-01-01"), ("9" * 5000, "9" * 5000), ("=", "="),
    ],
)  # fmt: skip
def test_plain_values(text, value):
    found = reader.parse(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: [1", "line "),
        ("a: 1\na: 2", "line 2, column 1"),
        ("a:\n  - b: 1\n    b: 2", "line 3, column 5"),
        ("a: !!int 3", "line 1, column 4"),
        ("[" * 9 + "]" * 9, "line 1, column 9"),
        ("a\x00", "position 1"),
    ],
)
def test_an_error_has_a_place(text, place):
    with pytest.raises(ValueError, match=place) as caught:
        reader.parse(text)
    assert "\n" not in str(caught.value)


def test_limits(tmp_path):
    assert reader.parse("[" * reader.DEEPEST + "]" * reader.DEEPEST) is not None
    assert len(reader.parse("[" + "1," * (reader.MOST_VALUES - 1) + "]")) == reader.MOST_VALUES - 1
    aliases = ["*a"] * reader.MOST_ALIASES
    assert len(reader.parse(f"[&a 1, {', '.join(aliases)}]")) == 1 + len(aliases)
    for text in (
        "[" + "1," * reader.MOST_VALUES + "]",
        f"[&a 1, *a, {', '.join(aliases)}]",
        " " * (reader.LARGEST + 1),
    ):
        with pytest.raises(ValueError, match="at most"):
            reader.parse(text)


def test_a_file_is_read_as_utf_8(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes("\ufeffa: é".encode())
    assert reader.read(path) == {"a": "é"}
    path.write_bytes(b"a: \xe9")
    with pytest.raises(ValueError, match="UTF-8"):
        reader.read(path)
    with pytest.raises(OSError, match="none"):
        reader.read(tmp_path / "none.yaml")
