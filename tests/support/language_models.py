"""Hugging Face's language models, tiny and random, and what tests do with them."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 65, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "attn_implementation": "eager",
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
FAMILIES = {
    "llama": ("Llama", GROUPED),
    "llama, linear": ("Llama", {**GROUPED, "rope_parameters": LINEAR}),
    "llama, llama3": ("Llama", {**GROUPED, "rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", {**GROUPED, "rope_parameters": YARN}),
    "mistral": ("Mistral", GROUPED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16}),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 16}),
    "phi": ("Phi", {**GROUPED, "rope_parameters": HALF}),
    "gpt_neox": ("GPTNeoX", {"rope_parameters": HALF}),
}


def build(family: str) -> torch.nn.Module:
    name, more = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def tokens() -> torch.Tensor:
    return torch.randint(3, 65, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: torch.nn.Module, **more) -> torch.Tensor:
    return model(tokens(), **more).logits


def train(model: torch.nn.Module, steps: int = 10) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = model(tokens(), labels=tokens()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
