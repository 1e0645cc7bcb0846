"""Saved and loaded models: bit for bit the same; what is not a model is refused."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import resource
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from helpers import raises_for
from safetensors.torch import load_file, save_file
from support.vits import nano

from comrope import RotaryEmbedding
from comrope.methods import METHODS, create_method
from comrope.models import POSITIONS, ViT, create_model, pretrained
from comrope.models.arguments import check_arguments
from comrope.models.transformer import ROTARY_OPTIONS


def canvas(model, batch=2):
    sizes = [p * (g + 1) for p, g in zip(model.patches.patch_size, model.train_grid, strict=True)]
    return torch.randn(batch, model.patches.in_chans, *sizes).to(model.norm.weight.dtype)


@torch.no_grad()
def same(a: ViT, b: ViT) -> bool:
    """The same arguments, the same weights and the same outputs, bit for bit."""
    x, mine, theirs = canvas(a), a.state_dict(), b.state_dict()
    return (
        mine.keys() == theirs.keys()
        and all(torch.equal(mine[n], theirs[n]) and mine[n].dtype == theirs[n].dtype for n in mine)
        and torch.equal(a(x), b(x))
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shared_theta": True, "block_size": 4, "init": "rope", "base": 100.0, "ape": True},
        {"position": "comrope-torus", "img_size": (24,), "patch_size": (2,), "block_size": 2},
        {
            "img_size": (4, 8, 12), "patch_size": (2, 4, 4), "class_token": False,
            "global_pool": "avg", "init": "zeros", "drop_path_rate": 0.1,
        },
        {"position": "comrope-ap", "axis_order": "contiguous", "class_position": "unrotated"},
        {"position": "liere", "channel_order": "half", "layer_scale": 0.1, "mlp_ratio": 2.5},
        {"position": "rope", "frequencies": [3.0, 2, 1, 0.5] * 2, "init_std": 0.3},
        {
            "position": "rope", "position_units": "relative", "patch_size": (2, 3),
            "img_size": (8, 9),
        },
        {"position": "rope-mixed", "backend": "reference", "num_classes": 0},
        {"shared_heads": True, "block_size": 4, "init": "rope", "rotated_share": 0.5},
        {
            "position": "comrope-torus", "block_size": 4, "init": "rope", "log_frequencies": True,
            "shared_heads": True,
        },
        {"position": "ape", "depth": 0},
        {"position": "none"},
    ],
)  # fmt: skip
def test_what_comes_back_is_what_went_out(options, tmp_path):
    model = nano(**options)
    model.save_pretrained(tmp_path)
    back = ViT.from_pretrained(str(tmp_path))
    assert same(model, back)
    assert not back.training
    assert all(p.requires_grad for p in back.parameters())
    written = json.loads((tmp_path / "config.json").read_text())["arguments"]
    expected = {k: list(v) if isinstance(v, tuple) else v for k, v in model.arguments().items()}
    assert written == expected
    assert {name: model.arguments()[name] for name in options} == options
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_every_argument_can_be_read_again():
    """The types of arguments are known: those of the signature, and those that it hands on."""
    handed_on = set(inspect.signature(RotaryEmbedding).parameters) & {
        "frequencies", "axis_order", "channel_order", "backend", "spread", "rotated_share",
        "shared_heads", "log_frequencies",
    }  # fmt: skip
    of_methods = {
        option
        for name in METHODS
        for option in create_method(name, num_heads=1, head_dim=16).options
    }
    assert set(ROTARY_OPTIONS) == handed_on | of_methods
    for position in POSITIONS:
        rope = {"shared_theta": True} if position == "comrope-ld" else {}
        arguments = nano(position=position, **rope).arguments()
        assert set(inspect.signature(ViT).parameters) <= {*arguments, "rotary_options"}
        written = {k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items()}
        assert check_arguments(ViT, written) == arguments


def test_a_new_argument_of_a_model_needs_no_other_edit():
    class Wider(ViT):
        def __init__(self, *, width: float | None = None, names: str = "a", **options) -> None:
            super().__init__(**options)

    assert check_arguments(Wider, {"width": 2, "names": "b"}) == {"width": 2, "names": "b"}
    assert check_arguments(Wider, {"width": None}) == {"width": None}
    with raises_for("width"):
        check_arguments(Wider, {"width": -1.0})


OLD = Path(__file__).parent / "saved_0_1"


def test_a_model_that_version_0_1_saved():
    """With the names that arguments had then."""
    expected = load_file(OLD / "expected.safetensors")
    model = ViT.from_pretrained(OLD)
    torch.testing.assert_close(model(expected["x"]), expected["logits"])
    assert model.arguments()["locality_bias"] == 2.0
    assert model.arguments()["position_units"] == "relative"


def test_old_keywords():
    with pytest.warns(DeprecationWarning, match="locality_bias"):
        model = create_model("vit_nano_patch2_12", near=2.0)
    assert model.locality_bias == 2.0
    with pytest.warns(DeprecationWarning, match="position_units"):
        model = create_model("vit_nano_patch2_12", position="rope", rope_units="relative")
    assert model.arguments()["position_units"] == "relative"
    with raises_for("near", TypeError):
        create_model("vit_nano_patch2_12", near=2.0, locality_bias=1.0)


@pytest.mark.parametrize("position", ["rope", "comrope-ld", "ape"])
def test_dtypes_are_kept(position, tmp_path):
    wide = nano(position=position).double()
    wide.save_pretrained(tmp_path / "wide")
    assert same(wide, ViT.from_pretrained(tmp_path / "wide"))
    mixed = nano(position=position).half()
    for block in mixed.blocks:
        if block.attn.rope is not None:
            block.attn.rope.float()  # as the documents advise
    mixed.save_pretrained(tmp_path / "mixed")
    assert same(mixed, ViT.from_pretrained(tmp_path / "mixed"))


def test_another_head(tmp_path):
    model = nano()
    model.reset_classifier(3, "avg")
    model.save_pretrained(tmp_path)
    assert same(model, ViT.from_pretrained(tmp_path))
    other = ViT.from_pretrained(tmp_path, num_classes=7)
    x = canvas(model)
    assert other(x).shape == (2, 7)
    assert torch.equal(other.forward_features(x), model.forward_features(x))
    assert same(model, ViT.from_pretrained(tmp_path, num_classes=3))
    with raises_for("num_classes"):
        ViT.from_pretrained(tmp_path, num_classes=-1)
    assert ViT.from_pretrained(tmp_path, backend="spectral").blocks[1].attn.rope.backend[0] == "s"


def test_random_numbers_are_left_alone(tmp_path):
    model, before = nano(), torch.get_rng_state()
    model.save_pretrained(tmp_path)
    ViT.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loaded_model_does_not_hang_on_its_file(saved):
    model = ViT.from_pretrained(saved)
    before = model.norm.weight.clone()
    with (saved / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert torch.equal(model.norm.weight, before)


def test_a_model_that_was_rebuilt_is_not_saved_as_what_it_was(tmp_path):
    model = nano()
    model.blocks[1].attn.rope = None
    with pytest.raises(ValueError, match=r"model: .*blocks.1.attn.rope.*missing"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


# The Hub, without one.


def test_a_name_on_the_hub_is_read_from_its_cache(tmp_path):
    model, commit = nano(), "0" * 40
    repository = tmp_path / "models--somebody--nano"
    model.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    offline = {"cache_dir": tmp_path, "local_files_only": True}
    assert same(model, ViT.from_pretrained("somebody/nano", **offline))
    with pytest.raises(OSError, match=r"cached|local"):
        ViT.from_pretrained("somebody/else", **offline)


@pytest.mark.parametrize("has_card", [False, True])
def test_pushing_uploads_what_saving_writes(has_card, tmp_path, monkeypatch):
    sent = {}

    class Api:
        def __init__(self, token):
            assert token == "secret"

        def create_repo(self, repo_id, **options):
            return types.SimpleNamespace(repo_id=f"somebody/{repo_id}")

        def file_exists(self, repo_id, filename, **options):
            return has_card

        def upload_folder(self, *, repo_id, folder_path, **options):
            sent.update({p.name: p.read_bytes() for p in Path(folder_path).iterdir()})
            return f"https://hub/{repo_id}/commit/1"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    model = nano()
    assert model.push_to_hub("nano", token="secret") == "https://hub/somebody/nano/commit/1"
    assert ("README.md" in sent) != has_card
    if not has_card:
        assert b"library_name: comrope" in sent["README.md"]
        assert b"ViT.from_pretrained('somebody/nano')" in sent["README.md"]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(sent[name])
    assert same(model, ViT.from_pretrained(tmp_path))


# What is not a model.


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
    words = "not a safetensors file" if name.endswith("tensors") else "is a pickle.*was not opened"
    with pytest.raises(ValueError, match=f"{name}: .*{words}"):
        ViT.from_pretrained(saved)
    with pytest.raises(ValueError, match=f"{name}: (is a pickle|expected a folder)"):
        ViT.from_pretrained(saved / name)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Trap(marker)))  # the trap is one
    assert marker.exists()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("embed_dim", 10**9),  # beyond any bound
        ("embed_dim", 2**16),  # possible, but not with these weights
        ("depth", 1000),
        ("img_size", [2**24] * 8),  # each is possible, all together are not
        ("patch_size", [2**20, 2**20]),
        ("img_size", [12] * 1000),  # a list that is too long
        ("img_size", [12, "12"]),  # a wrong item
        ("embed_dim", 64.0),  # types
        ("in_chans", True),
        ("mlp_ratio", float("nan")),
        ("class_token", 1),
        ("position", 3),
        ("base", "x"),
        ("position", "rotary"),  # a string that the model does not know
        ("unheard_of", 3),
    ],
)
def test_arguments_that_no_model_has(argument, value, saved):
    """Found out at once, and before memory is taken."""
    edit(saved, **{"patch_size": 2, argument: value})
    start, memory = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=argument if value != 2**16 else "shape") as raised:
        ViT.from_pretrained(saved)
    assert time.perf_counter() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000  # kB
    assert str(saved) in str(raised.value)


def test_an_argument_that_was_changed_after_saving(saved):
    edit(saved, position_units="relative")  # the shapes of weights do not show it
    with pytest.raises(ValueError, match="was not saved with this"):
        ViT.from_pretrained(saved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[" * 10**5, "expected at most 40 lists"),
        (" " * 2**21, "expected at most 1048576 bytes, got 2097152"),
        ("[1]", r"expected names and values, got \[1\]"),
        ('{"model_type": "vit"}', "library: expected 'comrope', got nothing"),
        ('{"library": "comrope", "format": 2}', "format: expected 1, got 2"),
        (
            '{"library": "comrope", "format": 1, "architecture": "V"}',
            "architecture: expected 'ViT'",
        ),
        (
            '{"library": "comrope", "format": 1, "architecture": "ViT", "arguments": {}, "a": ""}',
            "a: unknown entry",
        ),
        ('{"library": "comrope", "format": 1, "architecture": "ViT"}', "arguments: expected names"),
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
        with pytest.raises(ValueError, match=r"model.safetensors: is truncated"):
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


def test_halves_of_two_models_are_refused(saved, monkeypatch):
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
