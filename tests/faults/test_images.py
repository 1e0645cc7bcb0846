"""Images that are damaged, hostile or unusual: named and refused, or decoded correctly."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.boxes import one_image
from support.faults import pickled, refused
from support.images import dataset_of, encoded, open_folder, picture, write_folder, write_tar

from comrope.experiments.data.batches import Key
from comrope.experiments.data.images import CachedImages

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
RNG = np.random.default_rng(0)
COLOURS = Image.fromarray(RNG.integers(0, 255, (24, 30, 3), dtype=np.uint8))


def loaded(source, name: str, **options):
    """The item of a data set at the file of a name, with either answer to unreadable files."""
    (index,) = (i for i in range(len(source)) if name in source.name(i))
    return [dataset_of(source, skip=skip, **options)[Key(0, 0, index)] for skip in (False, True)]


# A PostScript file starts no program


@pytest.fixture
def ghostscript(tmp_path, monkeypatch) -> Path:
    """A program gs, and the file that it writes if it is started."""
    from PIL import EpsImagePlugin

    marker, program = tmp_path / "started", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho $@ >> {marker}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return marker


def in_folder(root: Path):
    return open_folder(write_folder(root, {"x.jpg": EPS}))[0]


def in_tar(root: Path):
    write_tar(root / "train.tar", {"cat/a.png": picture(), "dog/x.jpg": EPS})
    return open_folder(root, ["train"])[0]


def in_shard(root: Path):
    write_tar(root / "train.tar", {"a.png": picture(), "a.cls": b"0", "x.jpg": EPS, "x.cls": b"1"})
    return open_folder(root, ["train"], name="shards")[0]


def of_torchvision(root: Path):
    return open_folder(write_folder(root, {"x.jpg": EPS}), name="torch/image_folder")[0]


@pytest.mark.parametrize("kind", [in_folder, in_tar, in_shard, of_torchvision])
def test_postscript_starts_no_program(kind, ghostscript, tmp_path):
    (tmp_path / "data").mkdir()
    stopped, skipped = loaded(kind(tmp_path / "data"), "x")
    assert "x" in stopped.fatal
    assert (len(skipped.unreadable), skipped.fatal) == (1, None)
    assert not ghostscript.exists()


def test_postscript_in_coco_starts_no_program(ghostscript, tmp_path):
    source = one_image(tmp_path, EPS, 10, 10)
    with pytest.raises(ValueError, match="formats"):
        source.load(0)
    assert not ghostscript.exists()


COMMAND = (
    "train", "digits", "data.name=folder", "data.num_classes=2", "train.epochs=1",
    "train.batch_size=2", "data.workers=0", "--quiet",
)  # fmt: skip


def test_a_command_names_the_file_and_starts_no_program(ghostscript, tmp_path):
    root = write_folder(tmp_path / "data", {})
    (root / "train/dog/good.png").rename(root / "train/dog/x.jpg")
    (root / "train/dog/x.jpg").write_bytes(EPS)
    refused(root / "train/dog/x.jpg", *COMMAND, "--data", root, "--out", tmp_path / "out")
    assert not ghostscript.exists()


# Refused: no images, or not readable as such


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, bits: int = 8, colour: int = 0, data: bytes = b"") -> bytes:
    """A PNG with any header."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def pixels(kind: type, value: float) -> Image.Image:
    return Image.fromarray(np.full((4, 6), value, kind))


def tiff(bits: int, photometric: int, content: bytes, kind: int = 1) -> bytes:
    """A TIFF of 6 x 4 pixels, not compressed."""
    entries = [
        (256, 3, 6), (257, 3, 4), (258, 3, bits), (259, 3, 1), (262, 3, photometric),
        (273, 4, 8 + 2 + 10 * 12 + 4), (277, 3, 1), (278, 3, 4), (279, 4, len(content)),
        (339, 3, kind),
    ]  # fmt: skip
    table = b"".join(struct.pack("<HHII", tag, form, 1, value) for tag, form, value in entries)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + table + bytes(4) + content


