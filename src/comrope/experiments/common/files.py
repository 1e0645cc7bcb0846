"""Write files of experiments atomically (see ``comrope._files``); failures are user errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from comrope import _files
from comrope.experiments.common.errors import UserError

__all__ = ["save_tensors", "write_files", "write_tensors", "write_text"]


def write_files(writers: Mapping[Path, Callable[[Path], Any]]) -> None:
    """Write several files; if one cannot be written, none is replaced."""
    try:
        _files.write_files(writers)
    except OSError as error:
        raise UserError(str(error)) from None


def write_text(path: Path, text: str) -> None:
    """Write one text file."""
    write_files({path: lambda file: file.write_text(text, encoding="utf-8")})


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors of any device and layout to a safetensors file, not atomically."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(plain, path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, from tensors of any device and layout."""
    write_files({path: lambda file: save_tensors(tensors, file)})
