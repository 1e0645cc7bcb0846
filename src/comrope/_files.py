"""The files of a model: found in a folder or on the Hub, and written whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

__all__ = ["CONFIG", "WEIGHTS", "finder", "write_whole"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def write_whole(writers: Mapping[Path, Callable[[Path], Any]]) -> None:
    """Files that are there whole or as they were: all are written aside, then moved into place."""
    asides = {path: path.with_name(f".{os.getpid()}-{path.name}") for path in writers}
    try:
        for path, write in writers.items():
            asides[path].touch()
            mode = asides[path].stat().st_mode
            write(asides[path])
            asides[path].chmod(mode)  # safetensors makes files that nobody else may read
            _flush(asides[path])
        for path, aside in asides.items():
            aside.replace(path)
    except (OSError, SafetensorError) as error:  # a full disk is either
        raise OSError(f"{path} cannot be written ({error}); it is as it was") from None
    finally:
        for aside in asides.values():
            aside.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def finder(folder: str | os.PathLike[str], **hub: Any) -> Callable[[str], Path]:
    """A function from the name of a file to where it is, fetched from the Hub if need be."""
    place = Path(folder)
    if place.is_dir():
        return lambda name: _in_folder(place, name)
    if place.is_file():
        _refuse_pickles([place])
        raise ValueError(f"{place}: expected a folder with {CONFIG} and {WEIGHTS}, got a file")
    if not isinstance(folder, str) or not REPOSITORY.fullmatch(folder):
        raise FileNotFoundError(f"{folder}: no such folder, and no repository's name, owner/name")
    return lambda name: _on_hub(str(folder), name, **hub)


def _in_folder(folder: Path, name: str) -> Path:
    if not (folder / WEIGHTS).is_file():
        _refuse_pickles(sorted(folder.iterdir()))
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder}: has no {name}; expected what save_pretrained writes")
    return folder / name


def _on_hub(repo_id: str, name: str, **options: Any) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, name, library_name="comrope", **options))
    except LocalEntryNotFoundError:  # no answer from the Hub, which says nothing of the file
        raise
    except EntryNotFoundError:
        raise FileNotFoundError(
            f"{repo_id}: has no {name}; weights in any other form than {WEIGHTS} are not read"
        ) from None


def _refuse_pickles(files: list[Path]) -> None:
    for file in files:
        if file.suffix in PICKLES:
            raise ValueError(
                f"{file}: is a pickle, which can run any code when it is read; it was not opened. "
                f"Expected {WEIGHTS}"
            )
