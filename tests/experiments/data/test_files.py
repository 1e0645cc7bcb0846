"""Files and folders of data sets: sizes, and links to folders."""

from __future__ import annotations

import os

import pytest

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.files import MAX_BYTES, check_bytes, check_links, file_size, walk


def test_only_files_have_a_size(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError, match="no such file"):
        file_size(path)
    path.write_bytes(b"123")
    (tmp_path / "link").symlink_to(path)
    assert file_size(path) == file_size(str(tmp_path / "link")) == 3
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ValueError, match="not a file"):
            file_size(other)


def test_images_have_some_bytes_but_not_too_many():
    check_bytes(1)
    check_bytes(MAX_BYTES)
    for size in (0, MAX_BYTES + 1):
        with pytest.raises(ValueError, match=r"file|bytes"):
            check_bytes(size)


def test_every_folder_is_visited_once_per_way_to_it(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "nothing").symlink_to("nowhere")
    found = {os.path.relpath(top, tmp_path): rest for top, *rest in walk(str(tmp_path))}
    assert sorted(found) == [".", "a", "a/b", "link", "link/b"]
    assert found["a/b"] == found["link/b"] == [[], ["file"]]
    assert (sorted(found["."][0]), found["."][1]) == (["a", "link"], ["nothing"])
    check_links(str(tmp_path))
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"^data\.root: .*up is a link"):
        check_links(str(tmp_path))


def test_a_folder_may_begin_like_another(tmp_path):
    """/x/train-more is not in /x/train."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train-more").mkdir()
    (tmp_path / "train" / "more").symlink_to(tmp_path / "train-more")
    (tmp_path / "train-more" / "a").mkdir()
    assert len(list(walk(str(tmp_path / "train")))) == 3


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    """Its images would be missing."""
    (tmp_path / "secret").mkdir()
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("secret"):
            raise PermissionError("not allowed")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"^data\.root: .*secret cannot be read"):
        check_links(str(tmp_path))
