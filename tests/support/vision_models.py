"""Vision models of timm and Hugging Face, tiny and random, and what tests do with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

VIT = {
    "img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5,
}  # fmt: skip
HF = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
    "image_size": 32, "patch_size": 8, "attn_implementation": "eager",
}  # fmt: skip
TEXT = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


def vit(**more: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**{**VIT, **more})


def eva_class() -> Any:
    from timm.models.eva import Eva

    return Eva


def eva(**more: Any) -> nn.Module:
    return eva_class()(**{**VIT, "use_rot_pos_emb": True, **more})


def naflex(**more: Any) -> nn.Module:
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    cfg = {key: VIT[key] for key in ("embed_dim", "depth", "num_heads", "patch_size")}
    return NaFlexVit(NaFlexVitCfg(**cfg, **more), num_classes=5)


def blocks(name: str) -> Any:
    from timm.models import vision_transformer

    return getattr(vision_transformer, name)


def hugging(name: str, **more: Any) -> nn.Module:
    config = name.removesuffix("Model") + "Config"
    return getattr(transformers, name)(getattr(transformers, config)(**{**HF, **more}))


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(CLIPConfig(text_config=TEXT, vision_config=HF, projection_dim=16))


ABSOLUTE: dict[str, Callable[[], nn.Module]] = {
    "timm vit": vit,
    "timm vit, qk-norm, registers": lambda: vit(
        qk_norm=True, reg_tokens=2, no_embed_class=True, dynamic_img_size=True
    ),
    "timm vit, no class token": lambda: vit(class_token=False, global_pool="avg"),
    "timm vit, post-norm": lambda: vit(block_fn=blocks("ResPostBlock")),
    "timm vit, parallel": lambda: vit(block_fn=blocks("ParallelThingsBlock")),
    "timm naflex": naflex,
    "vit": lambda: hugging("ViTModel"),
    "clip vision": lambda: hugging("CLIPVisionModel"),
    "siglip vision": lambda: hugging("SiglipVisionModel"),
    "dinov2": lambda: hugging("Dinov2Model"),
    "dinov2, registers": lambda: hugging("Dinov2WithRegistersModel", num_register_tokens=2),
}
ROTARY: dict[str, Callable[[], nn.Module]] = {
    "timm eva": lambda: eva(qkv_fused=False, ref_feat_shape=(7, 7)),
    "timm eva, fused": lambda: eva(rope_grid_offset=0.5, dynamic_img_size=True),
    "timm axial": lambda: eva(attn_type="rope", rope_grid_indexing="xy", use_abs_pos_emb=False),
    "timm dinov3": lambda: eva(
        attn_type="rope", rope_type="dinov3", rope_rotate_half=True, num_reg_tokens=2
    ),
    "timm grouped": lambda: eva(attn_type="rope", qkv_fused=False, num_heads=4, num_kv_heads=2),
    "timm naflex, axial": lambda: naflex(rope_type="axial"),
    "dinov3": lambda: hugging("DINOv3ViTModel", num_register_tokens=2),
}
MIXED: dict[str, Callable[[], nn.Module]] = {
    "timm mixed": lambda: eva(attn_type="rope", rope_type="mixed", rope_grid_indexing="xy"),
    "timm naflex, mixed": lambda: naflex(rope_type="mixed"),
}
FAMILIES = ABSOLUTE | ROTARY | MIXED
PROJECTIONS = ("qkv", "q_proj", "k_proj", "query", "key")


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "timm grouped" and "num_kv_heads" not in str(inspect.signature(eva_class())):
        pytest.skip("this timm has no grouped queries")
    model = FAMILIES[family]().eval()
    with torch.no_grad():  # not all start with positions, scores and heads that matter
        for name, parameter in model.named_parameters():
            if parameter.abs().max() == 0 or "pos_embed" in name:
                parameter.normal_(std=0.2)
            elif name.endswith("head.weight"):
                parameter.normal_(std=0.3)
            elif any(word in name for word in PROJECTIONS) and name.endswith("weight"):
                parameter.mul_(20)
    return model


def method_for(family: str) -> str:
    return "comrope-torus" if family in MIXED else "comrope-ld"


def images(size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def outputs(model: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    found = model(images() if x is None else x)
    return found if isinstance(found, torch.Tensor) else found.last_hidden_state


@torch.no_grad()
def seen(model: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    return outputs(model, x)


def train(model: nn.Module, steps: int = 10) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = outputs(model).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def angles(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".comrope." in n}
