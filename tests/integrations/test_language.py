"""Learned rotations in Hugging Face's language models, tiny and random."""

from __future__ import annotations

import copy
import gc
import re
import runpy
import sys
import weakref
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_gradients, relative_error

import comrope

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


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8, "original_max_position_embeddings": 32,
}  # fmt: skip


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


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=lambda rope: rope["rope_type"])
def test_frequencies_that_depend_on_the_length_are_refused(rope):
    config = transformers.LlamaConfig(**SIZES, **GROUPED, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(config).eval()
    before, names = logits(model), set(model.state_dict())
    with pytest.raises(ValueError, match=rf"model: rope_type '{rope['rope_type']}'"):
        comrope.swap(model, "comrope-ld")
    assert set(model.state_dict()) == names
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_and_out_again(family):
    model = build(family)
    before, names = logits(model), set(model.state_dict())
    swapped = comrope.swap(model, "comrope-ld", block_size=8)
    assert swapped is model
    assert names < set(model.state_dict())
    assert relative_error(logits(model), before) < 1e-5
    comrope.unswap(model)
    assert set(model.state_dict()) == names
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", ["llama, yarn", "qwen3", "phi", "gpt_neox"])
def test_angles_are_learned_and_generation_goes_on(family):
    model = comrope.swap(build(family), "comrope-torus", block_size=4)
    angles = {n: p.detach().clone() for n, p in model.named_parameters() if "comrope" in n}
    assert len(angles) == 4
    train(model)
    learned = dict(model.named_parameters())
    assert all((learned[name] - start).abs().max() > 1e-3 for name, start in angles.items())
    options = {"max_new_tokens": 12, "do_sample": False}
    cached, anew = (model.generate(tokens(), use_cache=c, **options) for c in (True, False))
    assert torch.equal(cached, anew)


@pytest.mark.parametrize("method", comrope.METHODS)
def test_every_method_starts_where_the_model_is(method):
    model = build("llama")
    before = logits(model)
    assert relative_error(logits(comrope.swap(model, method, block_size=4)), before) < 1e-5


def test_padding_on_the_left():
    model = build("llama")
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :5] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    before = logits(model, attention_mask=mask, position_ids=places)
    comrope.swap(model, "comrope-ap")
    after = logits(model, attention_mask=mask, position_ids=places)
    assert relative_error(after[mask.bool()], before[mask.bool()]) < 1e-5


def test_a_copy_has_angles_of_its_own():
    model = comrope.swap(build("llama"), "comrope-ld")
    other = copy.deepcopy(model)
    before = logits(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "comrope" in name:
                parameter.add_(torch.randn_like(parameter))
    assert torch.equal(logits(model), before)
    assert relative_error(logits(other), before) > 1e-3


def test_another_model_of_the_class_is_left_alone():
    swapped, other = build("llama"), build("llama")
    before = logits(other)
    comrope.swap(swapped, "comrope-ld", init="normal")
    assert torch.equal(logits(other), before)
    assert relative_error(logits(swapped), before) > 1e-3


def test_saved_and_loaded(tmp_path):
    """As Hugging Face saves it; a model without rotations that learn has a place for the rest."""
    from safetensors.torch import load_file

    model = comrope.swap(build("llama"), "comrope-ld")
    train(model, steps=2)
    model.save_pretrained(tmp_path)
    other = comrope.swap(build("llama"), "comrope-ld")
    left, strange = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not strange
    assert all("comrope" not in name for name in left)
    assert torch.equal(logits(other), logits(model))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    comrope.unswap(model)
    torch.testing.assert_close(logits(plain), logits(model))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_pickled(family, tmp_path):
    model = comrope.swap(build(family), "comrope-ld")
    train(model, steps=2)
    torch.save(model, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(logits(other), logits(model))
    assert torch.equal(logits(comrope.unswap(other)), logits(comrope.unswap(model)))


def test_compiles_as_one_graph():
    torch._dynamo.reset()
    model = comrope.swap(build("llama"), "comrope-ld")
    compiled = torch.compile(model.model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got, expected = (each(tokens()).last_hidden_state for each in (compiled, model.model))
    torch.testing.assert_close(got, expected)


def test_gradient_checkpointing_and_other_attention():
    model = comrope.swap(build("llama"), "comrope-ld")
    loss = model.train()(tokens(), labels=tokens()).loss
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    checkpoint_gradients(model)
    model.set_attn_implementation("sdpa")
    model(tokens(), labels=tokens()).loss.backward()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, expected[name]) < 1e-4, name


def test_hooks_of_accelerate_stay():
    accelerate = pytest.importorskip("accelerate")
    model = build("llama")
    before = logits(model)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    comrope.swap(model, "comrope-ld")
    assert relative_error(logits(model), before) < 1e-5
    assert torch.equal(logits(comrope.unswap(model)), before)


def test_errors():
    with pytest.raises(ValueError, match=r"'Linear' is not supported; expected .* llama, mistral"):
        comrope.swap(torch.nn.Linear(2, 2))
    model = build("llama")
    with pytest.raises(ValueError, match="has nothing that"):
        comrope.unswap(model)
    before = set(dict(model.named_modules()))
    with pytest.raises(ValueError, match="block_size: expected a divisor of head_dim 16, got 5"):
        comrope.swap(model, "comrope-ld", block_size=5)
    assert set(dict(model.named_modules())) == before
    comrope.swap(model, "comrope-ld")
    with pytest.raises(ValueError, match="learned rotations already"):
        comrope.swap(model, "comrope-ld")


def test_adapters_and_angles_are_trained_and_saved_together(tmp_path):
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "target_modules": "all-linear", "modules_to_save": ["comrope"]}
    model = comrope.swap(build("llama"), "comrope-ld")
    learner = peft.get_peft_model(model, peft.LoraConfig(**lora))
    learned = {n for n, p in learner.named_parameters() if p.requires_grad}
    assert any("comrope" in name for name in learned)
    assert all("comrope" in name or "lora" in name for name in learned)
    train(learner)
    learner.save_pretrained(tmp_path)
    expected = logits(learner)
    base = comrope.swap(build("llama"), "comrope-ld")
    assert relative_error(logits(base), expected) > 1e-3
    other = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(logits(other), expected)
    plain = comrope.fold(other.merge_and_unload())
    assert relative_error(logits(plain), expected) < 1e-4


def test_the_example(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    script = Path(__file__).parents[2] / "examples" / "language_model.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--steps", "5", "--out", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    stock, swapped = re.search(r"stock ([\d.]+), swapped ([\d.]+)", said).groups()
    assert stock == swapped
    merged, folded = re.search(r"merged ([\d.]+), folded to plain RoPE ([\d.]+)", said).groups()
    assert float(merged) == pytest.approx(float(folded), abs=2e-4)
    assert float(merged) < float(stock)
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_a_swapped_model_is_gone_when_nobody_keeps_it():
    model = comrope.swap(build("llama"), "comrope-ld", block_size=4)
    weight = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
    logits(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()
