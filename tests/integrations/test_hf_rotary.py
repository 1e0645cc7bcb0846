"""Learned rotations in Hugging Face's language models."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_gradients, relative_error
from support.language_models import GROUPED, SIZES, build, logits, tokens, train

import comrope

transformers = pytest.importorskip("transformers")

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8, "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=lambda rope: rope["rope_type"])
def test_frequencies_that_depend_on_the_length_are_refused(rope):
    config = transformers.LlamaConfig(**SIZES, **GROUPED, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(config).eval()
    before, names = logits(model), set(model.state_dict())
    with pytest.raises(ValueError, match=rf"model: rope_type '{rope['rope_type']}'"):
        comrope.swap(model, "comrope-ld")
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


def test_padding_on_the_left():
    model = build("llama")
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    before = logits(model, attention_mask=mask, position_ids=positions)
    comrope.swap(model, "comrope-ap")
    after = logits(model, attention_mask=mask, position_ids=positions)
    assert relative_error(after[mask.bool()], before[mask.bool()]) < 1e-5


def test_another_model_of_the_class_is_left_alone():
    swapped, other = build("llama"), build("llama")
    before = logits(other)
    comrope.swap(swapped, "comrope-ld", init="normal")
    assert torch.equal(logits(other), before)
    assert relative_error(logits(swapped), before) > 1e-3


def test_saved_and_loaded(tmp_path):
    """As Hugging Face saves it; a model without learned rotations loads the other weights."""
    from safetensors.torch import load_file

    model = comrope.swap(build("llama"), "comrope-ld")
    train(model, steps=2)
    model.save_pretrained(tmp_path)
    other = comrope.swap(build("llama"), "comrope-ld")
    missing, unexpected = other.load_state_dict(
        load_file(tmp_path / "model.safetensors"), strict=False
    )
    assert not unexpected
    assert all("comrope" not in name for name in missing)
    assert torch.equal(logits(other), logits(model))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    comrope.unswap(model)
    torch.testing.assert_close(logits(plain), logits(model))


@pytest.mark.slow
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
