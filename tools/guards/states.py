"""G7: initial weights, by position encoding, initialization and kind of model.

Zeros of both signs count as the same value.
"""

from __future__ import annotations

from typing import Any

from guards.tree import ERRORS, api, bytes_digest, config_of, fingerprint

__all__ = ["POSITIONS", "observe"]

POSITIONS = (
    "none", "ape", "rope", "rope-mixed", "liere", "comrope-ap", "comrope-ld", "comrope-torus",
)  # fmt: skip
STARTS = ("normal", "zeros", "rope", "turned", "scattered")
KINDS = {"images": "digits", "clips": "moving", "boxes": "scenes"}
# Options of models for images that draw numbers or change shapes. Keys are those of golden values.
OPTIONS: dict[str, dict[str, Any]] = {
    "absolute besides": {"model__ape": True},
    "values too": {"model__rotate_values": True},
    "heads start near": {"model__near": 4.0},
    "heads start near, base 100": {"model__near": 4.0, "model__init": "rope", "model__base": 100.0},
    "blocks of 2": {"model__block_size": 2},
    "blocks of 4": {"model__block_size": 4},
    "relative units": {"model__rope_units": "relative"},
    "no class token": {"model__class_token": False, "model__global_pool": "avg"},
    "spread 2": {"model__spread": 2.0},
    "layer scale": {"model__layer_scale": 1e-4},
    "seed 1": {"train__seed": 1},
}


def observe() -> dict[str, Any]:
    """Return the digest of names, shapes and bytes of every state dict, or "refused"."""
    found = {}
    for kind, recipe in KINDS.items():
        for position in POSITIONS:
            for start in STARTS:
                if position in ("none", "ape") and start != STARTS[0]:
                    continue
                fields = {"model__position": position, "model__init": start}
                found[f"{kind}, {position}, {start}"] = _state(recipe, **fields)
    for name, fields in OPTIONS.items():
        for position in ("rope", "comrope-ld", "comrope-torus"):
            found[f"images, {position}, {name}"] = _state(
                "digits", model__position=position, **fields
            )
    return {"states": found, "machine": fingerprint()}


def _state(recipe: str, **fields: Any) -> str:
    refused = api("UserError", *ERRORS)
    task_of = api("task_of", "experiments.tasks")
    try:
        model = task_of(config_of(recipe, **fields)).build_model()
    except refused:
        return "refused"
    parts = []
    for name, tensor in model.state_dict().items():
        parts += [f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()]
        values = tensor + 0.0 if tensor.is_floating_point() else tensor
        parts += [values.detach().contiguous().cpu().numpy().tobytes()]
    return bytes_digest(*parts)
