"""Write files atomically: a reader finds either the complete new file or the previous one.

The only place that writes files which must survive a crash. Every function raises ``OSError`` when
writing fails; callers translate it where their users expect another exception.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

__all__ = ["commit_directory", "remove", "sha256_of", "write_files", "write_text"]


def write_files(writers: Mapping[Path, Callable[[Path], Any]]) -> None:
    """Write several files atomically: no file is replaced before all of them are complete.

    Args:
        writers: For every path, a function that writes the content. Its argument is the path of a
            temporary file in the same folder, which is then renamed. Folders are created.

    Raises:
        OSError: A file could not be written. Existing files are unchanged if the error came before
            the first rename; no temporary file is left in any case.
    """
    temporary = {path: path.with_name(f".{os.getpid()}-{path.name}") for path in writers}
    try:
        for path, write in writers.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary[path].touch()
            mode = temporary[path].stat().st_mode
            write(temporary[path])
            temporary[path].chmod(mode)  # safetensors makes files that only their owner can read
            _flush(temporary[path])
        for path in writers:
            temporary[path].replace(path)
    except (OSError, SafetensorError) as error:  # on a full disk, safetensors raises its own error
        raise OSError(f"{path} cannot be written ({error}); it is unchanged") from None
    finally:
        for file in temporary.values():
            with contextlib.suppress(OSError):  # renamed, or never made
                file.unlink()


def write_text(path: Path, text: str) -> None:
    """Write one text file (UTF-8) atomically; see ``write_files``."""
    write_files({path: lambda file: file.write_text(text, encoding="utf-8")})


def commit_directory(temporary: Path, final: Path) -> None:
    """Move a complete folder of files to its final place, in one rename.

    ``final``, a folder or a file, is replaced if it exists. Both lie in the same parent folder.
    Contents are flushed to the disk before the rename, so a folder that is found under its final
    name is complete.
    """
    for file in temporary.iterdir():
        _flush(file)
    _flush(temporary)
    if final.exists():
        remove(final)
    temporary.rename(final)
    _flush(final.parent)


def remove(path: Path) -> None:
    """Remove a folder with its content, a file or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, as hexadecimal digits.

    Raises:
        OSError: It cannot be read, or is no regular file: reading a pipe or a device may not end.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "expected a file, got something else", str(path))
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
