"""What is not a model is not read, and what fails to be written leaves what was there."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import nano
from test_saving import same

from comrope.models import ViT, pretrained


def edit(folder: Path, **arguments) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["arguments"].update(arguments)
    (folder / "config.json").write_text(json.dumps(config))


class Trap:
    """Read back by pickle, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.pth", "model.safetensors"]
)
def test_pickles_are_never_read(name, saved, tmp_path):
    marker = tmp_path / "marker"
    (saved / "model.safetensors").unlink()
    (saved / name).write_bytes(pickle.dumps(Trap(marker)))
    words = "no safetensors file" if name.endswith("tensors") else "is a pickle.*was not opened"
    with pytest.raises(ValueError, match=f"{name}: .*{words}"):
        ViT.from_pretrained(saved)
    with pytest.raises(ValueError, match=f"{name}: (is a pickle|expected a folder)"):
        ViT.from_pretrained(saved / name)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Trap(marker)))  # the trap is one
    assert marker.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 10**9}, "embed_dim: expected an integer of 1 to 65536, got 1000000000"),
        ({"embed_dim": 2**16}, r"head.*\(65536, 4\)|has shape .*, expected .*65536"),
        ({"depth": 10**6}, "depth: expected an integer of 0 to 1024, got 1000000"),
        ({"depth": 1000}, "depth: expected the 2 blocks of .*safetensors, got 1000"),
        ({"img_size": 10**12}, "img_size: expected an integer of 1 to 16777216"),
        ({"img_size": [2**24] * 8, "patch_size": 1}, "img_size: expected at most .* patches"),
        ({"img_size": 2**14, "position": "ape"}, r"ape.codebook is missing|does not fit"),
        ({"patch_size": [2**20, 2**20], "img_size": [2**20] * 2}, "patch_size: expected at most"),
        ({"num_classes": 2**24}, r"head.weight has shape \(10, 64\), expected \(16777216, 64\)"),
        ({"num_heads": 10**7}, "num_heads: expected an integer of 1 to 65536"),
        ({"block_size": -8}, "block_size: expected an integer of 2 to 65536, got -8"),
        ({"mlp_ratio": 1e300}, "mlp_ratio: expected a number of 0 to 1024"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio: expected a number of 0 to 1024, got nan"),
        ({"img_size": [12] * 1000}, "img_size: expected a list of 1 to 8 numbers"),
        ({"img_size": [12, "12"]}, "img_size: expected an integer of 1 to 16777216, got '12'"),
        ({"embed_dim": 64.0}, "embed_dim: expected an integer of 1 to 65536, got 64.0"),
        ({"in_chans": True}, "in_chans: expected an integer of 1 to 65536, got True"),
        ({"class_token": 1}, "class_token: expected true or false, got 1"),
        ({"position": 3}, "position: expected a text, got 3"),
        ({"position": "rotary"}, "position: expected one of rope"),
        ({"base": "x"}, "base: expected a number of 0 to 1e.30, got 'x'"),
        ({"unheard_of": 3}, "unheard_of: is not an argument of ViT"),
        ({"num_axes": 3}, "num_axes: is not an argument of ViT"),
        ({"rope_units": "relative"}, "was not saved with this config.json"),
    ],
)  # fmt: skip
def test_what_no_model_can_be_is_told_at_once(arguments, message, saved):
    edit(saved, **arguments)
    start, memory = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message) as raised:
        ViT.from_pretrained(saved)
    assert time.perf_counter() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000  # kB
    assert str(saved) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[" * 10**5, "recursion|Expecting"),
        (" " * 2**21, "expected at most 1048576 bytes, got 2097152"),
        ("[1]", r"expected names and values, got \[1\]"),
        ('{"model_type": "vit"}', "library: expected 'comrope', got nothing"),
        ('{"library": "comrope", "format": 2}', "format: expected 1, got 2"),
        (
            '{"library": "comrope", "format": 1, "architecture": "V"}',
            "architecture: expected 'ViT'",
        ),
        (
            '{"library": "comrope", "format": 1, "architecture": "ViT", "auto_map": "x.py"}',
            "auto_map: is not known here",
        ),
        ('{"library": "comrope", "format": 1, "architecture": "ViT"}', "arguments: expected some"),
    ],
)
def test_configurations_that_are_none(text, message, saved):
    (saved / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"config.json: .*({message})"):
        ViT.from_pretrained(saved)


