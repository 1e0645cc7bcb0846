"""The form of JSON values: schemas, and the entry that has another one. Files: faults/test_json."""

from __future__ import annotations

import math

import pytest

from comrope._json import (
    ANYTHING,
    COUNT,
    NUMBER,
    SHA256,
    TEXT,
    Entries,
    Items,
    Nullable,
    check,
    constant,
    decode,
    parse,
)


def test_values_have_their_form():
    for schema, right, wrong in (
        (TEXT, ["", "a"], [None, 1, ["a"]]),
        (NUMBER, [0, -1.5, 10**300], [True, "1", None, math.nan, -math.inf, 10**400]),
        (COUNT, [0, 7], [-1, 1.0, True, "1"]),
        (SHA256, ["0" * 64, "af" * 32], ["0" * 63, "A" * 64, "g" * 64, 0]),
        (Nullable(COUNT), [None, 1], [-1, "a"]),
        (Nullable(Items(TEXT)), [None, []], [[1]]),
        (constant(1), [1], [1.0, True, 2]),
        (Items(Items(COUNT)), [[], [[]], [[1], [2, 3]]], [1, [1], [["a"]], {}]),
        (Entries(), [{}, {"a": 1}], [[], None, "a"]),
        (Entries({"a": COUNT}), [{"a": 1, "b": "x"}], [{}, {"b": 1}, {"a": "x"}]),
        (Entries({}, {"a": COUNT}, None), [{}, {"a": 1}], [{"b": 1}, {"a": "x"}]),
        (Entries(others=NUMBER), [{}, {"a": 1}], [{"a": "x"}]),
        (ANYTHING, [None, {}, "a"], []),
    ):
        for value in right:
            check(value, schema)
        for value in wrong:
            with pytest.raises(ValueError, match=r"expected|unknown"):
                check(value, schema)


def test_the_entry_is_named_as_one_would_write_it():
    schema = Entries({"rows": Items(Entries(others=Items(COUNT)))})
    for value, where in (
        ({}, "rows: "),
        ({"rows": [{}, {"a": [0, -1]}]}, r"rows\[1\]\.a\[1\]: "),
        ({"rows": [{"a b\n": 1}]}, r"rows\[0\]\.'a b\\n': "),
        ([], "expected names"),
    ):
        with pytest.raises(ValueError, match=f"^{where}"):
            check(value, schema)


def test_text_and_bytes_are_parsed():
    assert parse('{"ρ": [1, null]}', ANYTHING) == {"ρ": [1, None]}
    assert parse('{"ρ": "\\ud83d\\ude00"}'.encode(), Entries(others=TEXT)) == {"ρ": "😀"}
    assert parse("[" * 40 + "]" * 40, ANYTHING)
    with pytest.raises(ValueError, match="40 lists"):
        parse("[" * 41 + "]" * 41, ANYTHING)


def test_large_files_are_decoded_without_a_visit_of_every_value():
    assert decode("[" * 41 + "]" * 41)
    assert decode(b'{"a": "\\ud800"}') == {"a": "\ud800"}
    many = ", ".join(f'"{number}": 1' for number in range(20_000))
    for content in (b"\xff", "{", '{"a": 1, "a": 1}', "[" * 10**6, f'{{{many}, "19999": 1}}'):
        with pytest.raises(ValueError, match="expected"):
            decode(content)
