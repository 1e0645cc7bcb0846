"""``fold``: turn a model with learned rotations into one with plain RoPE (see ``ops.folding``).

This file finds the rows of parameters that compute the rotated channels. If there is a norm between
projection and rotation, the basis cannot be folded. It stays in the rotation, as a constant.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CommutingAngles, GeneralAngles
from comrope.integrations.api import FOLDED, check_weights, take_out
from comrope.integrations.length import check_length_independent
from comrope.integrations.rebinding import ROTATION, VALUES
from comrope.integrations.token_positions import TokenPositions, axial
from comrope.methods.rope_mixed import RoPEMixed
from comrope.ops.folding import fold_into_outputs
from comrope.rotary import RotaryEmbedding

__all__ = ["fold"]

Model = TypeVar("Model", bound=nn.Module)
Rows = tuple[nn.Parameter, Tensor]  # a weight or bias, and its rows (heads, D) that make q or k
Value = tuple[nn.Parameter, Tensor]  # a parameter and its new value


class FixedBasis(RoPEMixed):
    """Frequencies and a constant basis: the rotation after a norm."""

    name = "folded"
    basis: Tensor

    def reset_parameters(self) -> None:
        """Do nothing: ``fold`` sets the values."""

    def angles_of(self, frequencies: Tensor) -> CommutingAngles:  # type: ignore[override]
        return CommutingAngles(
            to_compute_dtype(self.basis), to_compute_dtype(frequencies), self.block_size
        )


@torch.no_grad()
def fold(model: Model) -> Model:
    """Turn learned rotations into plain RoPE with learned frequencies, in place.

    The bases of the rotations are multiplied into the projections, and every rotation becomes
    ``"rope-mixed"``, which costs as much as RoPE. Outputs stay the same up to rounding, and
    frequencies stay trainable. It cannot be undone.

    Args:
        model: A ViT or a GPT of comrope, or a model that ``comrope.swap`` was applied to. A timm
            model with its own RoPE-Mixed stores the frequencies there, and no longer depends on
            comrope.

    Returns:
        The model.

    Raises:
        ValueError: The model has no such rotation, one that does not commute, or projections that
            are not plain linear layers (adapters, quantized weights), ``comrope.scaled`` is
            active, or frequencies follow the length of the input (``rope_type`` "dynamic" and
            "longrope"). The model is unchanged.
    """
    check_weights(model)
    check_length_independent(model)
    layers = _layers(model)
    if not layers:
        raise ValueError(f"model: {type(model).__name__} has no rotation of comrope to fold")
    spectra = {rotation: _spectrum(rotation) for _, rotation in layers}  # layers may share one
    plans = [_plan(layer, rotation, *spectra[rotation]) for layer, rotation in layers]
    weights = [id(parameter) for _, _, values in plans for parameter, _ in values]
    if len(weights) != len(set(weights)):
        raise ValueError("model: expected separate weights for every layer, got shared ones")
    for rotation, method, values in plans:  # the model is unchanged up to here
        for parameter, value in values:
            parameter.copy_(value)
        rotation.method = method
        setattr(rotation, FOLDED, True)
    _restore_timm_rotation(model, list(spectra))
    if callable(note := getattr(model, "note_folded", None)):
        note()
    return model


def _layers(model: nn.Module) -> list[tuple[Any, RotaryEmbedding]]:
    """Find attention layers with a rotation: ours, and those that ``swap`` supports."""
    found: list[tuple[Any, RotaryEmbedding]] = []
    for layer in model.modules():
        if _is_ours(layer):
            rotations = [getattr(layer, "rope", None)]  # its own, or one that layers share
        else:
            rotations = [dict(layer.named_children()).get(name) for name in (ROTATION, VALUES)]
        found += [(layer, each) for each in rotations if isinstance(each, RotaryEmbedding)]
    known = {rotation for _, rotation in found}
    for layer in model.modules():
        if any(isinstance(m, RotaryEmbedding) and m not in known for m in layer.children()):
            raise ValueError(
                f"model: cannot find the projections of {type(layer).__name__}; expected a model "
                "of comrope or one that comrope.swap was applied to, with adapters merged "
                "(merge_and_unload)"
            )
    return found


def _is_ours(layer: nn.Module) -> bool:
    return type(layer).__module__ == "comrope.models.attention"


def _spectrum(rotation: RotaryEmbedding) -> tuple[Tensor, Tensor]:
    """Return the basis and the frequencies of a rotation that commutes."""
    old = rotation.method
    if old.scaling is not None:
        raise ValueError(
            f"model: is scaled by {old.scaling}, which a folded model would keep; fold it before "
            "or after comrope.scaled"
        )
    angles = old.angles()
    if isinstance(angles, GeneralAngles):
        raise ValueError(
            f"model: method {old.name!r} on {old.num_axes} axes does not commute, so it has no "
            "common basis to fold; expected another method"
        )
    return angles.spectrum()


def _plan(
    layer: Any, rotation: RotaryEmbedding, basis: Tensor, frequencies: Tensor
) -> tuple[RotaryEmbedding, RoPEMixed, list[Value]]:
    """Return the rotation, the method that it gets, and new values of the layer's parameters."""
    old = rotation.method
    # Values of other libraries' models keep their basis, too.
    keeps_basis = _has_norm(layer) or rotation is getattr(layer, VALUES, None)
    method = (FixedBasis if keeps_basis else RoPEMixed).like(old, frequencies)
    method.frequencies.requires_grad_(any(p.requires_grad for p in old.parameters()))
    if keeps_basis:
        of_heads = method.frequencies.shape[1]  # 1 if they share it
        method.register_buffer("basis", basis[:of_heads].detach().clone())
        return rotation, method, []
    if _is_ours(layer):
        for projection in (layer.qkv, layer.proj):
            _linear(projection)
        folded = layer.folded_projections(basis, exact=True)
        return rotation, method, [(layer.get_parameter(name), v) for name, v in folded.items()]
    values: list[Value] = []
    for parameter, indices in _merge(_projections(layer, rotation)):
        value: Tensor = parameter
        for rows in indices:
            value = fold_into_outputs(value, basis, rotation.channel_order, rows, exact=True)
        values.append((parameter, value))
    return rotation, method, values


