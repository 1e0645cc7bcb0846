"""Learned rotations in timm's vision transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import raises_for, relative_error
from support.vision_models import build, eva, images, outputs, seen, train, vit

import comrope
from comrope.analysis import rotary_modules
from comrope.methods import method_class


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


def test_another_patch_size():
    model, stock = build("timm vit"), build("timm vit")
    comrope.swap(model, "comrope-ld")
    for each in (model, stock):
        each.set_input_size(patch_size=4)
    assert relative_error(seen(model), seen(stock)) < 1e-5


def test_saved_and_loaded(tmp_path):
    from safetensors.torch import load_file, save_file

    model = comrope.swap(build("timm vit"), "comrope-torus")
    train(model, steps=2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = comrope.swap(vit().eval(), "comrope-torus")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(seen(other), seen(model))


def test_adapters_train_the_angles():
    peft = pytest.importorskip("peft")
    model = comrope.swap(build("timm vit"), "comrope-ld", init="normal")
    lora = peft.LoraConfig(r=2, target_modules=["qkv"], modules_to_save=["comrope"])
    learner = peft.get_peft_model(model, lora)
    outputs(learner).square().sum().backward()
    learned = [(n, p) for n, p in learner.named_parameters() if p.requires_grad and "comrope" in n]
    assert len(learned) == 4
    assert all(p.grad is not None and p.grad.any() for _, p in learned)


def test_a_base_changes_frequencies_and_not_what_positions_are():
    model = build("timm eva")
    before = seen(model)
    same = comrope.swap(copy.deepcopy(model), base=10000.0, block_size=4)
    assert relative_error(seen(same), before) < 1e-5
    other = comrope.swap(model, base=10.0, block_size=4)
    assert relative_error(seen(other), before) > 1e-5


def test_learned_frequencies_are_kept_by_every_method_that_can_have_them(method):
    model = build("timm mixed")
    before = seen(model)
    if not method_class(method).direction_per_plane:
        with raises_for("method", naming="rope-mixed"):
            comrope.swap(model, method, block_size=4)
        return
    swapped = copy.deepcopy(comrope.swap(model, method, block_size=4))
    assert relative_error(seen(swapped), before) < 1e-5
    for rotation in rotary_modules(swapped).values():
        rotation.reset_parameters()
    assert relative_error(seen(swapped), before) < 1e-5


@pytest.mark.parametrize("option", [{"base": 10.0}, {"position_scale": 2.0}, {"spread": 2.0}])
def test_learned_frequencies_take_no_options(option):
    with pytest.raises(ValueError, match=f"^(base, position_scale|{next(iter(option))}): "):
        comrope.swap(build("timm mixed"), "rope-mixed", **option)


def test_a_rotary_embedding_that_its_layers_do_not_follow():
    model = eva(attn_type="rope", rope_type="dinov3", rope_rotate_half=True)
    model.rope.rotate_half = False  # timm before 1.0.31 made such models by itself
    with raises_for("model", naming="rotate_half"):
        comrope.swap(model, "comrope-torus")


def test_augmented_coordinates_stay_augmented():
    """With the same random numbers as in timm."""
    model = build("timm dinov3")
    model.rope.shift_coords, model.rope.jitter_coords, model.rope.rescale_coords = 0.4, 1.5, 2.0
    model.rope.aug_active = True
    swapped = comrope.swap(copy.deepcopy(model), "comrope-ld", block_size=4)
    still = seen(model)
    assert relative_error(seen(swapped), still) < 1e-5
    for each in (model.train(), swapped.train()):
        torch.manual_seed(5)
        each.moved = seen(each)
    assert relative_error(model.moved, still) > 1e-4
    assert relative_error(swapped.moved, model.moved) < 1e-5


@pytest.mark.parametrize("kind", ["dinov3", "cat"])
@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_whichever_axis_comes_first(kind, indexing):
    options = {"rope_grid_indexing": indexing, "rope_type": kind, "img_size": (32, 48)}
    model = eva(rope_rotate_half=True, attn_type="rope", **options)
    x = torch.randn(1, 3, 32, 48)
    before = seen(model, x)
    assert relative_error(seen(comrope.swap(model, "comrope-ld", block_size=4), x), before) < 1e-5


def test_other_augmentations_of_coordinates_are_refused():
    model = build("timm eva")
    model.rope.aug_active = True
    with raises_for("model", naming="RotaryEmbeddingCat"):
        comrope.swap(model, "comrope-ld", block_size=4)


def test_a_copy_after_a_forward_pass_that_failed():
    model = comrope.swap(build("timm vit"), "comrope-ld", init="normal")
    expected = seen(model)
    handle = model.blocks[0].attn.k_norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(images())
    handle.remove()
    assert torch.equal(seen(copy.deepcopy(model)), expected)
