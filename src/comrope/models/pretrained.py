"""Save and load models: a folder with ``config.json`` and ``model.safetensors``, or the Hub.

A saved model may come from an untrusted source: pickles are never opened, and every argument is
checked (``models.arguments``) before a model is built.

huggingface_hub's PyTorchModelHubMixin is not used: it removes the old configuration before it
writes the new one, reads pickles where it finds no safetensors, and drops values that it cannot
serialize.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from comrope import _checks, _json
from comrope._files import sha256_of, write_files
from comrope._json import SHA256, TEXT, Entries
from comrope._weights import misfits, mixed_dtypes, nonfinite, shapes_of
from comrope.analysis import rotary_modules
from comrope.models.arguments import check_arguments, to_json

__all__ = ["Pretrained", "architecture_of"]

LIBRARY, FORMAT = "comrope", 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
LARGEST_CONFIG = 2**20  # bytes
FLOATING = ("BF16", "F16", "F32", "F64")  # the names that safetensors has for them
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")

Model = TypeVar("Model", bound="Pretrained")


class Pretrained(nn.Module):
    """A model that can be saved, loaded and shared."""

    extra_arguments: ClassVar[dict[str, Any]] = {}  # types of keywords in ``**options``
    renamed_arguments: ClassVar[dict[str, str]] = {}  # old names in files -> new names

    def arguments(self) -> dict[str, Any]:
        """Return all keywords of the constructor that make the same model."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors`` to a folder, atomically.

        Raises:
            ValueError: Parts of the model were replaced, so its arguments do not describe it; or
                ``from_pretrained`` would refuse its weights.
            OSError: A file cannot be written; existing files are unchanged.
        """
        arguments = {
            name: to_json(name, value)
            for name, value in self.arguments().items()
            if name not in ("device", "dtype")  # those of the weights
        }
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()
        }
        with torch.device("meta"):
            rebuilt = type(self)(**check_arguments(type(self), arguments))
        if wrong := misfits(shapes_of(rebuilt.state_dict()), shapes_of(tensors)):
            raise ValueError(f"model: was changed after it was created: {wrong[0]}")
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        if wrong := mixed_dtypes(dtypes, rotary_modules(self)) + nonfinite(tensors):
            raise ValueError(f"model: {wrong[0]}")
        config = {
            "library": LIBRARY,
            "library_version": sys.modules[LIBRARY].__version__,
            "format": FORMAT,
            "architecture": type(self).__name__,
            "arguments": arguments,
        }
        metadata = {"format": "pt", "arguments": _digest(arguments)}

        def save(path: Path) -> None:
            save_file(tensors, path, metadata=metadata)
            config["weights_sha256"] = sha256_of(path)

        def describe(path: Path) -> None:  # after the weights, whose digest it has
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

        write_files({Path(folder) / WEIGHTS: save, Path(folder) / CONFIG: describe})

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
        """Load what ``save_pretrained`` wrote, bit for bit, in evaluation mode.

        Args:
            folder: A folder, or the name of a repository on the Hub, "owner/name".
            num_classes: If it differs from the saved number, the head is initialized anew.
            backend: Replaces the saved backend, for example by "auto".
            device: Device of the weights. Their dtypes are those of the file.
            revision, cache_dir, token, local_files_only, force_download: Options of the Hub.

        Raises:
            FileNotFoundError: There is no such folder or repository, or a file is missing in it.
            ValueError: The files are not those of such a model, or do not belong together.

        The configuration and the shapes of the weights are checked before memory is allocated.
        """
        if num_classes is not None:
            _checks.integer("num_classes", num_classes, 0)
            if not hasattr(cls, "reset_classifier"):
                raise ValueError(f"num_classes: expected None, since a {cls.__name__} has none")
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
            written = _json.read(config, _config_schema(cls.__name__), largest=LARGEST_CONFIG)
            arguments = check_arguments(cls, written["arguments"])
        except ValueError as error:
            raise ValueError(f"{config}: {error}") from None
        except OSError as error:
            raise ValueError(f"{config}: cannot be read ({error.strerror})") from None
        if backend is not None:
            arguments["backend"] = backend
        weights = find(WEIGHTS)
        model = _build(cls, arguments, config, weights, _digest(written["arguments"]))
        _fill(model, weights, device, written.get("weights_sha256"))
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
        """Save to a repository on the Hub, created if needed; return the address of the commit."""
        from huggingface_hub import HfApi, ModelCard, ModelCardData

        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            if not api.file_exists(repo_id, "README.md", revision=branch):  # keep an existing card
                card = ModelCardData(library_name=LIBRARY, tags=["comrope", "rotary-embedding"])
                usage = f"`comrope.models.{type(self).__name__}.from_pretrained({repo_id!r})`"
                ModelCard(f"---\n{card}\n---\n\n{usage}\n").save(Path(folder) / "README.md")
            return str(
                api.upload_folder(
                    repo_id=repo_id,
                    folder_path=folder,
                    commit_message=commit_message,
                    revision=branch,
                    create_pr=create_pr,
                )
            )


# Configuration and weights.


def architecture_of(folder: Path) -> str | None:
    """Return the name of the class that saved a model in a folder; None if it cannot be read."""
    try:
        schema = Entries({"architecture": TEXT})
        name: str = _json.read(folder / CONFIG, schema, largest=LARGEST_CONFIG)["architecture"]
    except (OSError, ValueError):
        return None
    return name


def _digest(arguments: Mapping[str, Any]) -> str:
    """Hash arguments. Weights store the hash, which detects a configuration of another model."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()


