"""Tars and shards that are damaged, cut off or hostile: one line, or all of their images."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.faults import pickled, raises_line, refused
from support.images import dataset_of, make_folder, open_folder, picture, tar_of, write_tar
from support.tars import END, GOOD, header, padded, pax, raw, tar, tar_with

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.batches import Key
from comrope.experiments.data.shards import _index


def read_as_shard(path: Path) -> list[tuple[str, list[int]]]:
    keys, places = _index(path)
    return list(zip(keys, places.tolist(), strict=True))


def read_as_folder(path: Path) -> list[tuple[str, bytes, int]]:
    (source,) = open_folder(path.parent, [path.stem])
    found = []
    for index in range(len(source)):
        image, target = source.load(index)
        found.append((Path(source.name(index)).name, image.tobytes(), target))
    return found


READERS = pytest.mark.parametrize("read", [read_as_shard, read_as_folder])


WHOLE = tar()
DATA = len(WHOLE.rstrip(b"\0")) // 512 * 512 + 512  # bytes before the end marker
with tarfile.open(fileobj=io.BytesIO(WHOLE)) as opened:
    PLACE = {member.name: member for member in opened}


def with_bytes(place: int, content: bytes) -> bytes:
    return WHOLE[:place] + content + WHOLE[place + len(content) :]


def compressed(name: str) -> bytes:
    file = io.BytesIO()
    if name == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("cat/a.png", picture())
        return file.getvalue()
    return {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}[name](WHOLE)


# Damaged: the content of an archive, and what the line names besides it

DAMAGED: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "empty"),
    "one byte": (b"\0", ""),
    "text": (b"not a tar\n" * 1000, ""),
    "an error page": (b"<!DOCTYPE html>".ljust(2048), ""),
    "gzip": (compressed("gzip"), "gzip"),
    "bzip2": (compressed("bzip2"), "bzip2"),
    "xz": (compressed("xz"), "xz"),
    "zip": (compressed("zip"), "zip"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(5000), "zstd"),
    "no members": (tar({}), ""),
    "zeros": (bytes(10_240), ""),
    "one block of zeros": (bytes(512), ""),
    "no end": (WHOLE[:DATA], ""),
    "half an end": (WHOLE[: DATA + 512], ""),
    "cut in a member": (WHOLE[: PLACE["dog/b.png"].offset_data + 20], ""),
    "cut behind a member": (WHOLE[: PLACE["dog/b.png"].offset], ""),
    "cut in a header": (WHOLE[: PLACE["dog/b.png"].offset + 100], ""),
    "cut in the zeros": (WHOLE[:-1], ""),
    "a damaged first header": (with_bytes(10, b"\xff"), ""),
    "a damaged header": (with_bytes(PLACE["dog/b.png"].offset + 10, b"\xff"), ""),
    "a damaged sum": (with_bytes(PLACE["dog/b.png"].offset + 148, b"9"), ""),
    "a header of zeros": (with_bytes(PLACE["dog/b.png"].offset, bytes(512)), ""),
    "a hole in the download": (WHOLE[: PLACE["dog/b.png"].offset] + bytes(2_048_000), ""),
    "a damaged end": (with_bytes(DATA + 700, b"\1"), ""),
    "two tars one after the other": (WHOLE + WHOLE, ""),
    "text after the end": (WHOLE + b"x" * 512, ""),
    "too few bytes": (WHOLE + b"x", ""),
    "a terabyte in a header": (padded(raw("cat/a.png", size=2**40, base=256)), "cat/a.png"),
    "2^80 bytes in a header": (padded(raw("cat/a.png", size=2**80, base=256)), "cat/a.png"),
    "a negative size": (padded(raw("cat/a.png", size=-512, base=256)), ""),
    "a size of -1024, back to itself": (padded(raw("cat/a.png", size=-1024, base=256)), ""),
    "a size in words": (padded(raw("cat/a.png")[:124] + b"big".ljust(12) + bytes(376)), ""),
    "a member beyond the end": (padded(raw("cat/a.png", size=3000), b"x" * 512), "cat/a.png"),
    "a negative size in pax": (padded(pax(size=-1024), raw("cat/a.png")), ""),
    "a terabyte in pax": (padded(pax(size=2**40), raw("cat/a.png")), "cat/a.png"),
    "a size in words in pax": (
        padded(pax(size="big"), raw("cat/a.png", size=9), b"x" * 9), ""
    ),
    "a real size that is not there": (
        padded(pax(GNU__sparse__realsize=5000), raw("cat/a.png", size=9), b"x" * 9), ""
    ),
    "a long name of a terabyte": (padded(raw("x", size=2**40, base=256, kind=b"L")), ""),
    "a long name of negative size": (padded(raw("x", size=-1, base=256, kind=b"L")), ""),
    "a long name of 100 kB": (
        padded(raw("x", size=100_000, kind=b"L"), b"n" * 100_000, raw("cat/a.png")), ""
    ),
    "a long name of nothing": (padded(raw("x", size=9, kind=b"L"), b"cat/a.png"), ""),
    "10,000 long names": (padded(*[raw("x", size=1, kind=b"L"), b"x"] * 10_000), ""),
    "fields of pax that lie": (padded(raw("x", size=20, kind=b"x"), b"99 path=a\n"), ""),
    "fields of pax of no length": (
        padded(raw("x", size=20, kind=b"x"), b"0 path=a\n", raw("cat/a.png")), ""
    ),
    "a sparse member": (padded(raw("cat/a.png", size=512, kind=b"S"), bytes(512)), ""),
    "a sparse member that never ends": (
        padded(raw("cat/a.png", kind=b"S")[:482] + b"\1" + bytes(29)), ""
    ),
    "a sparse member of pax": (
        padded(
            pax(GNU__sparse__map="0,9", GNU__sparse__size=9, GNU__sparse__numblocks=1),
            raw("cat/a.png", size=9), b"x" * 9,
        ), "sparse",
    ),
    "a link to nothing": (
        tar_with(*GOOD, header("dog/c.png", tarfile.LNKTYPE, linkname="x")), "dog/c.png"
    ),
    "a link to itself": (
        tar_with(*GOOD, header("dog/c.png", tarfile.LNKTYPE, linkname="dog/c.png")), "dog/c.png"
    ),
    "a symbolic link": (
        tar_with(*GOOD, header("dog/c.png", tarfile.SYMTYPE, linkname="b.png")), "dog/c.png"
    ),
    "a symbolic link to a folder": (
        tar_with(*GOOD, header("emu", tarfile.SYMTYPE, linkname="dog")), "emu"
    ),
    "a symbolic link to /etc/passwd": (
        tar_with(*GOOD, header("dog/c.png", tarfile.SYMTYPE, linkname="/etc/passwd")), "dog/c.png"
    ),
    "a device": (tar_with(*GOOD, header("dog/c.png", tarfile.CHRTYPE)), "dog/c.png"),
    "a pipe": (tar_with(*GOOD, header("dog/c.png", tarfile.FIFOTYPE)), "dog/c.png"),
    "a part of several tapes": (tar_with(*GOOD, header("dog/c.png", b"M")), "dog/c.png"),
    "one name twice": (tar_with(*GOOD, "dog/b.png"), "dog/b.png"),
    "one name twice, empty": (tar_with(*GOOD, "dog/b.png", contents={}), "dog/b.png"),
    "one name in two forms": (tar_with(*GOOD, header("./dog/b.png")), "dog/b.png"),
    "one unusual name twice": (tar_with("a\n\x1b[2J.png", "a\n\x1b[2J.png"), r"a\n\x1b[2J"),
    "another file twice": (tar_with(*GOOD, "notes.txt", "notes.txt"), "notes.txt"),
    "a name of 5,000 digits": (
        tar({**GOOD, f"dog/{'9' * 5000}.png": b"x"}, format=tarfile.PAX_FORMAT), ""
    ),
}  # fmt: skip


@READERS
@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_tar_is_named(how, read, tmp_path):
    content, named = DAMAGED[how]
    (tmp_path / "train.tar").write_bytes(content)
    with raises_line(tmp_path / "train.tar", named):
        read(tmp_path / "train.tar")


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    """A member and then a terabyte of nothing."""
    path.write_bytes(WHOLE[:DATA])
    os.truncate(path, 2**40)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": make_pipe,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte of zeros": huge,
    "a pickle": lambda path: path.write_bytes(pickled(path.with_name("marker"))),
}


@READERS
@pytest.mark.parametrize("how", NO_FILES)
def test_what_is_no_tar_is_named_and_not_opened(how, read, tmp_path):
    NO_FILES[how](tmp_path / "train.tar")
    with raises_line(tmp_path / "train.tar"):
        read(tmp_path / "train.tar")
    assert not (tmp_path / "marker").exists()


# Cut off at any place

CUTS = sorted({*range(0, len(WHOLE), 61), *(n + d for n in range(0, 10_240, 512) for d in (-1, 0))})


@READERS
def test_no_cut_is_accepted(read, tmp_path):
    """Only zeros after the end marker may be missing, in whole blocks: then the tar is complete."""
    path = tmp_path / "train.tar"
    path.write_bytes(WHOLE)
    expected = read(path)
    for cut in CUTS[1:]:
        path.write_bytes(WHOLE[:cut])
        if cut >= DATA + END and cut % 512 == 0:
            assert read(path) == expected
            continue
        with raises_line(path):
            read(path)


@pytest.mark.parametrize("step", [1, 512, 4096])
def test_no_cut_of_a_large_shard_is_accepted(step, tmp_path):
    """As in a download that stopped: 100 images of several sizes."""
    rng, path = random.Random(step), tmp_path / "train.tar"
    members = {}
    for number in range(100):
        members[f"{number}.png"] = rng.randbytes(rng.randrange(2000, 6000))
        members[f"{number}.cls"] = b"1"
    whole = write_tar(path, members).read_bytes()
    end = len(whole.rstrip(b"\0"))
    for _ in range(60):
        os.truncate(path, rng.randrange(0, end, step))
        with raises_line(path):
            read_as_shard(path)
        path.write_bytes(whole)


@READERS
def test_random_damage_is_named(read, tmp_path):
    """Or it is in an image, which is then unreadable, or in no place that matters."""
    rng, path = random.Random(0), tmp_path / "train.tar"
    for _ in range(300):
        content = bytearray(WHOLE[: DATA + END])
        for _ in range(rng.randrange(1, 20)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        if read is read_as_shard:
            said = outcome(lambda: read_as_shard(path))
        else:
            said = outcome(lambda: items_of_folder(tmp_path))
        assert said is None or str(path) in said or "data.num_classes" in said
        assert "\n" not in (said or "")


def outcome(function: Callable[[], object]) -> str | None:
    try:
        function()
    except UserError as error:
        return str(error)
    return None


def items_of_folder(root: Path) -> None:
    (source,) = open_folder(root, ["train"])
    for index in range(len(source)):
        dataset_of(source, skip=True)[Key(0, 0, index)]


# Complete, and unusual

LONG = "cat/" + "long-name-" * 20 + ".png"
FORMS = {
    "ustar": (tarfile.USTAR_FORMAT, {}), "gnu": (tarfile.GNU_FORMAT, {LONG: picture(3)}),
    "pax": (tarfile.PAX_FORMAT, {LONG: picture(3), "dog/ü.png": picture(4)}),
}  # fmt: skip


@READERS
@pytest.mark.parametrize("how", FORMS)
def test_forms_of_tars_and_long_names_are_read(how, read, tmp_path):
    form, more = FORMS[how]
    members = {**GOOD, **more}
    (tmp_path / "train.tar").write_bytes(tar(members, format=form))
    found = {Path(name).name.partition(".")[0] for name, *_ in read(tmp_path / "train.tar")}
    assert found == {Path(name).name.partition(".")[0] for name in members}


COMPLETE: dict[str, bytes] = {
    "only the end marker": WHOLE[: DATA + END],
    "many zeros": WHOLE + bytes(102_400),
    "folders": tar_with(header("cat", tarfile.DIRTYPE), header("cat", tarfile.DIRTYPE), *GOOD),
    "a label": tar_with(header("label", b"V"), *GOOD),
    "other files": tar_with(*GOOD, "notes.txt", "cat/a.json"),
    "a global header": tar(format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}),
}


@READERS
@pytest.mark.parametrize("how", COMPLETE)
def test_complete_tars_are_read(how, read, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.tar").write_bytes(WHOLE)
    (tmp_path / "train.tar").write_bytes(COMPLETE[how])
    found, expected = read(tmp_path / "train.tar"), read(tmp_path / "a" / "train.tar")
    assert [one[0] for one in found] == [one[0] for one in expected]
    if read is read_as_folder:
        assert found == expected


@READERS
def test_hard_links_are_files(read, tmp_path):
    linked = header("dog/c.png", tarfile.LNKTYPE, linkname="cat/a.png")
    (tmp_path / "train.tar").write_bytes(tar_with(*GOOD, linked))
    found = read(tmp_path / "train.tar")
    if read is read_as_folder:
        assert found[-1] == (found[-1][0], found[0][1], 1)
        assert len(found) == 3
    else:
        places = dict(found)
        assert places["dog/c"][:2] == places["cat/a"][:2]


def test_tars_in_a_tar_are_classes(tmp_path):
    """As ImageNet is distributed."""
    inner = {f"{name}.tar": tar({f"{name}_1.png": picture(n)}) for n, name in enumerate("ab", 7)}
    (tmp_path / "train.tar").write_bytes(tar(inner))
    images = [(pixels[0], target) for _, pixels, target in read_as_folder(tmp_path / "train.tar")]
    assert images == [(7, 0), (8, 1)]
    for damaged in (b"", inner["b.tar"][:512], inner["b.tar"][:1024], b"text", tar({})[:512]):
        (tmp_path / "train.tar").write_bytes(tar({**inner, "b.tar": damaged}))
        with raises_line(tmp_path / "train.tar", "b.tar"):
            read_as_folder(tmp_path / "train.tar")


def test_an_image_outside_of_classes_is_named(tmp_path):
    for name in ("x.png", "./x.png", "/x.png"):
        (tmp_path / "train.tar").write_bytes(tar({**GOOD, name: picture()}))
        with raises_line(tmp_path / "train.tar", "x.png"):
            read_as_folder(tmp_path / "train.tar")


def test_an_unreadable_image_of_a_tar_is_named(tmp_path):
    write_tar(tmp_path / "train.tar", {**GOOD, "dog/bad.png": picture()[:50]})
    (source,) = open_folder(tmp_path, ["train"])
    (bad,) = (i for i in range(len(source)) if source.name(i).endswith("bad.png"))
    item = dataset_of(source)[Key(0, 0, bad)]
    assert item.fatal.startswith(f"{tmp_path / 'train.tar'}: dog/bad.png: ")


def test_a_command_names_a_damaged_tar(tmp_path):
    tar_of(make_folder(tmp_path / "folder"), tmp_path)
    os.truncate(tmp_path / "train.tar", 5120)
    refused(
        tmp_path / "train.tar", "train", "digits", "data.name=folder", "data.num_classes=2",
        "data.in_chans=3", "data.mean=.4,.4,.4", "data.std=.3,.3,.3", "--data", tmp_path,
        "--out", tmp_path / "out", "--quiet",
    )  # fmt: skip


def test_pixels_of_a_tar_are_those_of_its_folder(tmp_path):
    folder = make_folder(tmp_path / "folder")
    tar_of(folder, tmp_path)
    (found,), (expected,) = open_folder(tmp_path, ["val"]), open_folder(folder, ["val"])
    for index in range(len(expected)):
        assert np.array_equal(found.load(index)[0], expected.load(index)[0])
