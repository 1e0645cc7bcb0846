"""Weights of timm's vision transformers for our ViT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from comrope import positions as coordinates
from comrope.models.detection.backbone import check_images
from comrope.models.embeddings import AbsolutePositions
from comrope.models.vit import ViT

__all__ = ["Loaded", "load_timm_weights"]


class Loaded(NamedTuple):
    """Names of weights that ``load_timm_weights`` did not use, and that it did not set."""

    left_out: tuple[str, ...]  # names in timm's weights
    new: tuple[str, ...]  # names in the ViT, which keep their values


@torch.no_grad()
def load_timm_weights(vit: ViT, state_dict: Mapping[str, Tensor]) -> Loaded:
    """Fill a ViT with the weights of timm's ``vision_transformer`` of the same sizes.

    Args:
        vit: The model, changed in place.
        state_dict: Weights by timm's names. Absolute positions for another grid are interpolated,
            as in the ViT for another image size. The position that timm adds to the class token
            becomes part of the token. A classifier for another number of classes is left out.

    Returns:
        The names that were left out, and those that are new: angles, and other weights that timm's
        model does not have.

    Raises:
        ValueError: A weight has another shape than expected.
    """
    check_images(vit)
    given, own = dict(state_dict), vit.state_dict()
    loaded, left_out = {}, []
    table = given.get("pos_embed")  # (1, [1 +] T, C)
    if table is not None:
        grid, prefix = _pretraining_grid(table.shape[1], vit.train_grid, "cls_token" in given)
        if prefix:
            given["cls_token"] = given["cls_token"] + table[:, :1]
        if vit.ape is not None:
            pretrained = AbsolutePositions(grid, table.shape[2]).to(table)
            pretrained.codebook.copy_(table[0, prefix:])
            centers = coordinates.grid(vit.train_grid, device=table.device)
            given["ape.codebook"] = pretrained(centers)
            del given["pos_embed"]
    for name, tensor in given.items():
        target = _our_name(name)
        if target == "patches.proj.weight":
            tensor = tensor.flatten(1)
        wrong_head = target.startswith("head.") and own.get(target, tensor).shape != tensor.shape
        if target not in own or wrong_head:
            left_out.append(name)
        elif own[target].shape != tensor.shape:
            raise ValueError(
                f"state_dict: expected {name} to fill {target} {tuple(own[target].shape)}, "
                f"got {tuple(state_dict.get(name, tensor).shape)}"
            )
        else:
            loaded[target] = tensor
    vit.load_state_dict(loaded, strict=False)
    return Loaded(tuple(left_out), tuple(name for name in own if name not in loaded))


def _our_name(name: str) -> str:
    """Return our name of a weight of timm."""
    for theirs, ours in (
        ("patch_embed.", "patches."),
        (".ls1.", ".scale1."),
        (".ls2.", ".scale2."),
    ):
        name = name.replace(theirs, ours)
    return name


def _pretraining_grid(
    rows: int, grid: Sequence[int], class_token: bool
) -> tuple[tuple[int, ...], int]:
    """Return the grid of ``rows`` absolute positions, and the number of rows before the grid.

    The grid of the ViT if the number fits, else a square.
    """
    for prefix in (1, 0) if class_token else (0,):
        patches = rows - prefix
        side = math.isqrt(patches)
        if patches == math.prod(grid):
            return tuple(grid), prefix
        if side * side == patches:
            return (side, side), prefix
    raise ValueError(
        f"state_dict: expected pos_embed of {tuple(grid)} or a square of patches, with or without "
        f"a class token, got {rows} rows"
    )
