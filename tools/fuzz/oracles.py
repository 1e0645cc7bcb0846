"""Second readers of file formats: independent of those that are fuzzed, and small."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Tar",
    "content_of",
    "digest",
    "digest_of",
    "equal",
    "finite",
    "read_runs",
    "read_tar",
    "read_tensors",
]

BLOCK = 512
LARGEST = 2**26  # bytes
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def content_of(path: Path) -> bytes:
    """Return the content of a file; raise ``OSError`` for pipes, devices and very large files."""
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise OSError(f"{path}: not a file of usual size")
    return path.read_bytes()


def digest_of(path: Path) -> str:
    return digest(content_of(path))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file."""
    content = content_of(path)
    (length,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    found = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        first, last = about["data_offsets"]
        dtype = DTYPES[about["dtype"]]
        if first == last:
            found[name] = torch.zeros(about["shape"], dtype=dtype)
        else:
            found[name] = torch.frombuffer(body[first:last], dtype=dtype).reshape(about["shape"])
    return found


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and _bits(a[name]) == _bits(b[name])
        for name in a
    )


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


class Tar(NamedTuple):
    """What an archive certainly contains."""

    plain: bool  # only files and folders, with headers of the usual form
    ended: bool  # two blocks of zeros follow the last member
    files: list[tuple[str, int, int]]  # name, start and length of the content


def read_tar(content: bytes) -> Tar:
    """Read an archive of plain members; stop at whatever is unusual."""
    files: list[tuple[str, int, int]] = []
    place = 0
    while place + BLOCK <= len(content):
        header = content[place : place + BLOCK]
        if not any(header):
            return Tar(True, not any(content[place : place + 2 * BLOCK]) and
                       place + 2 * BLOCK <= len(content), files)  # fmt: skip
        name, prefix = (_field(header, *where) for where in ((0, 100), (345, 500)))
        numbers = [header[a:b].strip(b"\0 ") for a, b in ((124, 136), (148, 156), (100, 108))]
        usual = (
            all(number and not number.strip(b"01234567") for number in numbers)
            and header[156:157] in (b"0", b"5")
            and header[257:262] == b"ustar"
            and not prefix
            and name.isascii()
            and name.isprintable()
            and name.endswith("/") <= (header[156:157] == b"5")
        )
        total = sum(header) - sum(header[148:156]) + 8 * 32
        if not usual or int(numbers[1], 8) != total:
            return Tar(False, False, files)
        size, folder = int(numbers[0], 8), header[156:157] == b"5"
        if folder and size:
            return Tar(False, False, files)
        if not folder:
            files.append((name, place + BLOCK, size))
            place += -(-size // BLOCK) * BLOCK
        place += BLOCK
    return Tar(True, False, files)


def _field(header: bytes, first: int, last: int) -> str:
    return header[first:last].partition(b"\0")[0].decode("latin-1")


def read_runs(counts: bytes) -> list[int]:
    """Return the lengths of compressed runs of COCO: five bits a character, lowest first."""
    runs: list[int] = []
    number = shift = 0
    for character in counts:
        bits = character - 48
        number |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            number -= 1 << shift
        runs.append(number + (runs[-2] if len(runs) > 2 else 0))
        number = shift = 0
    return runs


def same_json(a: Any, b: Any) -> bool:
    """Return whether two values are the same JSON, also if they contain NaN."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
