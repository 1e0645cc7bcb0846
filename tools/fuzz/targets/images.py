"""Image files: a fixed list of formats, and no other program."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zlib

import numpy as np
import timm.data  # before the reader is watched, because it loads libraries  # noqa: F401
from PIL import Image

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.batches import Key
from comrope.experiments.data.datasets import ImageDataset
from comrope.experiments.data.images import open_images
from fuzz.judge import require
from fuzz.samples import CLASSES, to_bytes
from fuzz.target import Target, mutate_bytes
from fuzz.tars import picture

__all__ = ["Fuzz"]

FORMATS = {"BMP", "DIB", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP"}
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
MOST_PIXELS = 2**24  # for which the oracle decodes a second time


class Fuzz(Target):
    suffix = ".img"
    errors = (UserError,)
    # Of Pillow: about data beside the pixels, and large images, which comrope refuses by name.
    tolerated = (UserWarning, Image.DecompressionBombWarning)

    def seeds(self) -> list[bytes]:
        kinds = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
        modes = [picture(1, "PNG", mode) for mode in ("L", "LA", "RGBA", "P", "1", "I;16")]
        tiffs = [picture(1, "TIFF", mode) for mode in ("CMYK", "I;16")]
        return [*(picture(1, kind) for kind in kinds), *modes, *tiffs, _rotated()]

    def examine(self, data: bytes) -> bool:
        folder = self.folder / "data" / "train" / "a"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "x.png"
        file.write_bytes(data)
        options = {"train_split": "train", "num_classes": 1}
        with self.watched():
            answer = self.ask(
                lambda: open_images("folder", str(folder.parents[1]), ["train"], **options), folder
            )
            if not answer.accepted:
                return False
            (source,) = answer.value
            item = ImageDataset(source, to_bytes, seed=0, num_classes=CLASSES)[Key(0, 0, 0)]
        if item.fatal is not None:
            require(str(file) in item.fatal, "an unreadable image without its file", item.fatal)
            require(item.fatal.isprintable(), "several lines for an image", item.fatal)
            return False
        kind, mode, pixels = _second_reader(data)
        require(kind in FORMATS, "silent: a format that is not in the list", kind)
        shape = tuple(item.image.shape)
        if pixels is not None:
            turned = (3, *shape[:0:-1])
            require((3, *pixels.shape[:2]) in (shape, turned), "silent: another size", shape)
        if mode is not None and mode.startswith("I;16") and pixels is not None:
            means = item.image.float().mean().item(), pixels.astype(np.float64).mean() / 257
            require(abs(means[0] - means[1]) < 1.5, "silent: 16 bits are clipped", means)
        return True

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.02:
            return POSTSCRIPT
        changed = mutate_bytes(data, rng)
        return _sum_again(changed) if data[:4] == b"\x89PNG" and rng.random() < 0.8 else changed


def _rotated() -> bytes:
    image, file = Image.new("RGB", (4, 8), (200, 0, 0)), io.BytesIO()
    about = Image.Exif()
    about[274] = 6
    image.save(file, "JPEG", exif=about)
    return file.getvalue()


def _second_reader(data: bytes) -> tuple[str | None, str | None, np.ndarray | None]:
    """Return format, mode and pixels of an image, with all formats of Pillow allowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                kind, mode, (width, height) = image.format, image.mode, image.size
                small = width * height <= MOST_PIXELS
                return kind, mode, np.array(image) if small else None
        except Exception:  # the reader may be more tolerant
            return None if not data else "PNG", None, None


def _sum_again(data: bytes) -> bytes:
    """Write valid checksums into the parts of a PNG."""
    content, place = bytearray(data), 8
    while place + 12 <= len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        last = place + 8 + length
        if last + 4 > len(content):
            break
        content[last : last + 4] = struct.pack(">I", zlib.crc32(content[place + 4 : last]))
        place = last + 4
    return bytes(content)
