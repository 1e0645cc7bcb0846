"""The only decoder of images: their formats, limits, depth and orientation."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# Without these imports, Pillow would import all of its plugins at the first WebP or TIFF.
from PIL import TiffImagePlugin as _tiff  # noqa: F401
from PIL import WebPImagePlugin as _webp  # noqa: F401

from comrope.experiments.data.files import check_bytes, file_size

__all__ = ["FORMATS", "SUFFIXES", "convert", "decode"]

# Pillow's formats, and the suffixes of their files. Others are not opened, whatever the name of a
# file: some start programs, such as EPS Ghostscript. JPEG includes MPO, which many cameras write.
FORMATS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "PPM": (".ppm", ".pgm"),
    "TIFF": (".tif", ".tiff"),
}
SUFFIXES = tuple(suffix for some in FORMATS.values() for suffix in some)
MAX_PIXELS = 2**30 // 12  # 89 million; Pillow warns of larger images, without their names
MAX_RATIO = 1000  # of the sides: evaluation enlarges the shorter one to the resolution
WIDE = (("I", "PNG"), ("I", "PPM"))  # modes and formats in which Pillow stores 16 bits in 32
BITS, PHOTOMETRIC = 258, 262  # tags of TIFF

# Pillow's warnings name no file. Too many pixels are refused below; other warnings are of fields
# that do not change pixels, such as damaged EXIF data.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


def decode(file: str | Path | bytes | Any, mode: str, *, exif: bool = False) -> Image.Image:
    """Decode an image.

    Of several pages or frames, the first is decoded.

    Args:
        file: The path of a file, its content, or an open binary file.
        mode: Pillow's name of the channels, "RGB" or "L".
        exif: Whether the orientation in its EXIF data is applied.

    Raises:
        ValueError: It is no file, too large, or in no format that is accepted. Pillow raises other
            errors for damaged images, OSError if they are cut off.
    """
    if isinstance(file, (str, Path)):
        check_bytes(file_size(file))
        with open(file, "rb") as opened:
            return decode(opened, mode, exif=exif)
    if isinstance(file, bytes):
        check_bytes(len(file))
        file = io.BytesIO(file)
    try:
        with Image.open(file, formats=(*FORMATS,)) as image:
            _check_size(*image.size)
            return convert(image, mode, exif=exif)
    except UnidentifiedImageError:
        raise ValueError(f"expected an image in one of the formats {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"expected at most {MAX_PIXELS:,} pixels ({error})") from None


def convert(image: Image.Image, mode: str, *, exif: bool = False) -> Image.Image:
    """Return an image in one of the modes "RGB" and "L", with 8 bits per channel.

    Grey values of 16 bits are divided by 257, so that 0 and 65535 become 0 and 255. (Pillow divides
    channels of 16 bits by 256, and would clip such grey values.)

    Args:
        image: The image.
        mode: Pillow's name of the channels, "RGB" or "L".
        exif: Whether the orientation in its EXIF data is applied. A TIFF has its orientation in a
            tag of its own, which Pillow always applies.

    Raises:
        ValueError: The range of its values is unknown, or its EXIF data is damaged.
    """
    if exif:
        _orient(image)
    if image.mode[0] in "IF":
        image = _eight_bits(image)
    image.info.pop("transparency", None)  # otherwise Pillow may warn that the mode has none
    return image.convert(mode)


def _orient(image: Image.Image) -> None:
    image.load()
    try:
        # Again, since Pillow ignores an error in the EXIF data when it opens a JPEG.
        Image.Exif().load(image.info.get("exif", b""))
        ImageOps.exif_transpose(image, in_place=True)
    except Exception as error:
        raise ValueError(
            f"its EXIF data is damaged ({error}); data.exif_orientation=false ignores it"
        ) from None


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits per pixel as one of 8."""
    tags = getattr(image, "tag_v2", {})  # of TIFF
    known = tags.get(BITS, (16,)) == (16,) and tags.get(PHOTOMETRIC, 1) == 1  # white is 65535
    known &= image.mode.startswith("I;16") or (image.mode, image.format) in WIDE
    if not known:
        raise ValueError(
            f"expected 8 or 16 bits per channel, 0 for black, got Pillow's mode {image.mode}, a "
            "range that is unknown; store the image as PNG"
        )
    pixels = np.asarray(image).astype(np.uint32)  # (H, W)
    return Image.fromarray(((pixels + 128) // 257).astype(np.uint8))


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"expected at most {MAX_PIXELS:,} pixels, got {width:,} x {height:,}")
    if not width * height or max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(
            f"expected sides of a ratio up to {MAX_RATIO:,}, got {width:,} x {height:,}"
        )
