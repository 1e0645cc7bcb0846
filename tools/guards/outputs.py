"""G8: outputs of models before and after their rotations are folded, exported or swapped.

A few numbers of each, which must agree to 1e-7 in float64 and 1e-5 in float32. First weights are
drawn in float32, and their last bits depend on the processor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from guards.states import POSITIONS
from guards.tree import api

__all__ = ["differences", "observe"]

METHODS = POSITIONS[2:]
EXPORTABLE = ("models.export", "models.exportable")
TOLERANCE = {"float64": 1e-7, "float32": 1e-5}
KEPT = 4  # numbers of an output, besides its norm


def observe() -> dict[str, Any]:
    """Return model and what was done to it -> numbers of its output."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return {**_rotations(), **_own_models(), **_swapped()}
    finally:
        torch.set_num_threads(threads)


def differences(golden: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return outputs that differ by more than rounding."""
    lines = []
    for name, numbers in golden.items():
        here = found.get(name)
        if here is None or len(here) != len(numbers):
            lines.append(f"{name}: expected {numbers}, found {here}")
            continue
        size = max(abs(x) for x in numbers)
        worst = max(abs(a - b) for a, b in zip(numbers, here, strict=True)) / size
        if not worst <= TOLERANCE["float64" if "float64" in name else "float32"]:
            lines.append(f"{name}: relative difference {worst:.1e}, expected {numbers[0]:.12g}, "
                         f"found {here[0]:.12g}")  # fmt: skip
    return lines


def _rotations() -> dict[str, list[float]]:
    """Return rotated queries and keys, by method, block size and order of channels."""
    import torch

    import comrope

    found = {}
    for method in METHODS:
        for order in ("interleaved", "half"):
            for size in (4, 8):
                torch.manual_seed(0)
                rope = comrope.RotaryEmbedding(
                    method, num_heads=2, head_dim=16, block_size=size, num_prefix_tokens=1,
                    channel_order=order,
                ).double()  # fmt: skip
                _perturb(rope)
                q, k = torch.randn(2, 3, 2, 7, 16, dtype=torch.float64).unbind(0)
                positions = torch.rand(6, 2, dtype=torch.float64)
                rotated = torch.cat(rope(q, k, positions))
                found[f"rotation, {method}, {order}, b={size}, float64"] = _numbers(rotated)
    return found


def _own_models() -> dict[str, list[float]]:
    import torch

    import comrope

    exportable = api("Exportable", *EXPORTABLE)
    found = {}
    for method in METHODS:
        for values in (False, True):
            for name in TOLERANCE:
                kind = getattr(torch, name)
                torch.manual_seed(0)
                model = comrope.create_model(
                    "vit_nano_patch2_12", in_chans=1, num_classes=5, position=method,
                    rotate_values=values,
                ).eval().to(kind)  # fmt: skip
                _perturb(model)
                images = torch.randn(2, 1, 10, 14, dtype=torch.float64).to(kind)
                label = f"ViT, {method}{', values too' if values else ''}"
                found[f"{label}, {name}"] = _numbers(model(images))
                copied = exportable(model)
                found[f"{label}, exported, {name}"] = _numbers(copied(images))
                if method != "liere":
                    folded = _or_error(lambda m=model: comrope.fold(m))
                    found[f"{label}, folded, {name}"] = (
                        [0.0] if folded is None else _numbers(folded(images))
                    )
    return found


def _swapped() -> dict[str, list[float]]:
    import torch

    import comrope

    found = {}
    builders: dict[str, Callable[[], Any]] = {"timm ViT": _timm, "timm EVA": _eva, "Llama": _llama}
    for label, build in builders.items():
        for method in ("rope-mixed", "comrope-ld", "comrope-torus"):
            torch.manual_seed(0)
            model = build()
            _perturb(model)
            x = torch.randint(64, (2, 9)) if label == "Llama" else torch.randn(2, 3, 32, 32)

            def seen(model: Any = model, x: Any = x, label: str = label) -> list[float]:
                out = model(x)
                return _numbers(out.logits if label == "Llama" else out)

            found[f"{label}, {method}, before, float32"] = seen()
            model = comrope.swap(model, method, block_size=4)
            _perturb(model, only="comrope")
            found[f"{label}, {method}, swapped, float32"] = seen(model)
            comrope.fold(model)
            found[f"{label}, {method}, folded, float32"] = seen(model)
    return found


def _timm() -> Any:
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2,
        num_classes=7,
    ).eval()  # fmt: skip


def _eva() -> Any:
    from timm.models.eva import Eva

    return Eva(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=7,
        use_rot_pos_emb=True, use_abs_pos_emb=False, ref_feat_shape=(4, 4),
    ).eval()  # fmt: skip


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _perturb(model: Any, only: str = "") -> None:
    """Add noise to every parameter, a function of its name."""
    import torch

    for name, parameter in model.named_parameters():
        if only in name:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
            draw = torch.Generator().manual_seed(seed)
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.data += (0.1 * noise).to(parameter.dtype)


def _numbers(x: Any) -> list[float]:
    """Return the norm of an output and some of its numbers, with twelve digits."""
    flat = x.detach().double().flatten()
    step = max(1, flat.numel() // KEPT)
    return [float(f"{float(y):.12g}") for y in (flat.norm(), *flat[::step][:KEPT])]


def _or_error(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (TypeError, ValueError):
        return None
