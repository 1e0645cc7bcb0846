"""``fold``: a model with learned rotations as one with plain RoPE.

The scores of R(x) q and R(y) k, with R(x) = Q diag(Rot(w x)) Q^T, are those of Rot(w x) Q^T q and
Rot(w y) Q^T k: Q^T goes into the projections that make q and k, and what is left turns planes by
fixed frequencies, of each head its own. Where a norm stands between projection and rotation, Q^T
cannot pass it and stays in the rotation, as a constant.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CommutingAngles, GeneralAngles
from comrope.integrations.api import FOLDED, check_weights, take_out
from comrope.integrations.rebinding import ROTATION
from comrope.integrations.token_positions import Places, axial
from comrope.methods import create_method
from comrope.methods.base import Method
from comrope.ops.layout import halves_to_neighbours
from comrope.rotary import RotaryEmbedding

__all__ = ["fold"]

Model = TypeVar("Model", bound=nn.Module)
Rows = tuple[nn.Parameter, Tensor]  # a weight or a bias, and its rows (heads, D) that make q or k


class FixedBasis(Method):
    """What is left of a rotation behind a norm: frequencies, and a basis that does not learn."""

    name = "folded"
    frequencies: nn.Parameter
    basis: Tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"frequencies": (self.num_axes, self.num_heads, self.num_blocks, self.num_planes)}

    def reset_parameters(self) -> None:
        """Nothing to begin with: ``fold`` fills it."""

    def angles_of(self, frequencies: Tensor) -> CommutingAngles:  # type: ignore[override]
        return CommutingAngles(
            to_compute_dtype(self.basis), to_compute_dtype(frequencies), self.block_size
        )


@torch.no_grad()
def fold(model: Model) -> Model:
    """Turn learned rotations into plain RoPE with learned frequencies, in place; outputs stay.

    ``model`` is one of ours or one that ``comrope.swap`` was applied to. Its projections take the
    learned bases in, its rotations become ``"rope-mixed"``: no eigendecomposition, no basis, at the
    price of RoPE. A model of timm that had such rotations of its own (RoPE-Mixed) gets them back,
    and has nothing of comrope left. Scores do not change, so neither do outputs, but for rounding.
    There is no way back. Frequencies go on learning if they are trained.
    """
    check_weights(model)
    layers = _layers(model)
    if not layers:
        raise ValueError(f"model: this {type(model).__name__} has no rotation of comrope's to fold")
    plans = [_plan(layer, rotation) for layer, rotation in layers]
    weights = [id(parameter) for _, _, turned in plans for parameter, _ in turned]
    if len(weights) != len(set(weights)):
        raise ValueError("model: expected weights of their own for every layer, got shared ones")
    for rotation, method, turned in plans:  # nothing is changed before here
        for parameter, value in turned:
            parameter.copy_(value)
        rotation.method = method
        setattr(rotation, FOLDED, True)
    _give_back(model, [rotation for rotation, _, _ in plans])
    if callable(noted := getattr(model, "note_folded", None)):
        noted()
    return model


def _layers(model: nn.Module) -> list[tuple[Any, RotaryEmbedding]]:
    """Attention layers that are known: ours, and those that ``swap`` knows."""
    found = []
    for layer in model.modules():
        for name, child in layer.named_children():
            if isinstance(child, RotaryEmbedding):
                ours = type(layer).__module__ == "comrope.models.attention"
                if not ours and name != ROTATION:
                    raise ValueError(
                        f"model: how {type(layer).__name__} makes queries and keys is not known; "
                        "expected a model of comrope or one that comrope.swap was applied to, "
                        "adapters merged (merge_and_unload)"
                    )
                found.append((layer, child))
    return found


def _plan(layer: Any, rotation: RotaryEmbedding) -> Any:
    """The rotation, its method to be, and new values for the parameters of its layer."""
    old = rotation.method
    angles = old.angles()
    if isinstance(angles, GeneralAngles):
        raise ValueError(
            f"model: method {old.name!r} on {old.num_axes} axes does not commute, so it has no "
            "common basis to fold; expected another method"
        )
    basis, frequencies = angles.spectrum()
    sizes: dict[str, Any] = {
        "num_heads": old.num_heads,
        "head_dim": old.head_dim,
        "num_axes": old.num_axes,
        "block_size": old.block_size,
        "init": "zeros",
        "device": frequencies.device,
    }
    behind_norm = _has_norm(layer)
    method: Any = FixedBasis(**sizes) if behind_norm else create_method("rope-mixed", **sizes)
    method.frequencies.copy_(frequencies)
    method.frequencies.requires_grad_(any(p.requires_grad for p in old.parameters()))
    if behind_norm:
        method.register_buffer("basis", basis.detach().clone())
        return rotation, method, []
    turn = _turns(basis.double(), rotation.channel_order == "half")
    turned: list[tuple[Tensor, Tensor]] = [
        (rows[0], _turned(rows, turn)) for rows in _merge(_projections(layer, rotation))
    ]
    if getattr(layer, "rotate_values", False):  # Q^T v goes in, so Q is to come out
        weight = _linear(layer.proj).weight
        index = torch.arange(weight.shape[1], device=weight.device).view(old.num_heads, -1)
        turned.append((weight, _turned((weight.mT, [index]), turn).mT))
    return rotation, method, turned


def _turns(basis: Tensor, halves: bool) -> Tensor:
    """Q^T of whole heads (H, D, D), in the order of channels that the model has."""
    whole = torch.stack([torch.block_diag(*blocks) for blocks in basis]).mT
    if not halves:
        return whole
    # Channels of the model, written as the ones that are neighbours here.
    dim = whole.shape[-1]
    order = halves_to_neighbours(torch.arange(dim, device=whole.device)[None])[0]
    back = torch.argsort(order)
    return whole[:, back][:, :, back]


def _turned(rows: tuple[Tensor, list[Tensor]], turn: Tensor) -> Tensor:
    parameter, indices = rows
    value = parameter.detach().clone()
    for index in indices:
        matrices = turn.repeat_interleave(index.shape[0] // turn.shape[0], dim=0)
        part = value[index].double()  # (heads, D), or with the inputs of a weight (heads, D, C)
        turned = torch.einsum("hij,hj...->hi...", matrices, part)
        value[index] = turned.to(value.dtype)
    return value


def _merge(rows: list[Rows]) -> list[tuple[nn.Parameter, list[Tensor]]]:
    """Rows of one and the same parameter together."""
    found: dict[int, tuple[nn.Parameter, list[Tensor]]] = {}
    for parameter, index in rows:
        found.setdefault(id(parameter), (parameter, []))[1].append(index)
    for _, indices in found.values():
        every = torch.cat([index.flatten() for index in indices])
        if len(every) != len(every.unique()):
            raise ValueError("model: expected weights of their own for queries and keys")
    return list(found.values())


def _has_norm(layer: nn.Module) -> bool:
    names = ("q_norm", "q_layernorm")
    norms = [getattr(layer, name, None) for name in names]
    return any(norm is not None and not isinstance(norm, nn.Identity) for norm in norms)


def _projections(layer: Any, rotation: RotaryEmbedding) -> list[Rows]:
    """The rows of weights and biases that make the channels which are rotated."""
    turned, keys = rotation.head_dim, rotation.num_heads
    if getattr(layer, "query_key_value", None) is not None:  # GPT-NeoX: q, k, v head by head
        whole = _linear(layer.query_key_value)
        dim = whole.out_features // (3 * keys)
        index = _index(whole, 3 * keys, dim)[:, :turned].unflatten(0, (keys, 3))
        return _rows(whole, index[:, 0]) + _rows(whole, index[:, 1])
    if getattr(layer, "qkv", None) is not None:  # timm, and ours: all of q, all of k, all of v
        whole = _linear(layer.qkv)
        index = _index(whole, 3 * keys, whole.out_features // (3 * keys))[:, :turned]
        rows = _rows(whole, index[:keys]) + _rows(whole, index[keys : 2 * keys])
        if getattr(layer, "rotate_values", False):
            rows += _rows(whole, index[2 * keys :])
        if getattr(layer, "q_bias", None) is not None:  # EVA's; its keys have none
            rows.append((layer.q_bias, index[:keys]))
        return rows
    for names in (("q_proj", "k_proj"), ("query", "key")):
        if all(getattr(layer, name, None) is not None for name in names):
            q, k = (_linear(getattr(layer, name)) for name in names)
            dim = k.out_features // keys
            q_index = _index(q, q.out_features // dim, dim)[:, :turned]
            return _rows(q, q_index) + _rows(k, _index(k, keys, dim)[:, :turned])
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


def _give_back(model: nn.Module, rotations: list[RotaryEmbedding]) -> None:
    """To timm's own RoPE-Mixed, if that is where the rotations came from."""
    rope: Any = getattr(model, "rope", None)
    if type(rope).__name__ != "RotaryEmbeddingMixed":
        return
    places = next(
        hook for part in model.modules() for hook in part._forward_hooks.values()
        if isinstance(hook, Places)
    )  # fmt: skip
    convention: Any = places.convention
    if getattr(convention, "func", None) is not axial or places.class_position != "unrotated":
        return
    plain = {(rotation.name, rotation.channel_order) for rotation in rotations}
    if plain != {("rope-mixed", "interleaved")}:
        return
    methods: list[Any] = [rotation.method for rotation in rotations]
    freqs = torch.stack([method.frequencies.flatten(2) for method in methods], dim=1)
    parameters = dict(model.named_parameters())
    now = {name: (parameters[name].clone(), learned) for name, (_, learned) in places.away.items()}
    places.away = {**now, "rope.freqs": (freqs.reshape(rope.freqs.shape), True)}
    take_out(model)
