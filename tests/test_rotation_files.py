"""Rotations in files of their own: complete, checked, and never half loaded."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from helpers import raises_for
from support.vits import nano

import comrope

safetensors = pytest.importorskip("safetensors.torch")


def parameters(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".rope." in n}


@pytest.mark.parametrize("options", [
    {"position": "comrope-ld"},
    {"position": "comrope-torus", "log_frequencies": True, "init": "rope"},
    {"position": "comrope-ap", "shared_heads": True},
    {"position": "rope"},
])  # fmt: skip
def test_saved_and_loaded(options, tmp_path):
    model, other = nano(**options), nano(**options)
    comrope.save_rotations(model, tmp_path / "new" / "rotations.safetensors")
    others = {n: p.detach().clone() for n, p in other.named_parameters() if ".rope." not in n}
    assert comrope.load_rotations(other, tmp_path / "new" / "rotations.safetensors") is other
    for name, value in parameters(model).items():
        assert torch.equal(other.get_parameter(name), value)
    assert all(torch.equal(other.get_parameter(n), p) for n, p in others.items())


def test_a_swapped_model(tmp_path):
    """The file has the rotations only, and a freshly swapped model computes the same with it."""
    timm = pytest.importorskip("timm")
    stock = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=3).eval()
    model = comrope.swap(copy.deepcopy(stock), "comrope-ld")
    for rope in comrope.analysis.rotary_modules(model).values():
        torch.nn.init.normal_(rope.method.P)
    file = tmp_path / "rotations.safetensors"
    comrope.save_rotations(model, file)
    assert file.stat().st_size < 200_000
    again = comrope.load_rotations(comrope.swap(copy.deepcopy(stock), "comrope-ld"), file)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), model(x))
    for wrong in ({"block_size": 4}, {"shared_heads": True}):
        with raises_for(str(file), naming="comrope.swap"):
            comrope.load_rotations(comrope.swap(copy.deepcopy(stock), "comrope-ld", **wrong), file)
    with raises_for("model", naming="comrope.swap"):
        comrope.load_rotations(copy.deepcopy(stock), file)
    with raises_for("model", naming="comrope.swap"):
        comrope.save_rotations(stock, file)


def rewrite(file, change):
    """Write the file again with other tensors or metadata."""
    with safetensors.safe_open(str(file), framework="pt") as opened:
        metadata, tensors = opened.metadata(), {n: opened.get_tensor(n) for n in opened.keys()}  # noqa: SIM118
    change(tensors, metadata)
    safetensors.save_file(tensors, file, metadata=metadata)


FAULTS = {
    "flipped bit": lambda data: data[:-5] + bytes([data[-5] ^ 64]) + data[-4:],
    "truncated": lambda data: data[:-7],
    "empty": lambda data: b"",
    "text": lambda data: b"rotations",
    "longer": lambda data: data + b"x",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_files_change_nothing(fault, tmp_path):
    model, file = nano(position="comrope-ld"), tmp_path / "rotations.safetensors"
    comrope.save_rotations(nano(position="comrope-ld"), file)
    file.write_bytes(FAULTS[fault](file.read_bytes()))
    before = parameters(model)
    with raises_for(str(file)):
        comrope.load_rotations(model, file)
    assert all(torch.equal(model.get_parameter(n), p) for n, p in before.items())


CHANGES = {
    "no metadata": lambda tensors, metadata: metadata.clear(),
    "no JSON": lambda tensors, metadata: metadata.update(comrope_rotations="{"),
    "a list": lambda tensors, metadata: metadata.update(comrope_rotations="[1]"),
    "no method": lambda tensors, metadata: metadata.update(comrope_rotations='{"a": {}}'),
    "another rotation": lambda tensors, metadata: metadata.update(
        comrope_rotations=json.dumps({"a": {"method": "rope"}})
    ),
    "no digest": lambda tensors, metadata: metadata.pop("sha256"),
    "a tensor less": lambda tensors, metadata: tensors.popitem(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_content_is_refused(change, tmp_path):
    model, file = nano(position="comrope-ld"), tmp_path / "rotations.safetensors"
    comrope.save_rotations(model, file)
    rewrite(file, CHANGES[change])
    with raises_for(str(file)):
        comrope.load_rotations(model, file)


def test_parameters_that_are_not_finite(tmp_path):
    model, file = nano(position="comrope-ld"), tmp_path / "rotations.safetensors"
    comrope.save_rotations(model, file)
    content = file.read_bytes()
    next(p for n, p in model.named_parameters() if ".rope." in n).data.fill_(torch.nan)
    with raises_for("model", naming="finite"):
        comrope.save_rotations(model, file)
    assert file.read_bytes() == content
    with raises_for(str(tmp_path / "none"), naming="none"):
        comrope.load_rotations(model, tmp_path / "none")
