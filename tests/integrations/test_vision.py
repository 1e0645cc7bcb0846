"""Learned rotations in the vision models of timm and Hugging Face, tiny and random."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from helpers import checkpoint_gradients, relative_error
from torch import nn
from vision_models import (
    ABSOLUTE,
    FAMILIES,
    angles,
    blocks,
    build,
    clip,
    images,
    method_for,
    outputs,
    seen,
    train,
    vit,
)

import comrope


@pytest.mark.parametrize("family", FAMILIES)
def test_in_and_out_again(family):
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
def test_a_model_notices_how_it_is_turned(family):
    """So that outputs which stay the same mean something."""
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


@pytest.mark.parametrize(
    ("family", "method"),
    [
        (family, method)
        for family in ("timm vit", "clip vision", "timm eva", "dinov3")
        for method in comrope.METHODS
        # Vanilla RoPE has no angles that could start at zero.
        if method != "rope" or family not in ABSOLUTE
    ],
)
def test_every_method_starts_where_the_model_is(family, method):
    model = build(family)
    before = seen(model)
    assert relative_error(seen(comrope.swap(model, method, block_size=4)), before) < 1e-5


@pytest.mark.parametrize(
    "family", ["timm vit, qk-norm, registers", "timm eva, fused", "timm naflex, axial", "dinov3"]
)
def test_other_sizes_of_image(family):
    model, x = build(family), images((40, 24))
    before = seen(model, x)
    comrope.swap(model, "comrope-ap", block_size=4)
    assert relative_error(seen(model, x), before) < 1e-5


def test_sizes_that_differ_in_a_batch():
    """NaFlex: patches of several images, padded to one length."""
    grids = [(2, 3), (3, 1)]
    generator = torch.Generator().manual_seed(0)
    batch = {
        "patches": torch.randn(2, 6, 8 * 8 * 3, generator=generator),
        "patch_coord": torch.zeros(2, 6, 2, dtype=torch.long),
        "patch_valid": torch.zeros(2, 6, dtype=torch.bool),
    }
    for number, (rows, columns) in enumerate(grids):
        index = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        batch["patch_coord"][number, : len(index)] = index
        batch["patch_valid"][number, : len(index)] = True
    model = build("timm naflex, axial")
    before = seen(model, batch)
    comrope.swap(model, "comrope-ld", block_size=4)
    assert relative_error(seen(model, batch), before) < 1e-5
    alone = {key: value[:1, :6] for key, value in batch.items()}
    torch.testing.assert_close(seen(model, batch)[:1], seen(model, alone), rtol=1e-4, atol=1e-5)


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


def test_without_absolute_positions_only_rotations_tell_places_apart():
    """A ViT without class token, its patches shuffled: nothing changes until angles turn."""
    model = build("timm vit, no class token")
    comrope.swap(model, "comrope-ld", ape="drop")
    x = images()
    shuffled = torch.cat((x[..., 8:], x[..., :8]), dim=-1)
    assert relative_error(seen(model, shuffled), seen(model, x)) < 1e-5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".comrope." in name:
                parameter.normal_()
    assert relative_error(seen(model, shuffled), seen(model, x)) > 1e-4


def test_the_text_beside_the_images_is_left_alone():
    torch.manual_seed(0)
    model = clip().eval()
    words = torch.randint(1, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    ask = {"input_ids": words, "pixel_values": images()}
    with torch.no_grad():
        before = model(**ask).logits_per_image
        comrope.swap(model, "comrope-torus", ape="keep")
        names = [n for n in dict(model.named_modules()) if n.endswith(".comrope")]
        assert names
        assert all(name.startswith("vision_model.") for name in names)
        assert relative_error(model(**ask).logits_per_image, before) < 1e-5


def test_noise_on_positions_in_training_only():
    model = comrope.swap(build("timm vit"), "comrope-ld", init="normal", perturbation=1.0)
    assert torch.equal(seen(model), seen(model))
    model.train()
    assert relative_error(seen(model), seen(model)) > 1e-4


@pytest.mark.parametrize("family", ["timm vit", "clip vision"])
def test_a_copy_has_angles_and_places_of_its_own(family):
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


@pytest.mark.parametrize("family", ["timm vit", "timm eva", "vit", "dinov3"])
def test_compiles_as_one_graph(family):
    torch._dynamo.reset()
    model = comrope.swap(build(family), "comrope-ld", init="normal")
    expected = seen(model)
    got = seen(torch.compile(model, fullgraph=family.startswith("timm"), backend="aot_eager"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["timm vit", "vit"])
def test_gradient_checkpointing(family):
    model = comrope.swap(build(family), "comrope-ld", init="normal").train()
    outputs(model).square().mean().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    checkpoint_gradients(model)
    outputs(model).square().mean().backward()
    for name, value in expected.items():
        assert relative_error(dict(model.named_parameters())[name].grad, value) < 1e-4, name


def test_attention_by_another_name():
    model = comrope.swap(build("vit"), "comrope-ld", init="normal")
    expected = seen(model)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(seen(model), expected, rtol=1e-4, atol=1e-5)


def test_saved_and_loaded(tmp_path):
    from safetensors.torch import load_file, save_file

    model = comrope.swap(build("timm vit"), "comrope-torus")
    train(model, steps=2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = comrope.swap(vit().eval(), "comrope-torus")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(seen(other), seen(model))


def test_errors():
    with pytest.raises(ValueError, match="class_position: expected one of center, unrotated"):
        comrope.swap(build("vit"), class_position="left")
    with pytest.raises(ValueError, match="ape: expected one of keep, drop"):
        comrope.swap(build("vit"), ape="forget")
    with pytest.raises(ValueError, match="expected none of these for a model of transformers that"):
        comrope.swap(build("dinov3"), ape="drop")
    with pytest.raises(ValueError, match="'comrope-ld' cannot start where every plane has a dir"):
        comrope.swap(build("timm mixed"), "comrope-ld")
    scaling = vit(block_fn=blocks("ParallelScalingBlock"))
    with pytest.raises(ValueError, match="layers of type ParallelScalingBlock are not supported"):
        comrope.swap(scaling)
    with pytest.raises(ValueError, match="dropped patches are not supported"):
        comrope.swap(vit(patch_drop_rate=0.5))
    with pytest.raises(ValueError, match="'rope' learns nothing"):
        comrope.swap(vit(), "rope")
    with torch.device("meta"):
        nowhere = vit()
    with pytest.raises(ValueError, match="got some on the meta device"):
        comrope.swap(nowhere)


def test_tokens_that_nobody_told_of():
    model = comrope.swap(build("timm vit"))
    model.cls_token = nn.Parameter(torch.zeros(1, 3, 64))
    model.no_embed_class, model.pos_embed = True, nn.Parameter(model.pos_embed.data[:, 1:])
    with pytest.raises(ValueError, match="expected 1 and one for each of the 16 patches, got 19"):
        model(images())


@pytest.mark.parametrize("family", ["timm vit", "vit", "clip vision", "dinov3"])
def test_pickled(family, tmp_path):
    model = comrope.swap(build(family), "comrope-ld", init="normal")
    torch.save(model, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(seen(other), seen(model))
    comrope.unswap(other)
    assert relative_error(seen(other), seen(comrope.unswap(model))) == 0


@pytest.mark.parametrize("family", ["timm vit", "vit"])
def test_a_forward_pass_cannot_be_repeated_at_positions_that_are_gone(family):
    model = comrope.swap(build(family), "comrope-ld", init="normal", perturbation=1.0).train()
    checkpoint_gradients(model)
    for _ in range(2):
        outputs(model).sum().backward()
        seen(model)  # a look in between does no harm
    both = outputs(model).sum() + outputs(model).sum()
    with pytest.raises(RuntimeError, match="the positions of this forward pass are gone"):
        both.backward()


def test_adapters_train_the_angles_that_turn():
    peft = pytest.importorskip("peft")
    model = comrope.swap(build("timm vit"), "comrope-ld", init="normal")
    lora = peft.LoraConfig(r=2, target_modules=["qkv"], modules_to_save=["comrope"])
    learner = peft.get_peft_model(model, lora)
    outputs(learner).square().sum().backward()
    learned = [(n, p) for n, p in learner.named_parameters() if p.requires_grad and "comrope" in n]
    assert len(learned) == 4
    assert all(p.grad is not None and p.grad.any() for _, p in learned)


def test_another_patch_size():
    model, stock = build("timm vit"), build("timm vit")
    comrope.swap(model, "comrope-ld")
    for each in (model, stock):
        each.set_input_size(patch_size=4)
    assert relative_error(seen(model), seen(stock)) < 1e-5


def test_what_is_not_there_any_more_stops_unswap_before_it_begins():
    model = comrope.swap(build("timm vit"), ape="drop")
    model.set_input_size(48)
    before = seen(model, images((48, 48)))
    with pytest.raises(ValueError, match="pos_embed is not what it was"):
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
