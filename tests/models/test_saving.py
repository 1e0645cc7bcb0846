"""Saved and loaded models: bit for bit the same."""

from __future__ import annotations

import inspect
import json
import os
import types
from pathlib import Path

import pytest
import torch
from small import nano

from comrope import RotaryEmbedding
from comrope.methods import METHODS, create_method
from comrope.models import ViT
from comrope.models.arguments import RULES


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
        {"position": "rope", "rope_units": "relative", "patch_size": (2, 3), "img_size": (8, 9)},
        {"position": "rope-mixed", "backend": "reference", "num_classes": 0},
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


def test_every_argument_there_is_can_be_read_again():
    def names(callable_):
        return set(inspect.signature(callable_).parameters)

    handed_on = names(RotaryEmbedding) & {
        "frequencies", "axis_order", "channel_order", "backend", "spread"
    }  # fmt: skip
    sizes = {"method", "num_heads", "head_dim", "num_axes", "block_size", "init", "base"}
    made_by_the_model = {"position_scale", "num_prefix_tokens", "device", "dtype", "options"}
    assert names(RotaryEmbedding) == handed_on | sizes | made_by_the_model
    of_methods = {
        option
        for name in METHODS
        for option in create_method(name, num_heads=1, head_dim=16).options
    }
    assert set(RULES) == names(ViT) - {"rotary_options"} | handed_on | of_methods


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
    with pytest.raises(ValueError, match="num_classes: expected an integer of at least 0, got -1"):
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
    with pytest.raises(ValueError, match=r"changed since it was made: blocks.1.attn.rope.*missing"):
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
