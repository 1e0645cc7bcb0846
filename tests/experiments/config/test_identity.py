"""What makes two configurations the same run."""

from __future__ import annotations

import hashlib
import json
from importlib import resources

import pytest

from comrope.experiments.config import (
    CONFIG,
    RUNTIME,
    Config,
    decisive,
    differences,
    load_recipe,
    non_default,
    read_config,
    run_id,
    run_name,
    runtime,
    start_id,
    to_yaml,
)


def with_fields(**fields) -> Config:
    return Config().with_overrides({name.replace("__", "."): v for name, v in fields.items()})


def test_it_is_a_hash_of_the_fields_that_are_not_at_their_default():
    config = with_fields(optim__lr=1e-4, model__axis_scale=[0, 1], options__size=3)
    text = '{"model.axis_scale":[0.0,1.0],"optim.lr":0.0001,"options.size":3}'
    digest = hashlib.sha256(f"comrope-run/2\n{text}".encode()).hexdigest()
    assert run_id(config) == digest[:12]
    assert run_name(config) == f"comrope-ld-b8-p1-s0-{digest[:12]}"


def test_runs_differ_by_what_decides_only():
    ids = {
        run_id(Config()),
        run_id(with_fields(train__seed=1)),
        run_id(with_fields(optim__lr=1e-4)),
        run_id(with_fields(task="package.module:Class")),
        run_id(with_fields(options__size=3)),
        run_id(with_fields(options__size=4)),
    }
    assert len(ids) == 6
    assert run_id(with_fields(data__workers=1, data__root="x", train__compile=True)) in ids
    assert run_id(with_fields(augment__auto_augment="", task="")) == run_id(Config())


def test_no_default_has_changed_since_runs_were_stored():
    """A field that is new may be added to the file. For another default, raise SCHEMA, and let
    UPGRADES write the former default into stored configurations."""
    file = resources.files("comrope.experiments.config").joinpath("identity-2.json")
    known, present = json.loads(file.read_text()), decisive(Config())
    assert {name: present.get(name, "removed") or None for name in known} == {
        name: value or None for name, value in known.items()
    }


def test_differences_name_the_fields_that_decide():
    mine = Config()
    theirs = mine.with_overrides({"train.seed": 1, "data.workers": 3, "train.log_every": 1})
    assert differences(mine, theirs) == ["train.seed: 0, not 1"]
    assert differences(mine, mine.with_overrides({"options.size": 3}))


def test_runtime_fields_can_be_given_to_another_configuration():
    config = load_recipe("digits")
    assert set(runtime(config)) == RUNTIME
    assert runtime(Config().with_overrides(runtime(config))) == runtime(config)
    assert not RUNTIME & set(non_default(config))


def parent_in(folder, config):
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(to_yaml(config))
    return folder


def test_what_a_run_starts_from_is_known_by_what_it_is(tmp_path):
    parent = with_fields(model__position="ape")
    here, there = parent_in(tmp_path / "a", parent), parent_in(tmp_path / "b" / "c", parent)
    ids = {
        start_id(str(here)),
        start_id(str(there)),
        start_id(f"@{run_id(parent)}"),
        start_id(f"runs/{run_name(parent)}"),
    }
    assert ids == {run_id(parent)}
    children = {run_id(with_fields(train__start_from=str(path))) for path in (here, there)}
    assert len(children | {run_id(Config())}) == 2
    other = parent_in(tmp_path / "other", with_fields(model__position="ape", train__seed=1))
    assert run_id(with_fields(train__start_from=str(other))) not in children


@pytest.mark.parametrize("start", [None, "", "timm:vit_tiny_patch16_224"])
def test_what_needs_no_folder(start):
    assert start_id(start) == (start or None)
    assert (run_id(with_fields(train__start_from=start)) == run_id(Config())) == (not start)


def test_a_file_of_weights_is_known_by_its_content(tmp_path):
    file, copy = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    file.write_bytes(b"weights"), copy.write_bytes(b"weights")
    assert start_id(str(file)) == start_id(str(copy))
    assert start_id(str(file)) == f"file:{hashlib.sha256(b'weights').hexdigest()}"
    file.write_bytes(b"others!!")
    assert start_id(str(file)) != start_id(str(copy))


def test_what_is_gone_is_known_if_it_was_stored(tmp_path):
    parent = with_fields(model__position="ape")
    folder = parent_in(tmp_path / "ape", parent)
    child = with_fields(train__start_from=str(folder))
    known = run_id(child)
    stored = parent_in(tmp_path / "child", child)
    (stored / CONFIG).write_text(to_yaml(child, start_id(str(folder))))
    (folder / CONFIG).unlink(), folder.rmdir()
    assert read_config(stored) == (child, run_id(parent))
    assert run_id(*read_config(stored)) == known
    assert run_id(child) != known
    moved = child.with_overrides({"train.start_from": str(tmp_path / "elsewhere" / "ape")})
    assert differences(child, *read_config(stored)) == []
    assert differences(moved, *read_config(stored)) == []
    other = child.with_overrides({"train.start_from": str(tmp_path / "others")})
    assert differences(other, *read_config(stored))
