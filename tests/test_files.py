"""Files are written atomically."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from comrope import _files
from comrope.experiments.common import files as for_users
from comrope.experiments.common.errors import UserError


def full_disk(path: Path) -> None:
    path.write_bytes(b"half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_text_and_the_folder_that_it_is_in(tmp_path):
    path = tmp_path / "new" / "a.txt"
    _files.write_text(path, "ρ\n")
    assert path.read_bytes() == "ρ\n".encode()
    assert _files.sha256_of(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    _files.write_text(path, "again")
    assert path.read_text() == "again"
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"]


def test_no_file_is_replaced_if_one_fails(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("old")
    with pytest.raises(OSError, match="second"):
        _files.write_files({first: lambda path: path.write_text("new"), second: full_disk})
    assert first.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["first"]


def test_nothing_is_left_after_an_interrupt(tmp_path):
    def interrupted(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _files.write_files({tmp_path / "a": interrupted})
    assert list(tmp_path.iterdir()) == []


def test_errors_of_safetensors_and_of_folders_are_os_errors(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot be written"):
        _files.write_text(tmp_path / "file" / "below", "text")
    path = tmp_path / "weights"
    with pytest.raises(OSError, match="cannot be written"):
        _files.write_files({path: lambda _: save_file({"a": torch.ones(1)}, tmp_path / "no" / "f")})
    assert not path.exists()


def test_a_folder_is_committed_in_one_piece(tmp_path):
    for number in (1, 2):  # the second replaces the first
        temporary = tmp_path / ".writing"
        temporary.mkdir()
        (temporary / f"part-{number}").write_text("x")
        _files.commit_directory(temporary, tmp_path / "final")
        assert [file.name for file in tmp_path.iterdir()] == ["final"]
        assert [file.name for file in (tmp_path / "final").iterdir()] == [f"part-{number}"]


def test_failed_tensors_leave_no_temporary_file(tmp_path, monkeypatch):
    path, tensors = tmp_path / "model.safetensors", {"w": torch.ones(3, 2).mT}
    for_users.write_tensors(path, tensors)
    assert torch.equal(load_file(path)["w"], tensors["w"])
    monkeypatch.setattr(for_users, "save_file", lambda tensors, path: full_disk(path))
    with pytest.raises(UserError, match=r"model\.safetensors"):
        for_users.write_tensors(path, {"w": torch.zeros(1)})
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(path)["w"], tensors["w"])
