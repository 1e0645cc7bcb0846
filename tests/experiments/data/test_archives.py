"""Members of tars by place. tests/faults has what is damaged."""

from __future__ import annotations

import io
import tarfile

import pytest
from support.images import write_tar

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.archives import Member, read_members, read_part

FILES = {"b/2.PNG": b"two", "a.txt": b"text", "./a/1.png": b"one!", "c.png.gz": b"?"}


def test_members_are_in_their_order_and_at_their_places(tmp_path):
    path = write_tar(tmp_path / "a.tar", FILES)
    found = read_members(path, (".png",))
    assert [member.name for member in found] == ["b/2.PNG", "./a/1.png"]
    with path.open("rb") as file:
        assert [read_part(file, *member[1:]) for member in found] == [b"two", b"one!"]
    with tarfile.open(path) as archive:
        expected = [(m.name, m.offset_data, m.size) for m in archive]
    assert read_members(path, ("",)) == [Member(*values) for values in expected]


def test_a_tar_in_a_tar_has_places_in_the_outer_one(tmp_path):
    inner = write_tar(tmp_path / "inner.tar", FILES).read_bytes()
    outer = write_tar(tmp_path / "outer.tar", {"x": b"x" * 700, "inner.tar": inner, "y": b"y"})
    (within,) = read_members(outer, (".tar",))
    with outer.open("rb") as file:
        parts = [read_part(file, *m[1:]) for m in read_members(outer, (".png",), within)]
    assert parts == [b"two", b"one!"]


def test_a_part_is_complete_or_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    with file.open("rb") as opened:
        assert read_part(opened, 1, 3) == b"234"
        for start, size in ((1, 5), (9, 1), (0, 0), (0, 2**40)):
            with pytest.raises(ValueError, match=r"file|bytes"):
                read_part(opened, start, size)


def test_an_archive_is_named_with_the_argument(tmp_path):
    content = io.BytesIO(b"x" * 2000)
    (tmp_path / "a.tar").write_bytes(content.getvalue())
    with pytest.raises(UserError, match=r"^data\.root: .*a\.tar: "):
        read_members(tmp_path / "a.tar", (".png",))