def test_weights_that_do_not_fit(saved):
    path = saved / "model.safetensors"
    whole, tensors = path.read_bytes(), load_file(path)
    for length in (0, 7, 50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model.safetensors: is truncated or no safetensors"):
            ViT.from_pretrained(saved)
    name = "blocks.1.attn.rope.method.P"
    for change, message in (
        ({name: None}, f"{name} is missing"),
        ({"blocks.0.extra": torch.zeros(3)}, "blocks.0.extra is unexpected"),
        ({name: torch.zeros(2, 4, 8, 7)}, rf"{name} has shape \(2, 4, 8, 7\), expected \(2, 4, 8"),
        ({name: tensors[name].long()}, f"{name}: expected a dtype of .*, got I64"),
    ):
        changed = {k: v for k, v in {**tensors, **change}.items() if v is not None}
        save_file(changed, path)
        with pytest.raises(ValueError, match=f"model.safetensors: .*{message}"):
            ViT.from_pretrained(saved)


def test_folders_that_hold_no_model(tmp_path, saved):
    (saved / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        ViT.from_pretrained(saved)
    for nowhere in (tmp_path / "no", str(tmp_path / "no"), "./no", "no", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            ViT.from_pretrained(nowhere)
    with pytest.raises(ValueError, match="expected a folder with"):
        ViT.from_pretrained(saved / "model.safetensors")


# Writing that fails.


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_what_was_there(error, saved, monkeypatch):
    old = ViT.from_pretrained(saved)

    def fail(tensors, path, **options):
        Path(path).write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(pretrained, "save_file", fail)
    with pytest.raises(type(error), match=r"cannot be written \(disk full\)|^$"):
        nano(position="rope").save_pretrained(saved)
    assert sorted(os.listdir(saved)) == ["config.json", "model.safetensors"]
    assert same(old, ViT.from_pretrained(saved))


KILLED = """
import os, sys
from comrope import _files
from comrope.models import ViT
flush = _files._flush
_files._flush = lambda path: os.kill(os.getpid(), 9) if "config" in path.name else flush(path)
model = ViT.from_pretrained(sys.argv[1])
model.reset_parameters()
model.save_pretrained(sys.argv[1])
"""


def test_a_writer_that_is_killed_leaves_what_was_there(saved):
    """A real one, at the worst moment: all is written, nothing is moved."""
    old = ViT.from_pretrained(saved)
    done = subprocess.run([sys.executable, "-c", KILLED, str(saved)], timeout=120, check=False)
    assert done.returncode == -9
    assert len(os.listdir(saved)) == 4  # what it wrote lies aside
    assert same(old, ViT.from_pretrained(saved))


def test_halves_of_two_models_are_not_taken_for_one(saved, monkeypatch):
    """Killed between two moves: the shapes fit, the meaning of the weights does not."""
    replace = Path.replace

    def once(self, target):
        monkeypatch.setattr(Path, "replace", lambda self, target: os.stat("/nowhere"))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", once)
    with pytest.raises(OSError, match="cannot be written"):
        nano(init="rope").save_pretrained(saved)
    with pytest.raises(ValueError, match="was not saved with this"):
        ViT.from_pretrained(saved)


def test_files_are_as_readable_as_others(saved):
    (saved / "other").touch()
    modes = {file.name: file.stat().st_mode for file in saved.iterdir()}
    assert len(set(modes.values())) == 1, modes
