"""``swap`` and ``unswap``, on models of timm and Hugging Face, tiny and random."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch
from helpers import fits, raises_for, relative_error
from support import language_models as language
from support import vision_models
from support.vision_models import (
    ABSOLUTE,
    FAMILIES,
    angles,
    blocks,
    build,
    images,
    method_for,
    seen,
    train,
    vit,
)
from torch import nn

import comrope
from comrope.integrations.hf_rotary import ScaledRotation
from comrope.integrations.rebinding import ROTATION
from comrope.methods import method_class

SLOW = pytest.mark.slow


@pytest.mark.parametrize("family", FAMILIES)
def test_vision_models_in_and_out_again(family):
    model = build(family)
    before, names = seen(model), set(model.state_dict())
    learned = {name: p.requires_grad for name, p in model.named_parameters()}
    assert comrope.swap(model, method_for(family), block_size=4) is model
    assert names < set(model.state_dict())
    assert relative_error(seen(model), before) < 1e-5
    comrope.unswap(model)
    assert set(model.state_dict()) == names
    assert {name: p.requires_grad for name, p in model.named_parameters()} == learned
    assert torch.equal(seen(model), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_depend_on_the_rotation(family):
    """Otherwise outputs that stay the same would show nothing."""
    model = build(family)
    before = seen(model)
    other = "normal" if family in ABSOLUTE else "zeros"
    comrope.swap(model, method_for(family), init=other, block_size=4)
    assert relative_error(seen(model), before) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_angles_are_learned(family):
    model = comrope.swap(build(family), method_for(family), block_size=4)
    start, before = angles(model), seen(model)
    train(model)
    learned = angles(model)
    assert len(start) >= 4
    for name, value in start.items():
        assert (learned[name] - value).abs().max() > 1e-3, name
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in start:
                parameter.copy_(start[name])
    assert relative_error(seen(model), before) > 1e-3


ONCE = {  # every method and every library in the fast tests; others with timm eva
    "rope": "timm eva", "rope-mixed": "clip vision", "liere": "dinov3",
    "comrope-ap": "clip vision", "comrope-ld": "timm vit", "comrope-torus": "timm eva",
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=() if ONCE.get(method, "timm eva") == family else SLOW)
        for family in ("timm vit", "clip vision", "timm eva", "dinov3")
        for method in comrope.METHODS
        if family not in ABSOLUTE or method_class(method).starts_at_zero
    ],
)
def test_every_method_starts_where_the_model_is(family, method):
    model = build(family)
    before = seen(model)
    assert relative_error(seen(comrope.swap(model, method, block_size=4)), before) < 1e-5


@pytest.mark.parametrize("family", ["timm vit", "timm naflex", "vit", "clip vision", "dinov2"])
def test_absolute_positions_can_be_dropped(family):
    model = build(family)
    before = seen(model)
    comrope.swap(model, "comrope-ld", ape="drop")
    assert relative_error(seen(model), before) > 1e-4
    dropped = [p for n, p in model.named_parameters() if "pos_embed" in n or "position_emb" in n]
    assert dropped
    assert all(not p.any() and not p.requires_grad for p in dropped)
    comrope.unswap(model)
    assert torch.equal(seen(model), before)


@pytest.mark.parametrize("family", ["timm vit", "clip vision"])
def test_a_copy_has_angles_and_positions_of_its_own(family):
    model = comrope.swap(build(family), "comrope-ld")
    other = copy.deepcopy(model)
    before = seen(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if ".comrope." in name:
                parameter.normal_()
    assert torch.equal(seen(model), before)
    assert relative_error(seen(other), before) > 1e-3
    comrope.unswap(other)
    assert relative_error(seen(other), before) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["timm vit", "timm eva", "vit", "dinov3"])
def test_compiles_as_one_graph(family):
    torch._dynamo.reset()
    model = comrope.swap(build(family), "comrope-ld", init="normal")
    expected = seen(model)
    got = seen(torch.compile(model, fullgraph=family.startswith("timm"), backend="aot_eager"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["timm vit", "vit", "clip vision", "dinov3"])
def test_pickled_vision_models(family, tmp_path):
    model = comrope.swap(build(family), "comrope-ld", init="normal")
    torch.save(model, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(seen(other), seen(model))
    comrope.unswap(other)
    assert relative_error(seen(other), seen(comrope.unswap(model))) == 0


def test_errors_of_vision_models():
    with raises_for("class_position"):
        comrope.swap(build("vit"), class_position="left")
    with raises_for("ape"):
        comrope.swap(build("vit"), ape="forget")
    with pytest.raises(ValueError, match="expected none of these for a model of transformers that"):
        comrope.swap(build("dinov3"), ape="drop")
    with raises_for("method", naming="comrope-ld"):
        comrope.swap(build("timm mixed"), "comrope-ld")
    scaling = vit(block_fn=blocks("ParallelScalingBlock"))
    with raises_for("model", naming="ParallelScalingBlock"):
        comrope.swap(scaling)
    with raises_for("model", naming="patch_drop_rate"):
        comrope.swap(vit(patch_drop_rate=0.5))
    with raises_for("method", naming="rope"):
        comrope.swap(vit(), "rope")
    with torch.device("meta"):
        nowhere = vit()
    with raises_for("model", naming="meta device"):
        comrope.swap(nowhere)


def test_missing_parameters_stop_unswap_before_it_changes_anything():
    model = comrope.swap(build("timm vit"), ape="drop")
    model.set_input_size(48)
    before = seen(model, images((48, 48)))
    with raises_for("model", naming="pos_embed"):
        comrope.unswap(model)
    assert torch.equal(seen(model, images((48, 48))), before)


@pytest.mark.parametrize(
    ("family", "package", "version", "oldest"),
    [
        ("timm vit", "timm", "1.0.20", "1.0.29"),
        ("vit", "transformers", "5.0.0", "5.17"),
        ("dinov3", "transformers", "5.9.1", "5.17"),
    ],
)
def test_libraries_that_are_too_old(family, package, version, oldest, monkeypatch):
    model = build(family)
    names = set(model.state_dict())
    monkeypatch.setattr(sys.modules[package], "__version__", version)
    with pytest.raises(ImportError, match=f"needs {package} {oldest} or newer .* found {version}"):
        comrope.swap(model)
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deleted_vision_model_frees_its_memory(family):
    """At once, not at the next garbage collection: on a GPU it may be gigabytes."""
    model = build(family)
    gc.disable()
    try:
        weights = [weakref.ref(parameter) for parameter in model.parameters()]
        comrope.swap(model, "comrope-torus")
        seen(model)
        del model
        assert [weight() for weight in weights if weight() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("family", language.FAMILIES)
def test_language_models_in_and_out_again(family):
    model = language.build(family)
    before, names = language.logits(model), set(model.state_dict())
    swapped = comrope.swap(model, "comrope-ld", block_size=8)
    assert swapped is model
    assert names < set(model.state_dict())
    assert relative_error(language.logits(model), before) < 1e-5
    comrope.unswap(model)
    assert set(model.state_dict()) == names
    assert torch.equal(language.logits(model), before)


@pytest.mark.parametrize("method", [m for m in comrope.METHODS if fits(m, num_axes=1)])
def test_every_method_starts_where_the_language_model_is(method):
    model = language.build("llama")
    before = language.logits(model)
    assert relative_error(language.logits(comrope.swap(model, method, block_size=4)), before) < 1e-5


def test_a_copy_of_a_language_model_has_angles_of_its_own():
    model = comrope.swap(language.build("llama"), "comrope-ld")
    other = copy.deepcopy(model)
    before = language.logits(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "comrope" in name:
                parameter.add_(torch.randn_like(parameter))
    assert torch.equal(language.logits(model), before)
    assert relative_error(language.logits(other), before) > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_pickled_language_models(family, tmp_path):
    model = comrope.swap(language.build(family), "comrope-ld")
    language.train(model, steps=2)
    torch.save(model, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(language.logits(other), language.logits(model))
    assert torch.equal(
        language.logits(comrope.unswap(other)), language.logits(comrope.unswap(model))
    )


def test_errors_of_language_models():
    with raises_for("model", naming="Linear"):
        comrope.swap(torch.nn.Linear(2, 2))
    model = language.build("llama")
    with raises_for("model", naming="LlamaForCausalLM"):
        comrope.unswap(model)
    before = set(dict(model.named_modules()))
    with raises_for("block_size"):
        comrope.swap(model, "comrope-ld", block_size=5)
    assert set(dict(model.named_modules())) == before
    comrope.swap(model, "comrope-ld")
    with raises_for("model", naming="comrope.unswap"):
        comrope.swap(model, "comrope-ld")


def test_a_deleted_language_model_frees_its_memory():
    model = comrope.swap(language.build("llama"), "comrope-ld", block_size=4)
    weight = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
    language.logits(model)
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_what_is_not_a_plain_model():
    with raises_for("model", TypeError, naming="timm.create_model"):
        comrope.swap("vit_base_patch16_224")
    with raises_for("model", naming="model._orig_mod"):
        comrope.swap(torch.compile(vit()))
    with raises_for("model", naming="model.module"):
        comrope.swap(nn.DataParallel(vit()))


OLD_NAMES = [  # (module and name now, in version 0.1), as pickles contain them
    ("token_positions\nTokenPositions", "places\nPlaces"),
    ("token_positions\nnormalized", "places\nrelative"),
    ("timm_vit\nRotateQueries", "timm_models\nTurnedQueries"),
    ("timm_vit\nRotateKeys", "timm_models\nTurnedKeys"),
    ("timm_vit\nWithoutRope", "timm_models\nUnrotated"),
    ("hf_vision\n", "absolute\n"),
    ("hf_rotary\nTextPositions", "rotating\nTokenPositions"),
    ("hf_rotary\n", "rotating\n"),
    ("fold\n", "folding\n"),
]


def test_pickles_of_version_0_1_scale_queries_and_keys():
    """As YaRN does: they have another class and another attribute."""
    model = comrope.swap(language.build("llama, yarn"), "comrope-ld")
    expected = language.logits(model)
    for layer in [part for part in model.modules() if ROTATION in part._modules]:
        state = dict(vars(layer.comrope))
        state["scaling"] = state.pop("attention_scaling")
        layer.comrope = ScaledRotation.__new__(ScaledRotation)
        layer.comrope.__setstate__(state)
    assert torch.equal(language.logits(model), expected)
    model = pickle.loads(pickle.dumps(model))
    assert torch.equal(language.logits(model), expected)


@pytest.mark.parametrize("family", ["timm vit", "vit", "llama", "qwen3"])
def test_pickles_of_version_0_1(family):
    """They name modules, classes and attributes by their old names."""
    source = language if family in language.FAMILIES else vision_models
    model = comrope.swap(source.build(family), "comrope-ld", init="normal")
    if family == "qwen3":
        comrope.fold(model)
    written = pickle.dumps(model, protocol=0)
    package = b"comrope.integrations."
    for new, old in OLD_NAMES:
        written = written.replace(package + new.encode(), package + old.encode())
    assert b"\nTokenPositions\n" not in written.replace(b"rotating\nTokenPositions\n", b"")
    written = written.replace(b"Vdisabled\n", b"Vaway\n")  # an attribute
    other, run = pickle.loads(written), source.logits if source is language else seen
    assert torch.equal(run(other), run(model))
    if family != "qwen3":
        comrope.unswap(other)
        assert torch.equal(run(other), run(comrope.unswap(model)))
