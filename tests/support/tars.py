"""Tars of any headers, complete or not."""

from __future__ import annotations

import io
import tarfile

from support.images import picture

END = 1024  # bytes of the end marker
GOOD = {"cat/a.png": picture(1), "cat/a.cls": b"0", "dog/b.png": picture(2), "dog/b.cls": b"1"}


def tar(members: dict[str, bytes] = GOOD, **options) -> bytes:
    """A tar of some members; options are of ``tarfile.open``."""
    return tar_with(*members, contents=members, **options)


def tar_with(*infos: tarfile.TarInfo | str, contents=GOOD, **options) -> bytes:
    """A tar of some headers, or names of files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **options) as archive:
        for info in infos:
            info = tarfile.TarInfo(info) if isinstance(info, str) else info
            content = contents.get(info.name, b"")
            info.size = info.size or len(content)
            archive.addfile(info, io.BytesIO(content.ljust(info.size, b"\0")))
    return file.getvalue()


def header(name: str, kind: bytes = tarfile.REGTYPE, **values) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in values.items():
        setattr(info, field, value)
    return info


def raw(name: str, *, size: int = 0, kind: bytes = b"0", base: int = 8, **values) -> bytes:
    """One header of 512 bytes with any size, and its right sum."""
    block = bytearray(header(name, kind, **values).tobuf(tarfile.GNU_FORMAT))
    if base == 256:
        block[124:136] = (
            (size % 2**96).to_bytes(12, "big") if size < 0 else b"\x80" + (size.to_bytes(11, "big"))
        )
    else:
        block[124:136] = b"%011o\0" % size
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:512]))
    return bytes(block)


def pax(**fields: object) -> bytes:
    """A header of pax, for the member after it."""
    lines = b""
    for key, value in fields.items():
        line = f" {key.replace('__', '.')}={value}\n".encode()
        length = next(n for n in range(len(line), len(line) + 9) if n == len(line) + len(str(n)))
        lines += b"%d" % length + line
    return raw("pax", size=len(lines), kind=b"x") + lines.ljust(-(-len(lines) // 512) * 512, b"\0")


def padded(*parts: bytes) -> bytes:
    content = b"".join(part.ljust(-(-len(part) // 512) * 512, b"\0") for part in parts)
    return content + bytes(END)
