"""Whole models while they are scaled, and after it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers import raises_for, relative_error
from support import language_models as language
from support import vision_models as vision

import comrope
from comrope.analysis import rotary_modules
from comrope.scaling import NTK, Linear, YaRN

SCALINGS = [Linear(4.0), NTK(4.0), YaRN(4.0, 1024.0)]


def nano(**options):
    torch.manual_seed(0)
    options = {"position": "comrope-ld", "num_classes": 5, **options}
    return comrope.create_model("vit_nano_patch8_32", **options).eval()


@pytest.mark.parametrize("family", ["timm vit", "timm dinov3", "vit", "nano"])
def test_the_attention_factor_reaches_the_scores_of_a_model(family):
    """Scores are multiplied by its square, which the weights of queries and keys can do as well."""
    if family == "nano":
        model = nano(rotate_values=True)
    else:
        model = comrope.swap(vision.build(family), "comrope-ld", init="normal", block_size=4)
    before = vision.seen(model)
    with comrope.scaled(model, YaRN(1.0, 1.0, attention_factor=1.5)):
        found = vision.seen(model)
    assert relative_error(found, before) > 1e-3
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(f"{part}." in name for part in vision.PROJECTIONS):
                rows = parameter.shape[0] * 2 // 3 if "qkv" in name else parameter.shape[0]
                parameter[:rows] *= 1.5
    assert relative_error(vision.seen(model), found) < 1e-5


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_swapped_llama_is_scaled_as_transformers_scales_it(kind):
    """The same weights with a scaled configuration there, and with ``scaled`` here."""
    transformers = language.transformers
    more = {} if kind == "linear" else {
        "original_max_position_embeddings": 32, "truncate": False, "beta_fast": 4.0,
    }  # fmt: skip
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **more}
    options = {**language.SIZES, **language.GROUPED}
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**options, rope_parameters=rope)
    ).eval()
    model = language.build("llama")
    model.load_state_dict(theirs.state_dict())
    before = language.logits(model)
    assert relative_error(language.logits(theirs), before) > 1e-3
    comrope.swap(model, "comrope-ld", block_size=4)
    scaling = Linear(4.0) if kind == "linear" else YaRN(4.0, 32.0, beta_fast=4.0)
    with comrope.scaled(model, scaling), torch.no_grad():
        assert relative_error(language.logits(model), language.logits(theirs)) < 1e-5
        options = {"max_new_tokens": 8, "do_sample": False}
        cached, anew = (
            model.generate(language.tokens(), use_cache=c, **options) for c in (True, False)
        )
        assert torch.equal(cached, anew)
    assert relative_error(language.logits(model), before) < 1e-5


def test_a_model_with_a_factor_of_its_own_keeps_it():
    model = comrope.swap(language.build("llama, yarn"), "rope-mixed")
    own = {rope.attention_scaling for rope in rotary_modules(model).values()}
    assert own == {0.1 * math.log(4) + 1}
    before = language.logits(model)
    with comrope.scaled(model, YaRN(2.0, 32.0, attention_factor=1.25)):
        assert {rope.attention_scaling for rope in rotary_modules(model).values()} == {
            1.25 * own.pop()
        }
    assert torch.equal(language.logits(model), before)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
def test_everything_is_restored(scaling):
    """Values, attributes, state dict: after an error inside as well."""
    model = nano()
    attributes = {
        name: {key: value for key, value in vars(module).items() if not key.startswith("_")}
        for name, module in model.named_modules()
    }
    state, before = copy.deepcopy(model.state_dict()), vision.seen(model)

    def work() -> None:
        with comrope.scaled(model, scaling) as given:
            assert given is model
            assert relative_error(vision.seen(model), before) > 1e-4
            assert model.state_dict().keys() == state.keys()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert torch.equal(vision.seen(model), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for name, module in model.named_modules():
        now = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        assert now == attributes[name], name


def test_all_layers_at_once_are_scaled_as_one_by_one():
    model = nano()
    with comrope.scaled(model, NTK(4.0)), torch.no_grad():
        together = model._angles()
        for block, angles in zip(model.blocks, together, strict=True):
            assert torch.equal(angles.matrices(), block.attn.rope.angle_matrices())


def test_a_part_of_a_model_is_scaled_alone():
    model = nano()
    whole = [block.attn.rope.angle_matrices() for block in model.blocks]
    before = vision.seen(model)
    with comrope.scaled(model.blocks[1], Linear(2.0)):
        assert relative_error(vision.seen(model), before) > 1e-4
        part = [block.attn.rope.angle_matrices() for block in model.blocks]
        for block, angles in zip(model.blocks, model._angles(), strict=True):
            assert angles is None or torch.equal(
                angles.matrices(), block.attn.rope.angle_matrices()
            )
    assert [torch.equal(a, b) for a, b in zip(part, whole, strict=True)] == [True, False, True]


def test_modules_that_are_used_twice_are_scaled_once():
    model = nano(position="rope-mixed", init="rope")
    first, second, third = (block.attn for block in model.blocks)
    second.rope = first.rope
    third.rope.method = first.rope.method
    before = first.rope.spectrum()[1].clone()
    with comrope.scaled(model, Linear(2.0)):
        for attention in (first, second, third):
            assert torch.equal(attention.rope.spectrum()[1], before / 2)
    for attention in (first, second, third):
        assert torch.equal(attention.rope.spectrum()[1], before)


def test_a_scaled_model_is_not_scaled_again_nor_folded():
    model = nano()
    before = vision.seen(model)
    with comrope.scaled(model, NTK(4.0)):
        inside = vision.seen(model)
        with raises_for("model", naming="NTK"), comrope.scaled(model, Linear(2.0)):
            pass
        with raises_for("model", naming="NTK"):
            comrope.fold(model)
        assert torch.equal(vision.seen(model), inside)
    assert torch.equal(vision.seen(model), before)
    with comrope.scaled(comrope.fold(model), NTK(4.0)):  # a folded model is scaled in the same way
        assert relative_error(vision.seen(model), inside) < 1e-4


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
def test_a_copy_that_is_exported_inside_is_scaled(scaling):
    from comrope.models.export import Exportable

    model = nano(rotate_values=True)
    with comrope.scaled(model, scaling):
        inside, exported = vision.seen(model), Exportable(model)
    assert relative_error(vision.seen(exported), inside) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
def test_a_compiled_model_is_compiled_anew(scaling):
    torch._dynamo.reset()
    model = nano(num_classes=3)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    plain = nano(num_classes=3)
    assert relative_error(vision.seen(model), vision.seen(plain)) < 1e-6
    with comrope.scaled(model, scaling), comrope.scaled(plain, scaling):
        assert relative_error(vision.seen(model), vision.seen(plain)) < 1e-6
    assert relative_error(vision.seen(model), vision.seen(plain)) < 1e-6
