"""Saved models whose files have changed or are damaged: from_pretrained names them."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from helpers import raises_for
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.faults import change_json, flip_bit, pickled
from support.vits import nano

from comrope._files import sha256_of
from comrope.models import ViT

CONFIG, WEIGHTS = "config.json", "model.safetensors"
HEAD, NORM, ANGLES = "head.weight", "norm.weight", "blocks.0.attn.rope.method.P"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    torch.manual_seed(0)
    nano().save_pretrained(folder)
    return folder


@pytest.fixture
def saved(original, tmp_path) -> Path:
    return shutil.copytree(original, tmp_path / "model")


def rewrite(folder: Path, change, *, digest: bool) -> None:
    """Change weights and keep their metadata; with ``digest``, write their digest, too."""
    file = folder / WEIGHTS
    with safe_open(str(file), "pt") as opened:
        metadata = opened.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata)
    new = sha256_of(file)
    change_json(folder / CONFIG, lambda config: config.pop("weights_sha256"))
    if digest:
        change_json(folder / CONFIG, lambda config: config.update(weights_sha256=new))


def refused(folder: Path, named: str) -> None:
    with pytest.raises(ValueError, match=named) as raised:
        ViT.from_pretrained(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_of_12_flipped_bits_12_are_refused(saved):
    whole = (saved / WEIGHTS).read_bytes()
    for seed in range(12):
        flip_bit(saved / WEIGHTS, seed)
        refused(saved, WEIGHTS)
        (saved / WEIGHTS).write_bytes(whole)
    ViT.from_pretrained(saved)


def test_every_bit_of_the_weights_is_part_of_the_digest(saved):
    whole, moments = (saved / WEIGHTS).read_bytes(), random.Random(0)
    for place in (8, 9, *(moments.randrange(len(whole)) for _ in range(20)), len(whole) - 1):
        content = bytearray(whole)
        content[place] ^= 1
        (saved / WEIGHTS).write_bytes(content)
        refused(saved, WEIGHTS)


def put(name: str, value: float):
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)


def cast(dtype: torch.dtype, *names: str):
    def change(tensors):
        for name in names or list(tensors):
            tensors[name] = tensors[name].to(dtype)

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put(HEAD, torch.nan), HEAD),
        (put(NORM, torch.inf), NORM),
        (put(ANGLES, -torch.inf), ANGLES),
        (cast(torch.float16, NORM), NORM),
        (cast(torch.bfloat16, HEAD), HEAD),
        (cast(torch.float64, NORM), NORM),
        (cast(torch.float16, ANGLES), ANGLES),
        (cast(torch.int64, HEAD), HEAD),
        (cast(torch.bool, HEAD), HEAD),
        (cast(torch.float8_e4m3fn, HEAD), HEAD),
        (cast(torch.complex64, HEAD), HEAD),
        (lambda t: t.update({HEAD: torch.zeros(3, 64)}), HEAD),
        (lambda t: t.update({HEAD: t[HEAD].mT}), HEAD),
        (lambda t: t.pop(NORM), NORM),
        (lambda t: t.update(extra=torch.zeros(1)), "extra"),
        (lambda t: t.clear(), "blocks"),
    ],
)
@pytest.mark.parametrize("digest", [True, False])
def test_changed_weights_are_refused_by_name_with_and_without_a_digest(
    change, named, digest, saved
):
    rewrite(saved, change, digest=digest)
    refused(saved, named)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_file_of_one_dtype_is_loaded(dtype, saved):
    rewrite(saved, cast(dtype), digest=True)
    model = ViT.from_pretrained(saved)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(torch.randn(1, 1, 8, 8, dtype=dtype)).isfinite().all()


def test_weights_of_another_model_with_the_same_arguments_are_refused(saved, tmp_path):
    torch.manual_seed(1)
    nano().save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / WEIGHTS, saved / WEIGHTS)
    refused(saved, "SHA-256")
    shutil.copy(tmp_path / "other" / CONFIG, saved / CONFIG)
    ViT.from_pretrained(saved)


def test_a_model_of_an_earlier_version_has_no_digest(saved):
    change_json(saved / CONFIG, lambda config: config.pop("weights_sha256"))
    ViT.from_pretrained(saved)
    assert json.loads((saved / CONFIG).read_text())["format"] == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:9],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: bytes(len(content)),
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content.replace(b'"F32"', b'"X32"', 1),
        lambda content: pickled(Path("/nowhere/at/all")),
    ],
)
def test_damaged_files_are_refused(damage, saved):
    file = saved / WEIGHTS
    file.write_bytes(damage(file.read_bytes()))
    refused(saved, WEIGHTS)


def twice(text: str) -> str:
    return text.replace('"format": 1,', '"format": 1, "format": 1,')


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: "", "JSON"),
        (lambda t: "null", "names and values"),
        (lambda t: t[:-20], "JSON"),
        (lambda t: "[" * 10**5, "40 lists"),
        (lambda t: t.replace('"format": 1', '"format": true'), "format"),
        (lambda t: t.replace('"format": 1', '"format": 1.0'), "format"),
        (lambda t: t.replace('"library": "comrope"', '"library": ["comrope"]'), "library"),
        (twice, "'format' appears twice"),
        (lambda t: t.replace('"weights_sha256": "', '"weights_sha256": "0'), "weights_sha256"),
        (lambda t: t.replace('"weights_sha256": "', '"weights_sha256": 1, "a": "'), "sha256"),
        (lambda t: t.replace('"depth": ', '"depth": 1e999, "a": '), "depth|'a'"),
        (lambda t: t.replace('"base": ', '"base": NaN, "b": '), "base|'b'"),
        (lambda t: t.replace('"embed_dim": ', '"embed_dim": 1' + 5000 * "0"), "JSON"),
        (lambda t: t.replace('"ViT"', '"\\ud800"'), "Unicode"),
        (lambda t: t.replace('"init_std": ', '"init_std": 0, "a": '), "init_std|a'"),
        (lambda t: t.replace('"arguments": {', '"arguments": {"a\\nb": 1, '), r"a\\nb"),
    ],
)
def test_damaged_configurations_are_refused(change, named, saved):
    text = (saved / CONFIG).read_text()
    assert change(text) != text
    (saved / CONFIG).write_text(change(text))
    refused(saved, named)


def test_a_configuration_that_is_a_pipe_is_refused(saved):
    (saved / CONFIG).unlink()
    os.mkfifo(saved / CONFIG)
    with pytest.raises((FileNotFoundError, ValueError), match=CONFIG):
        ViT.from_pretrained(saved)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: model.norm.weight.data.fill_(torch.nan), NORM),
        (lambda model: model.head.half(), HEAD),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(change, named, saved):
    model = nano()
    change(model)
    with raises_for("model", naming=named):
        model.save_pretrained(saved)
    ViT.from_pretrained(saved)
