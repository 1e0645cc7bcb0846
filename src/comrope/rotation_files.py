"""Save the rotations of a model without its other weights, and load them into a model.

A file is in the safetensors format. Its metadata describe every rotation and have the SHA-256 of
the parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from comrope import _checks, _json
from comrope._files import write_files
from comrope._weights import misfits, nonfinite, shapes_of
from comrope.analysis import rotary_modules
from comrope.rotary import RotaryEmbedding

__all__ = ["load_rotations", "save_rotations"]

Model = TypeVar("Model", bound=nn.Module)
KEY, DIGEST = "comrope_rotations", "sha256"
LARGEST = 2**22  # characters of the description
DESCRIBED = _json.Entries(others=_json.Entries(required={"method": _json.TEXT}))


def save_rotations(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the parameters of all rotations of a model to one file, atomically.

    Args:
        model: A model of comrope, one that ``comrope.swap`` was applied to, or any module with
            ``RotaryEmbedding`` inside, also in an adapter.
        path: The file, for example ``"rotations.safetensors"``.

    Raises:
        ValueError: The model has no rotation, or parameters that are not finite.
        OSError: The file cannot be written; an existing one is unchanged.
    """
    from safetensors.torch import save_file

    ropes = _rotations(model)
    tensors = _parameters(ropes)
    if wrong := nonfinite(tensors):
        raise ValueError(f"model: {wrong[0]}")
    described = {name: _describe(rope) for name, rope in ropes.items()}
    metadata = {"format": "pt", KEY: json.dumps(described), DIGEST: _digest(tensors)}
    write_files({Path(path): lambda file: save_file(tensors, file, metadata=metadata)})


@torch.no_grad()
def load_rotations(model: Model, path: str | os.PathLike[str]) -> Model:
    """Load a file of ``save_rotations`` into the rotations of a model, in place.

    Args:
        model: With rotations of the same names, methods and sizes. Apply ``comrope.swap`` to a
            stock model first, with the same options.
        path: The file.

    Returns:
        The model.

    Raises:
        ValueError: The file is damaged or none of ``save_rotations``, or its rotations are not
            those of the model. The model is unchanged.
    """
    ropes, file = _rotations(model), Path(path)
    described, tensors = _read(file)
    own = {name: _describe(rope) for name, rope in ropes.items()}
    if wrong := _differences(own, described):
        raise ValueError(f"{file}: {wrong}")
    parameters = _parameters(ropes)
    if wrong_weights := misfits(shapes_of(parameters), shapes_of(tensors)) + nonfinite(tensors):
        raise ValueError(f"{file}: {wrong_weights[0]}")
    for name, rope in ropes.items():
        for key, value in rope.state_dict().items():
            value.copy_(tensors[f"{name}.{key}"])
    return model


def _rotations(model: nn.Module) -> dict[str, RotaryEmbedding]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    ropes = rotary_modules(model)
    if not ropes:
        raise ValueError(
            f"model: {type(model).__name__} has no rotation of comrope; apply comrope.swap first"
        )
    return ropes


def _parameters(ropes: dict[str, RotaryEmbedding]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, rope in ropes.items()
        for key, value in rope.state_dict().items()
    }


def _describe(rope: RotaryEmbedding) -> dict[str, Any]:
    """Return what must be equal for parameters to mean the same rotation."""
    method = rope.method
    return {
        "method": rope.name,
        "num_heads": rope.num_heads,
        "head_dim": rope.head_dim,
        "num_axes": rope.num_axes,
        "block_size": rope.block_size,
        "channel_order": rope.channel_order,
        "axis_order": method.axis_order,
        "shared_heads": method.shared_heads,
        "log_frequencies": method.log_frequencies,
        **method.settings,
    }


def _differences(own: dict[str, Any], described: dict[str, Any]) -> str:
    """Return what differs between the rotations of a model and of a file, or an empty text."""
    for name in [*described, *own]:
        shown = _checks.name_shown(name)
        if name not in own:
            return f"has a rotation {shown}, which the model does not have"
        if name not in described:
            return f"has no rotation {shown}, which the model has"
        mine, other = own[name], described[name]
        for key in {**other, **mine}:
            if mine.get(key) != other.get(key):
                return (
                    f"rotation {shown}: expected {_checks.name_shown(key)} {mine.get(key)!r} as in "
                    f"the model, got {other.get(key)!r}; give comrope.swap the options of the "
                    "saved model"
                )
    return ""


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the descriptions and the parameters of a file."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise ValueError(f"{file}: expected a file of comrope.save_rotations, found none")
    try:
        with safe_open(str(file), framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: is truncated or no file of comrope.save_rotations ({_checks.one_line(error)})"
        ) from None
    text = metadata.get(KEY, "")
    if not text or len(text) > LARGEST:
        raise ValueError(f"{file}: expected a file of comrope.save_rotations, got another one")
    try:
        described: dict[str, Any] = _json.parse(text, DESCRIBED)
    except ValueError as error:
        raise ValueError(f"{file}: {_checks.one_line(error)}") from None
    if metadata.get(DIGEST) != _digest(tensors):
        raise ValueError(f"{file}: is damaged: its parameters do not have the SHA-256 in it")
    return described, tensors


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