NO_IMAGES: dict[str, bytes] = {
    "empty": b"",
    "text": b"this is no image",
    "zeros": bytes(5000),
    "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "a link of git lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "eps": EPS,
    "eps of dos": b"\xc5\xd0\xd3\xc6" + struct.pack("<II", 32, len(EPS)) + bytes(20) + EPS,
    "pdf": encoded(COLOURS, "PDF"),
    "ico": encoded(COLOURS, "ICO"),
    "tga": encoded(COLOURS, "TGA"),
    "pcx": encoded(COLOURS, "PCX"),
    "sgi": encoded(COLOURS, "SGI"),
    "icns": encoded(COLOURS.resize((32, 32)), "ICNS"),
    "dds": encoded(COLOURS, "DDS"),
    "jpeg 2000": encoded(COLOURS, "JPEG2000"),
    "xbm": b"#define im_width 8\n#define im_height 1\nstatic char im_bits[] = {\n0x00};\n",
    "half a png": half(encoded(COLOURS, "PNG")),
    "half a jpeg": half(encoded(COLOURS, "JPEG")),
    "half a progressive jpeg": half(encoded(COLOURS, "JPEG", progressive=True)),
    "half a webp": half(encoded(COLOURS, "WEBP")),
    "half a bmp": half(encoded(COLOURS, "BMP")),
    "half a gif": half(encoded(COLOURS, "GIF")),
    "half a ppm": half(encoded(COLOURS, "PPM")),
    "half a tiff": half(encoded(COLOURS, "TIFF")),
    "a damaged png": encoded(COLOURS, "PNG").replace(b"IDAT", b"IDAX"),
    "a png with wrong sums": encoded(COLOURS, "PNG")[:-20] + bytes(20),
    "a png without pixels": png(0, 8),
    "a gif without pixels": b"GIF89a" + bytes(7) + b",\0\0\0\0" + bytes(5) + b"\x02\0;",
    "a ppm without pixels": b"P6 0 5 255\n",
    "a ppm of negative size": b"P5 -4 4 255\n" + bytes(16),
    "a bmp of negative width": encoded(COLOURS, "BMP")[:18]
    + struct.pack("<i", -30)
    + encoded(COLOURS, "BMP")[22:],
    "144 megapixels": png(12_000, 12_000),
    "90 megapixels": png(9_000, 10_000),
    "900 megapixels": png(30_000, 30_000),
    "2^62 pixels": png(2**31 - 1, 2**31 - 1),
    "a gif of 4 gigapixels": b"GIF89a\xff\xff\xff\xff\0\0\0" + encoded(COLOURS, "GIF")[13:],
    "a ppm of 10^24 pixels": b"P5 1000000000000 1000000000000 255\n",
    "a line": png(1, 1001, data=bytes(2002)),
    "floating point": encoded(pixels(np.float32, 0.5), "TIFF"),
    "floating point in a ppm": encoded(pixels(np.float32, 0.5), "PPM"),
    "integers of 32 bits": encoded(pixels(np.int32, 40_000), "TIFF"),
    "signed integers of 16 bits": tiff(16, 1, np.full(24, 20_000, "<i2").tobytes(), kind=2),
    "12 bits": tiff(12, 1, bytes(36)),
    "16 bits, white is 0": tiff(16, 0, np.full(24, 40_000, "<u2").tobytes()),
}


@pytest.mark.parametrize("how", NO_IMAGES)
def test_a_file_that_is_no_image_is_named(how, tmp_path):
    root = write_folder(tmp_path, {"bad.png": NO_IMAGES[how]})
    (source,) = open_folder(root, ["train"])
    stopped, skipped = loaded(source, "bad.png")
    assert stopped.fatal.startswith(f"{root / 'train/dog/bad.png'}: ")
    assert "\n" not in stopped.fatal
    assert skipped.unreadable == [str(root / "train/dog/bad.png")]
    assert (skipped.fatal, skipped.target) == (None, 1)  # the next image
    assert loaded(CachedImages(source), "bad.png")[0].fatal == stopped.fatal


def test_a_pickle_is_not_read(tmp_path):
    root = write_folder(tmp_path, {"bad.png": pickled(tmp_path / "marker")})
    assert "bad.png" in loaded(open_folder(root, ["train"])[0], "bad.png")[0].fatal
    assert not (tmp_path / "marker").exists()


def to_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def sparse(path: Path) -> None:
    path.write_bytes(encoded(COLOURS, "WEBP"))
    os.truncate(path, 2**40)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to a pipe": lambda path: (os.mkfifo(path.with_name("p")), path.symlink_to("p")),
    "a socket": to_socket,
    "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to no device": lambda path: path.symlink_to("/dev/null"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a terabyte": sparse,
}


@pytest.mark.parametrize("how", NO_FILES)
def test_what_is_no_file_is_named_and_not_opened(how, tmp_path, monkeypatch):
    root = write_folder(tmp_path, {})
    monkeypatch.chdir(root / "train/dog")  # names of sockets are short
    NO_FILES[how](root / "train/dog/bad.png")
    stopped, skipped = loaded(open_folder(root, ["train"])[0], "bad.png")
    assert stopped.fatal.startswith(f"{root / 'train/dog/bad.png'}: ")
    assert skipped.unreadable == [str(root / "train/dog/bad.png")]


