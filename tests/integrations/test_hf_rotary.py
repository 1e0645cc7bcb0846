"""Learned rotations in Hugging Face's language models."""

from __future__ import annotations

import copy
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_gradients, raises_for, relative_error
from support.language_models import FAMILIES, build, logits, tokens, train

import comrope

transformers = pytest.importorskip("transformers")


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


# Rotated values

SEPARATE = [name for name in FAMILIES if name != "gpt_neox"]


def bend(model: torch.nn.Module) -> None:
    """Move all rotations of values away from zero."""
    for name, parameter in model.named_parameters():
        if "comrope_values" in name:
            torch.nn.init.normal_(parameter, std=0.3)


@pytest.mark.parametrize("family", SEPARATE)
def test_rotated_values_start_at_zero_and_learn(family):
    model = build(family)
    before = logits(model)
    names = set(model.state_dict())
    comrope.swap(model, "comrope-ld", block_size=4, rotate_values=True)
    assert relative_error(logits(model), before) < 1e-5
    values = {n: p for n, p in model.named_parameters() if "comrope_values" in n}
    start = {name: parameter.detach().clone() for name, parameter in values.items()}
    train(model)
    assert len(values) == 4
    assert all((values[name] - start[name]).abs().max() > 1e-3 for name in values)
    assert set(comrope.unswap(model).state_dict()) == names


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi"])
def test_rotated_values_are_those_of_the_formula(family):
    """Without a rotation of queries and keys: out_i = sum_j a_ij R(i)^T R(j) v_j."""
    model = comrope.swap(build(family), "comrope-ld", block_size=4, rotate_values=True)
    bend(model)
    layer = next(m for m in model.modules() if hasattr(m, "comrope_values"))
    rotation = layer.comrope_values
    seen = {}
    out = layer.o_proj if hasattr(layer, "o_proj") else layer.dense
    layer.v_proj.register_forward_hook(lambda m, i, o: seen.update(values=o))
    out.register_forward_pre_hook(lambda m, i: seen.update(mixed=i[0]))
    model.set_attn_implementation("eager")
    layer.register_forward_hook(lambda m, i, o: seen.update(weights=o[1]))
    logits(model)
    place = torch.arange(24.0)[:, None]
    matrices = torch.stack([torch.block_diag(*head) for each in
                            rotation.rotation_matrices(place) for head in each])  # fmt: skip
    matrices = matrices.unflatten(0, (24, rotation.num_heads))  # (T, H, D, D)
    values = seen["values"].unflatten(-1, (rotation.num_heads, -1))  # (B, T, H, D)
    groups = seen["weights"].shape[1] // rotation.num_heads
    rotated = torch.einsum("thde,bthe->bhtd", matrices, values).repeat_interleave(groups, 1)
    mixed = seen["weights"] @ rotated
    back = torch.einsum("thed,bhte->bthd", matrices.repeat_interleave(groups, 1), mixed)
    assert relative_error(seen["mixed"], back.flatten(2)) < 1e-5


def test_rotated_values_with_a_cache_adapters_and_folded(tmp_path):
    model = comrope.swap(build("llama"), "comrope-torus", block_size=4, rotate_values=True)
    bend(model)
    options = {"max_new_tokens": 12, "do_sample": False}
    cached, anew = (model.generate(tokens(), use_cache=c, **options) for c in (True, False))
    assert torch.equal(cached, anew)
    expected = logits(model)
    assert relative_error(logits(build("llama")), expected) > 1e-3
    assert relative_error(logits(comrope.fold(copy.deepcopy(model))), expected) < 1e-4
    peft = pytest.importorskip("peft")
    learner = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in learner.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted = logits(learner)
    assert relative_error(adapted, expected) > 1e-3
    assert relative_error(logits(learner.merge_and_unload()), adapted) < 1e-4


@pytest.mark.slow
def test_rotated_values_compile_as_one_graph():
    torch._dynamo.reset()
    model = comrope.swap(build("llama"), "comrope-ld", block_size=4, rotate_values=True)
    bend(model)
    compiled = torch.compile(model.model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got, expected = (each(tokens()).last_hidden_state for each in (compiled, model.model))
    torch.testing.assert_close(got, expected)


def test_values_that_cannot_be_rotated():
    model = build("gpt_neox")
    names = set(model.state_dict())
    with raises_for("rotate_values", naming="v_proj"):
        comrope.swap(model, "comrope-ld", block_size=4, rotate_values=True)
    with raises_for("rotate_values", naming="'rope'"):
        comrope.swap(build("llama"), "rope", rotate_values=True)
    assert set(model.state_dict()) == names