def _merge(rows: list[Rows]) -> list[tuple[nn.Parameter, list[Tensor]]]:
    """Collect the rows of each parameter, which must not overlap."""
    found: dict[int, tuple[nn.Parameter, list[Tensor]]] = {}
    for parameter, index in rows:
        found.setdefault(id(parameter), (parameter, []))[1].append(index)
    for _, indices in found.values():
        every = torch.cat([index.flatten() for index in indices])
        if len(every) != len(every.unique()):
            raise ValueError("model: expected separate weights for queries and keys")
    return list(found.values())


def _has_norm(layer: nn.Module) -> bool:
    names = ("q_norm", "q_layernorm")
    norms = [getattr(layer, name, None) for name in names]
    return any(norm is not None and not isinstance(norm, nn.Identity) for norm in norms)


def _projections(layer: Any, rotation: RotaryEmbedding) -> list[Rows]:
    """Find the rows of weights and biases whose outputs are rotated."""
    rotated, keys = rotation.head_dim, rotation.num_heads
    if getattr(layer, "query_key_value", None) is not None:  # GPT-NeoX: q, k, v head by head
        qkv = _linear(layer.query_key_value)
        dim = qkv.out_features // (3 * keys)
        index = _index(qkv, 3 * keys, dim)[:, :rotated].unflatten(0, (keys, 3))
        return _rows(qkv, index[:, 0]) + _rows(qkv, index[:, 1])
    if getattr(layer, "qkv", None) is not None:  # timm: all of q, all of k, all of v
        qkv = _linear(layer.qkv)
        index = _index(qkv, 3 * keys, qkv.out_features // (3 * keys))[:, :rotated]
        rows = _rows(qkv, index[:keys]) + _rows(qkv, index[keys : 2 * keys])
        if getattr(layer, "q_bias", None) is not None:  # EVA, whose keys have none
            rows.append((layer.q_bias, index[:keys]))
        return rows
    for names in (("q_proj", "k_proj"), ("query", "key")):
        if all(getattr(layer, name, None) is not None for name in names):
            q, k = (_linear(getattr(layer, name)) for name in names)
            dim = k.out_features // keys
            q_index = _index(q, q.out_features // dim, dim)[:, :rotated]
            return _rows(q, q_index) + _rows(k, _index(k, keys, dim)[:, :rotated])
    raise ValueError(
        f"model: found no projections of queries and keys in {type(layer).__name__}; expected qkv, "
        "query_key_value, q_proj and k_proj, or query and key"
    )


def _linear(module: nn.Module) -> nn.Linear:
    if type(module) is not nn.Linear or not module.weight.is_floating_point():
        raise ValueError(
            f"model: expected projections of type Linear with floating weights, got "
            f"{type(module).__name__}; merge adapters before (merge_and_unload), quantize after"
        )
    return module


def _index(linear: nn.Linear, heads: int, dim: int) -> Tensor:
    return torch.arange(heads * dim, device=linear.weight.device).view(heads, dim)


def _rows(linear: nn.Linear, index: Tensor) -> list[Rows]:
    parts: list[Any] = [linear.weight, linear.bias]
    return [(part, index) for part in parts if part is not None]


def _restore_timm_rotation(model: nn.Module, rotations: list[RotaryEmbedding]) -> None:
    """Put folded rotations into timm's own RoPE-Mixed, if the model has one."""
    rope: Any = getattr(model, "rope", None)
    if type(rope).__name__ != "RotaryEmbeddingMixed":
        return
    positions = next(
        hook for part in model.modules() for hook in part._forward_hooks.values()
        if isinstance(hook, TokenPositions)
    )  # fmt: skip
    convention: Any = positions.convention
    if getattr(convention, "func", None) is not axial or positions.class_position != "unrotated":
        return
    plain = {(rotation.name, rotation.channel_order) for rotation in rotations}
    if plain != {("rope-mixed", "interleaved")}:
        return
    angles: list[Any] = [rotation.angles() for rotation in rotations]
    freqs = torch.stack([each.frequencies.flatten(2) for each in angles], dim=1)
    parameters = dict(model.named_parameters())
    disabled = positions.disabled
    kept = {name: (parameters[name].clone(), learned) for name, (_, learned) in disabled.items()}
    positions.disabled = {**kept, "rope.freqs": (freqs.reshape(rope.freqs.shape), True)}
    take_out(model)
