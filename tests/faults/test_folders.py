"""Image folders: links in a circle, classes that make no sense, unusual names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.faults import raises_line
from support.images import config_for, open_folder, picture, write_folder

from comrope.experiments.common.errors import UserError
from comrope.experiments.runs.directory import read_result
from comrope.experiments.training.train import train
from comrope.experiments.training.verify import verify_run

# Links


def link(root: Path, name: str, target: object) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


LOOPS: dict[str, Callable[[Path], list[Path]]] = {
    "the folder of a class": lambda root: [link(root, "train/cat/loop", ".")],
    "the split": lambda root: [link(root, "train/cat/loop", root / "train")],
    "the data set": lambda root: [link(root, "train/cat/loop", root)],
    "the file system": lambda root: [link(root, "train/cat/loop", "/")],
    "deep": lambda root: [link(root, "train/cat/a/b/c/d/loop", "../../../..")],
    "through a link": lambda root: [
        link(root, "train/cat/a", root / "pool"), link(root, "pool/back", root / "train")
    ],
    "two in a circle": lambda root: [
        link(root, "pool/x", root / "other"), link(root, "other/y", root / "pool"),
        link(root, "train/cat/a", root / "pool"),
    ],
    "two loops": lambda root: [
        link(root, "train/cat/one", root / "train"), link(root, "train/cat/two", root / "train")
    ],
}  # fmt: skip


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("name", ["folder", "torch/image_folder"])
def test_a_link_in_a_circle_is_named(how, name, tmp_path):
    root = write_folder(tmp_path / "data", {})
    links = LOOPS[how](root)
    with pytest.raises(UserError, match=r"^data\.root: .* is a link to ") as caught:
        open_folder(root, ["train"], name=name)
    assert any(path.name in str(caught.value) for path in links)


def test_links_that_multiply_are_refused(tmp_path):
    """Without a circle, but 2^30 folders."""
    root = write_folder(tmp_path / "data", {})
    for n in range(30):
        for side in "ab":
            link(root, f"pool/{n}/{side}", root / f"pool/{n + 1}")
    (root / "pool/30").mkdir()
    link(root, "train/cat/pool", root / "pool/0")
    with raises_line("data.root: ", "links"):
        open_folder(root, ["train"])


def test_other_links_are_followed(tmp_path):
    root = write_folder(tmp_path / "data", {})
    (root / "train/dog").rename(root / "dogs")
    link(root, "train/dog", "../dogs")
    link(root, "train/cat/more.png", root / "train/cat/good.png")
    link(root, "train/cat/again", root / "pool")
    (root / "pool").mkdir()
    (root / "train").rename(tmp_path / "elsewhere")
    (root / "dogs").rename(tmp_path / "dogs")
    link(root, "train", tmp_path / "elsewhere")
    (source,) = open_folder(root, ["train"])
    assert [target for _, target in map(source.load, range(len(source)))] == [0, 0, 1]


# Folders

FOLDERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "an image outside of classes": (
        "x.png", lambda root: (root / "train/x.png").write_bytes(picture())
    ),
    "an empty class": ("'emu'", lambda root: (root / "train/emu").mkdir()),
    "a class of other files": (
        "'emu'", lambda root: ((root / "train/emu").mkdir(), (root / "train/emu/a.txt").touch())
    ),
    "a class in validation only": ("emu", lambda root: (root / "val/cat").rename(root / "val/emu")),
    "a file for a split": (
        "train", lambda root: ((root / "train").rename(root / "t"), (root / "train").touch())
    ),
    "a split without images": (
        "train", lambda root: ((root / "train").rename(root / "t"), (root / "train").mkdir())
    ),
    "no splits": ("'train'", lambda root: (root / "train").rename(root / "t")),
}  # fmt: skip


@pytest.mark.parametrize("how", FOLDERS)
def test_a_folder_that_makes_no_sense_is_named(how, tmp_path):
    root = write_folder(tmp_path, {})
    named, change = FOLDERS[how]
    change(root)
    with raises_line("data.root: ", named):
        open_folder(root)


NAMES = ("²", "1²1", "٣", "a\nb", "a b", "\udcff", "9" * 200, "A", "a", "01", "1", "-", "x.png.y")


def test_any_name_is_read_in_one_order(tmp_path):
    root = write_folder(tmp_path, {f"{name}.png": picture(n) for n, name in enumerate(NAMES)})
    (source,) = open_folder(root, ["train"])
    names = [Path(path).name for path in source.names][1:]
    assert set(names) == {f"{name}.png" for name in NAMES} | {"good.png"}
    assert names.index("01.png") + 1 == names.index("1.png") < names.index(f"{'9' * 200}.png")
    for name, grey in zip(NAMES, range(len(NAMES)), strict=True):
        image, _ = source.load(1 + names.index(f"{name}.png"))
        assert np.unique(np.asarray(image)) == grey


def test_classes_that_differ_in_case_only_have_one_order(tmp_path):
    """A set of texts has another order in every process."""
    root = write_folder(tmp_path, {})
    for name in ("Cat", "CAT", "cAT"):
        (root / "train" / name).mkdir()
        (root / "train" / name / "a.png").write_bytes(picture())
    (source,) = open_folder(root, ["train"], num_classes=5)
    found = {Path(source.name(i)).parent.name: source.load(i)[1] for i in range(len(source))}
    assert found == {"CAT": 0, "Cat": 1, "cAT": 2, "cat": 3, "dog": 4}


def test_names_of_classes_that_are_no_text_are_stored_as_escapes(tmp_path):
    """As of archives from systems without UTF-8; a result that has them could not be read."""
    root = write_folder(tmp_path / "data", {})
    for split in ("train", "val"):
        (root / split / "cat").rename(root / split / os.fsdecode(b"caf\xe9"))
    fields = {"train__epochs": 1, "train__batch_size": 2, "evaluate__every": 0}
    train(config_for(root, data__name="folder", **fields), tmp_path / "run", progress=False)
    assert read_result(tmp_path / "run")["classes"] == ["'caf\\udce9'", "dog"]
    verify_run(tmp_path / "run")
