"""Models out and in again: a folder with ``config.json`` and ``model.safetensors``, or the Hub.

huggingface_hub's own PyTorchModelHubMixin is not used: it removes the old configuration before the
new one is written, reads pickles where it finds no safetensors, and leaves out what it cannot read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from comrope import _checks
from comrope._files import write_files
from comrope.models.arguments import checked, plain

__all__ = ["Pretrained"]

LIBRARY, FORMAT = "comrope", 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")

LARGEST_CONFIG = 2**20  # bytes
FLOATING = ("BF16", "F16", "F32", "F64")  # as safetensors calls them

Model = TypeVar("Model", bound="Pretrained")
Shapes = dict[str, tuple[int, ...]]


class Pretrained(nn.Module):
    """A model that can be saved, loaded and shared."""

    def arguments(self) -> dict[str, Any]:
        """Keywords of the constructor that make the same model, all of them."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors``, whole or not at all."""
        arguments = plain(self.arguments())
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()
        }
        with torch.device("meta"):
            twin = type(self)(**checked(arguments))
        if wrong := _difference(_shapes(self), _shapes(twin)):
            raise ValueError(f"the model was changed since it was made: {wrong}")
        config = {
            "library": LIBRARY,
            "library_version": sys.modules[LIBRARY].__version__,
            "format": FORMAT,
            "architecture": type(self).__name__,
            "arguments": arguments,
        }
        text = json.dumps(config, indent=2) + "\n"
        notes = {"format": "pt", "arguments": _digest(arguments)}
        place = Path(folder)
        write_files(
            {
                place / WEIGHTS: lambda path: save_file(tensors, path, metadata=notes),
                place / CONFIG: lambda path: path.write_text(text, encoding="utf-8"),
            }
        )

    @classmethod
    def from_pretrained(
        cls: type[Model],
        folder: str | os.PathLike[str],
        *,
        num_classes: int | None = None,
        backend: str | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> Model:
        """What ``save_pretrained`` wrote, as it was, in evaluation mode.

        Args:
            folder: A folder, or the name of a repository on the Hub, "owner/name".
            num_classes: For another number than the model has, its head starts anew.
            backend: Another than the model was saved with, such as "auto".
            device: Where the weights go; their dtypes are those of the file.
            revision, cache_dir, token, local_files_only, force_download: Of the Hub.

        Nothing that could run code is ever read, and nothing large is allocated before the
        configuration, and the shapes of the weights after it, were found to be right.
        """
        if num_classes is not None:
            _checks.integer("num_classes", num_classes, 0)
        find = _finder(
            folder,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
        )
        config = find(CONFIG)
        try:
            written = _read_config(config, cls.__name__)
            arguments = checked(written)
        except (ValueError, RecursionError) as error:  # no JSON is either
            raise ValueError(f"{config}: {error}") from None
        if backend is not None:
            arguments["backend"] = backend
        weights = find(WEIGHTS)
        model = _built_for(cls, arguments, config, weights, _digest(written))
        _fill(model, weights, device)
        if num_classes is not None and num_classes != arguments.get("num_classes"):
            model.reset_classifier(num_classes)  # type: ignore[operator]
        return model.eval()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "A model of comrope",
        branch: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Save to a repository on the Hub, made if it is not there; the address of the commit."""
        from huggingface_hub import HfApi, ModelCard, ModelCardData

        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as place:
            self.save_pretrained(place)
            # A card of somebody's own stays.
            if not api.file_exists(repo_id, "README.md", revision=branch):
                card = ModelCardData(library_name=LIBRARY, tags=["comrope", "rotary-embedding"])
                usage = f"`comrope.models.{type(self).__name__}.from_pretrained({repo_id!r})`"
                ModelCard(f"---\n{card}\n---\n\n{usage}\n").save(Path(place) / "README.md")
            return str(
                api.upload_folder(
                    repo_id=repo_id,
                    folder_path=place,
                    commit_message=commit_message,
                    revision=branch,
                    create_pr=create_pr,
                )
            )


def _digest(arguments: Mapping[str, Any]) -> str:
    """Kept with the weights: they say whether a configuration is the one they were saved with."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()


def _read_config(path: Path, architecture: str) -> dict[str, Any]:
    """The arguments that a file holds, as they are written there."""
    if (size := path.stat().st_size) > LARGEST_CONFIG:
        raise ValueError(f"expected at most {LARGEST_CONFIG} bytes, got {size}")
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"expected names and values, got {reprlib.repr(config)}")
    known = {"library": LIBRARY, "format": FORMAT, "architecture": architecture}
    for key, expected in known.items():
        if type(config.get(key)) is not type(expected) or config[key] != expected:
            got = reprlib.repr(config[key]) if key in config else "nothing"
            raise ValueError(f"{key}: expected {expected!r}, got {got}")
    if unknown := sorted(set(config) - {*known, "library_version", "arguments"}):
        raise ValueError(f"{unknown[0]}: is not known here")
    if not isinstance(config.get("arguments"), dict):
        raise ValueError(f"arguments: expected some, got {reprlib.repr(config.get('arguments'))}")
    return dict(config["arguments"])


def _built_for(
    cls: type[Model], arguments: dict[str, Any], config: Path, weights: Path, digest: str
) -> Model:
    """The model on the meta device, if the file of weights has just what it needs."""
    try:
        with safe_open(str(weights), framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {name: part.get_dtype() for name, part in slices.items()}
            saved_with = (file.metadata() or {}).get("arguments", digest)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{weights}: is truncated or no safetensors file ({error})") from None
    blocks = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    depth = arguments.get("depth", blocks)
    if depth != blocks:  # before as many are built
        raise ValueError(f"{config}: depth: expected the {blocks} blocks of {weights}, got {depth}")
    try:
        with torch.device("meta"):
            model = cls(**arguments)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{config}: {error}") from None
    if wrong := _difference(shapes, _shapes(model)):
        raise ValueError(f"{weights}: does not fit {config.name}: {wrong}")
    for name, dtype in dtypes.items():
        if dtype not in FLOATING:
            raise ValueError(f"{weights}: {name}: expected a dtype of {FLOATING}, got {dtype}")
    if saved_with != digest:
        raise ValueError(f"{weights}: was not saved with this {config.name}; save both again")
    return model


def _shapes(model: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _difference(found: Shapes, expected: Shapes) -> str:
    """The first thing that is not as expected, in words, or nothing."""
    for name, shape in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != shape:
            return f"{name} has shape {found[name]}, expected {shape}"
    unexpected = sorted(set(found) - set(expected))
    return f"{unexpected[0]} is unexpected" if unexpected else ""


def _fill(model: nn.Module, weights: Path, device: torch.device | str) -> None:
    tensors = load_file(weights, device=str(device))
    if torch.device(device).type == "cpu":  # mapped from the file: they would change with it
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    model.load_state_dict(tensors, assign=True)
    dtype = next(model.parameters()).dtype
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # empty, and so in no file: it only remembers where the module lives
                setattr(module, name, torch.empty(0, device=device, dtype=dtype))


def _finder(folder: str | os.PathLike[str], **hub: Any) -> Callable[[str], Path]:
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
