"""Small archives, and changes of their members."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Sequence

from PIL import Image

from fuzz.target import mutate_bytes

__all__ = ["IMAGES", "archive", "mutate_archive", "picture"]

BLOCK = 512
# Start, length and hostile values of the fields of a header.
FIELDS = {
    (0, 100): (b"cat/0.png", b"../x.png", b"/x.png", b"a.png\xff", b"\xc3\xa9.png", b".png"),
    (100, 8): (b"0000000", b"-1", b"x"),
    (124, 12): (b"0", b"7" * 11, b"-1", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"00000000777", b""),
    (156, 1): (b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"x", b"g", b"L", b"K", b"S", b"V", b"\0"),
    (157, 100): (b"0.png", b"/etc/passwd", b"..", b"cat/0.png"),
    (257, 6): (b"ustar\0", b"ustar ", b"\0" * 6),
    (345, 155): (b"cat", b"/", b"..", b"x" * 155),
}  # fmt: skip
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")


def picture(number: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Return a small image file."""
    file = io.BytesIO()
    size, color = (4 + number, 5), (9, 50 * number, 7, 255)
    bands = {"RGB": 3, "LA": 2, "CMYK": 4, "RGBA": 4}.get(mode, 1)
    Image.new(mode, size, color[:bands] if bands > 1 else 50 * number).save(file, kind)
    return file.getvalue()


def archive(members: Sequence[tuple[str, bytes | None]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """Return an archive of names and contents; None is a folder. Its end has two blocks."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            info.size = len(content or b"")
            tar.addfile(info, io.BytesIO(content or b""))
        length = tar.offset
    return file.getvalue()[: length + 2 * BLOCK]


def mutate_archive(data: bytes, rng: random.Random) -> bytes:
    """Return an archive with one changed block or header; most headers get a valid checksum."""
    blocks = [data[place : place + BLOCK] for place in range(0, len(data), BLOCK)]
    headers = [
        place
        for place, block in enumerate(blocks)
        if block[257:262] == b"ustar" and len(block) == BLOCK
    ]
    kind = rng.random()
    if not blocks or kind < 0.15:
        return mutate_bytes(data, rng)
    place = rng.randrange(len(blocks))
    if kind < 0.3:
        return b"".join(blocks[:place])
    if kind < 0.4:
        del blocks[place]
    elif kind < 0.5:
        blocks.insert(rng.randrange(len(blocks) + 1), blocks[place])
    elif kind < 0.55:
        blocks.insert(place, bytes(BLOCK))
    elif headers:
        place = rng.choice(headers)
        blocks[place] = _change_header(blocks[place], rng)
    return b"".join(blocks)


def _change_header(block: bytes, rng: random.Random) -> bytes:
    (first, length), values = rng.choice(list(FIELDS.items()))
    content = bytearray(block)
    if rng.random() < 0.7:
        content[first : first + length] = rng.choice(values)[:length].ljust(length, b"\0")
    else:
        content[first + rng.randrange(length)] = rng.choice((0, 32, 48, 55, 57, 65, 128, 255))
    if rng.random() < 0.9:
        content[148:156] = b" " * 8
        content[148:156] = b"%06o\0 " % sum(content)
    return bytes(content)