def test_a_large_image_causes_no_warning_without_a_name(tmp_path):
    """Warnings are errors in these tests, so a process of its own."""
    path = tmp_path / "large.png"
    path.write_bytes(png(10_000, 10_000))
    code = f"""
from comrope.experiments.data.pictures import decode
try:
    decode({str(path)!r}, "RGB")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "10,000 x 10,000" in done.stdout
    assert done.stderr == ""


def cuts(content: bytes) -> set[bytes]:
    """The pixels that are read from a file cut at every place."""
    found = set()
    for end in range(len(content)):
        with contextlib.suppress(Exception):
            found.add(decoded(content[:end]).tobytes())
    return found


def decoded(content: bytes, mode: str = "RGB", **options) -> Image.Image:
    from comrope.experiments.data.pictures import decode

    return decode(content, mode, **options)


SMALL = COLOURS.crop((0, 0, 12, 9))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}),
        ("WEBP", {"lossless": True}), ("BMP", {}), ("GIF", {}), ("PPM", {}), ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}), ("MPO", {"save_all": True}),
    ],
)  # fmt: skip
def test_no_cut_changes_pixels(form, options, capfd):
    """What is missing at the end may be needed for nothing; otherwise an image is refused."""
    content = encoded(SMALL, form, **options)
    assert cuts(content) <= {decoded(content).tobytes()}
    capfd.readouterr()  # libraries in C write there


# Accepted: unusual, and decoded correctly

DEEP = np.full((4, 6), 40_000, np.uint16)  # 40000 / 257 = 155.6
PALETTE = SMALL.convert("P")
PALETTE.info["transparency"] = bytes(range(250))
GREY: dict[str, tuple[bytes, int]] = {
    "16 bits, png": (encoded(Image.fromarray(DEEP)), 156),
    "16 bits, tiff": (tiff(16, 1, DEEP.astype("<u2").tobytes()), 156),
    "16 bits, tiff, compressed": (
        encoded(Image.fromarray(DEEP), "TIFF", compression="tiff_lzw"),
        156,
    ),
    "16 bits, tiff, high byte first": (
        encoded(Image.frombytes("I;16B", (6, 4), DEEP.astype(">u2").tobytes()), "TIFF"),
        156,
    ),
    "16 bits, pgm": (b"P5 6 4 65535\n" + DEEP.astype(">u2").tobytes(), 156),
    "16 bits, pgm in digits": (b"P2 6 4 65535\n" + b"40000 " * 24, 156),
    "12 bits, pgm": (b"P5 6 4 4095\n" + np.full(24, 2500, ">u2").tobytes(), 156),
    "16 bits, colours": (b"P6 6 4 65535\n" + np.full(72, 40_000, ">u2").tobytes(), 156),
    "16 bits, white": (encoded(Image.fromarray(np.full((4, 6), 65_535, np.uint16))), 255),
    "16 bits, almost black": (encoded(Image.fromarray(np.full((4, 6), 128, np.uint16))), 0),
    "1 bit": (encoded(Image.new("1", (6, 4), 1)), 255),
    "grey and alpha": (encoded(Image.new("LA", (6, 4), (77, 0))), 77),
    "colours and alpha": (encoded(Image.new("RGBA", (6, 4), (77, 77, 77, 3))), 77),
    "four inks": (encoded(Image.new("CMYK", (6, 4), (0, 0, 0, 155)), "TIFF"), 100),
    "black on white": (tiff(8, 0, bytes([100] * 24)), 155),
    "frames": (picture(9, "gif", (6, 4), save_all=True, append_images=[Image.new("L", (6, 4))]), 9),
    "pages": (picture(9, "tiff", (6, 4), save_all=True, append_images=[Image.new("L", (6, 4))]), 9),
    "pictures of a camera": (
        picture(9, "mpo", (6, 4), save_all=True, append_images=[Image.new("L", (6, 4))]), 9
    ),
    "much after its end": (picture(9, "png", (6, 4)) + bytes(10_000), 9),
    "a long line": (png(1, 1000, data=b"\0\x09" * 1000), 9),
}  # fmt: skip


@pytest.mark.parametrize("how", GREY)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_an_unusual_image_is_decoded(how, mode, tmp_path):
    content, grey = GREY[how]
    root = write_folder(tmp_path, {"a.png": content})
    (source,) = open_folder(root, ["train"], mode=mode)
    (index,) = (i for i in range(len(source)) if source.name(i).endswith("a.png"))
    image, target = source.load(index)
    assert (image.mode, target) == (mode, 1)
    found = np.asarray(image)
    assert found.min() == found.max() == grey


def test_transparent_colours_cause_no_warning():
    content = encoded(PALETTE, transparency=bytes(range(250)))
    expected = SMALL.convert("P").convert("RGB")
    assert decoded(content).tobytes() == expected.tobytes()