def _config_schema(architecture: str) -> Entries:
    """Return the form of a configuration; the values of the arguments are checked elsewhere."""
    fixed = {"library": LIBRARY, "format": FORMAT, "architecture": architecture}
    return Entries(
        {**{name: _json.constant(v) for name, v in fixed.items()}, "arguments": Entries()},
        {"library_version": TEXT, "weights_sha256": SHA256},
        others=None,
    )


def _build(
    cls: type[Model], arguments: dict[str, Any], config: Path, weights: Path, digest: str
) -> Model:
    """Build the model on the meta device, and check that the file has exactly its weights."""
    try:
        with safe_open(str(weights), framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {name: part.get_dtype() for name, part in slices.items()}
            saved_with = (file.metadata() or {}).get("arguments", digest)
    except (SafetensorError, OSError, MemoryError) as error:
        raise ValueError(
            f"{weights}: is truncated or not a safetensors file ({_checks.one_line(error)})"
        ) from None
    blocks = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    depth = arguments.get("depth", blocks)
    if depth != blocks:  # checked before blocks are built
        raise ValueError(f"{config}: depth: expected the {blocks} blocks of {weights}, got {depth}")
    try:
        with torch.device("meta"):
            model = cls(**arguments)
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"{config}: {_checks.one_line(error)}") from None
    if wrong := misfits(shapes_of(model.state_dict()), shapes):
        raise ValueError(f"{weights}: does not fit {config.name}: {wrong[0]}")
    for name, dtype in dtypes.items():
        if dtype not in FLOATING:
            raise ValueError(f"{weights}: {name}: expected a dtype of {FLOATING}, got {dtype}")
    if wrong := mixed_dtypes(dtypes, rotary_modules(model)):
        raise ValueError(f"{weights}: {wrong[0]}")
    if saved_with != digest:
        raise ValueError(f"{weights}: was not saved with this {config.name}; save both again")
    return model


def _fill(model: nn.Module, weights: Path, device: torch.device | str, digest: str | None) -> None:
    """Load the weights; raise unless they are finite and their file has a digest.

    Args:
        model: The model on the meta device.
        weights: The file.
        device: Device of the weights.
        digest: The SHA-256 of the file; None for a model that an earlier version saved.
    """
    tensors = load_file(weights, device=str(device))
    if wrong := nonfinite(tensors):
        raise ValueError(f"{weights}: {wrong[0]}; save or download the model again")
    if digest is not None and sha256_of(weights) != digest:
        raise ValueError(
            f"{weights}: has changed since it was saved, or is not that of this {CONFIG} (SHA-256);"
            " save or download both again"
        )
    if torch.device(device).type == "cpu":  # memory-mapped: the values would change with the file
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    model.load_state_dict(tensors, assign=True)
    dtype = next(model.parameters()).dtype
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # empty and not saved: it only holds the module's device
                setattr(module, name, torch.empty(0, device=device, dtype=dtype))


# Location of files.


def _finder(folder: str | os.PathLike[str], **hub: Any) -> Callable[[str], Path]:
    """Return a function from a file name to its path, which downloads from the Hub if needed."""
    path = Path(folder)
    if path.is_dir():
        return lambda name: _in_folder(path, name)
    if path.is_file():
        _refuse_pickles([path])
        raise ValueError(f"{path}: expected a folder with {CONFIG} and {WEIGHTS}, got a file")
    if not isinstance(folder, str) or not REPOSITORY.fullmatch(folder):
        raise FileNotFoundError(
            f"{folder}: no such folder; expected one, or a repository of the Hub, owner/name"
        )
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
        return Path(hf_hub_download(repo_id, name, library_name=LIBRARY, **options))
    except LocalEntryNotFoundError:  # the Hub cannot be reached: the file may exist
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
