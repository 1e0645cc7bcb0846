"""What is wrong with weights is listed by name."""

from __future__ import annotations

import torch

from comrope._weights import misfits, mixed_dtypes, nonfinite, shapes_of


def test_what_does_not_fit_is_listed():
    a = {"w": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}
    assert misfits(shapes_of(a), shapes_of(a)) == []
    wrong = misfits(shapes_of(a), shapes_of({"w": torch.ones(3), "c": torch.ones(1), "x": a["c"]}))
    assert [line.split()[0] for line in wrong] == ["w", "b", "x"]


def test_rotations_may_have_another_dtype_than_the_other_weights():
    dtypes = {"a": "F16", "b": "F16", "rope.x": "F32", "rope.y": "F32", "ropes": "F16"}
    assert mixed_dtypes(dtypes, ["rope"]) == []
    for name, dtype in (("a", "F32"), ("rope.x", "F16"), ("ropes", "F32")):
        (line,) = mixed_dtypes({**dtypes, "c": "F16", "rope.z": "F32", name: dtype}, ["rope"])
        assert line.split()[0] == name
    assert mixed_dtypes({}, []) == []


def test_values_that_are_not_finite_are_listed():
    tensors = {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.arange(3), "d": torch.ones(0)}
    assert nonfinite(tensors) == []
    tensors["b"][1, 1] = torch.nan
    assert [line.split()[0] for line in nonfinite(tensors)] == ["b"]
