"""Members of tars, read by place. Damaged tars are refused, not read as far as possible."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from comrope._checks import name_shown as shown
from comrope.experiments.common.errors import UserError
from comrope.experiments.data.files import check_bytes, file_size

__all__ = ["Member", "read_members", "read_part"]

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)  # after the last member
MAX_PADDING = 2**20  # bytes after the end marker
MAX_HEADER = 2**16  # bytes of a header's fields
MAX_NAME = 4096  # characters, as in a file system
AGAIN = "write or download it again"
COMPRESSED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip", b"7z\xbc\xaf": "7z", b"Rar!": "rar",
}  # fmt: skip


class Member(NamedTuple):
    """A file in a tar."""

    name: str
    start: int  # place of its first byte in the tar
    size: int  # in bytes


class _Headers(io.BufferedReader):
    """A tar whose headers are read; the sizes in them are checked before that much is read."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes, expected at most {MAX_HEADER}")
        return super().read(size)


def read_members(
    path: Path, suffixes: tuple[str, ...], within: Member | None = None
) -> list[Member]:
    """Return the files in a tar whose names have one of some suffixes, in their order.

    Hard links are files. Symbolic links are refused, since their files may not be in the tar.

    Args:
        path: The tar, not compressed.
        suffixes: Endings of names, in small letters.
        within: The member to read, which is a tar itself.

    Raises:
        UserError: It is no tar, is cut off or damaged, or two files have one name.
    """
    where = f"data.root: {path}" + (f": {shown(within.name)}" if within else "")
    try:
        start, end = 0, file_size(path)
        if within is not None:
            start, end = within.start, within.start + within.size
        with _Headers(io.FileIO(path)) as file:
            file.seek(start)
            _check_kind(file.read(len(END)), where)
            file.seek(start)
            found = _members(file, end, suffixes, where)
    except UserError:
        raise
    except Exception as error:  # of a damaged header, tarfile raises more than its own errors
        raise UserError(f"{where}: is no tar, or is damaged ({error}); {AGAIN}") from None
    return [member for member in found if member.name.lower().endswith(suffixes)]


def _members(file: _Headers, end: int, suffixes: tuple[str, ...], where: str) -> Iterable[Member]:
    """Return all files in a tar from the current place to ``end``."""
    found: dict[str, Member] = {}
    archive: Any = tarfile.TarFile(fileobj=file, encoding="utf-8")
    while (header := archive.next()) is not None:
        archive.members.clear()  # otherwise it would keep all headers
        name = header.name.removeprefix("./")
        if header.size < 0 or len(name) > MAX_NAME:
            raise tarfile.ReadError(f"a file of {header.size} bytes, a name of {len(name)}")
        if header.isreg():
            member = Member(header.name, header.offset_data, header.size)
            if header.issparse():
                raise UserError(f"{where}: {shown(name)} is sparse; write the tar without --sparse")
            if member.start + member.size > min(archive.offset, end):
                raise UserError(f"{where}: {shown(name)} is cut off; {AGAIN}")
        elif header.islnk():
            target = found.get(header.linkname.removeprefix("./"))
            if target is None:
                raise UserError(
                    f"{where}: {shown(name)} is a link to a file that is not before it; write the "
                    "tar with --hard-dereference"
                )
            member = target._replace(name=header.name)
        elif header.issym():
            raise UserError(f"{where}: {shown(name)} is a link; write the tar with --dereference")
        elif not header.isdir() and name.lower().endswith(suffixes):
            raise UserError(f"{where}: {shown(name)} is no file; remove it")
        else:
            continue
        if name in found:
            raise UserError(f"{where}: {shown(name)} is there twice; {AGAIN}, with one of them")
        found[name] = member
    _check_end(file, archive.offset, end, where)
    return found.values()


def _check_kind(first: bytes, where: str) -> None:
    if not first:
        raise UserError(f"{where}: is empty; {AGAIN}")
    for magic, kind in COMPRESSED.items():
        if first.startswith(magic):
            raise UserError(f"{where}: is {kind}; expected a plain tar, unpack it")


def _check_end(file: _Headers, at: int, end: int, where: str) -> None:
    """Raise unless the end marker, and then nothing else than zeros, is in a tar."""
    file.seek(at)
    marker = file.read(min(len(END), max(0, end - at)))
    if marker != END or end % BLOCK:
        raise UserError(f"{where}: is cut off or damaged at byte {at}; {AGAIN}")
    # Some programs reserve the space of a file before they download it, and cat joins tars.
    rest = end - file.tell()
    pieces = (file.read(min(MAX_HEADER, end - file.tell())) for _ in range(0, rest, MAX_HEADER))
    if rest > MAX_PADDING or any(map(any, pieces)):
        raise UserError(
            f"{where}: ends at byte {at}, but has {end} bytes; {AGAIN}, and join no tars with cat"
        )


def read_part(file: BinaryIO, start: int, size: int) -> bytes:
    """Return some bytes of an open file; raise if they are too many, or if it ends before."""
    check_bytes(size)
    content = os.pread(file.fileno(), size, start)
    if len(content) != size:
        raise ValueError("the file is shorter than at the start of the run")
    return content
