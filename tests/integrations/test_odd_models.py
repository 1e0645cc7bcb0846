"""Models and calls that are out of the ordinary: turned rightly, or refused."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from helpers import relative_error
from vision_models import FAMILIES, build, clip, eva, images, seen

import comrope


def test_text_positions_stay_under_any_name():
    """Wrapped by PEFT, all names have a prefix."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"])
    model = comrope.swap(peft.get_peft_model(clip(), lora), ape="drop")
    positions = {n: p for n, p in model.named_parameters() if "position_embedding" in n}
    assert {bool(p.any()) for n, p in positions.items() if "text_model" in n} == {True}
    assert {bool(p.any()) for n, p in positions.items() if "vision_model" in n} == {False}


def test_noise_where_images_differ_in_size_is_refused():
    model = comrope.swap(build("timm naflex"), perturbation=1.0)
    batch = {
        "patches": torch.randn(1, 4, 192),
        "patch_coord": torch.cartesian_prod(torch.arange(2), torch.arange(2))[None],
        "patch_valid": torch.ones(1, 4, dtype=torch.bool),
    }
    seen(model, batch)
    with pytest.raises(ValueError, match="perturbation: expected 0 where images of a batch differ"):
        model.train()(batch)


def test_a_base_changes_frequencies_and_not_what_positions_are():
    model = build("timm eva")
    before = seen(model)
    same = comrope.swap(copy.deepcopy(model), base=10000.0, block_size=4)
    assert relative_error(seen(same), before) < 1e-5
    other = comrope.swap(model, base=10.0, block_size=4)
    assert relative_error(seen(other), before) > 1e-5


def test_a_rotary_embedding_that_its_layers_do_not_follow():
    model = eva(attn_type="rope", rope_type="dinov3", rope_rotate_half=True)
    model.rope.rotate_half = False  # timm before 1.0.31 made such models by itself
    with pytest.raises(ValueError, match="differ in rotate_half"):
        comrope.swap(model, "comrope-torus")


def test_coordinates_that_move_in_training_go_on_moving():
    """As timm draws them, number by number."""
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


def test_coordinates_that_move_in_ways_not_known_are_refused():
    model = build("timm eva")
    model.rope.aug_active = True
    with pytest.raises(ValueError, match="moves coordinates in training"):
        comrope.swap(model, "comrope-ld", block_size=4)


def test_another_order_of_channels_is_not_given_back_to_timm():
    model = comrope.swap(build("timm mixed"), "rope-mixed", channel_order="half", block_size=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    before = seen(model)
    assert relative_error(seen(comrope.fold(model)), before) < 1e-4


def test_what_was_frozen_stays_frozen():
    model = comrope.swap(build("timm vit"), "comrope-ld").requires_grad_(False)
    comrope.fold(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_copy_after_a_forward_pass_that_failed():
    model = comrope.swap(build("timm vit"), "comrope-ld", init="normal")
    expected = seen(model)
    handle = model.blocks[0].attn.k_norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(images())
    handle.remove()
    assert torch.equal(seen(copy.deepcopy(model)), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_swapped_model_is_gone_when_nobody_keeps_it(family):
    """Its memory with it, on a GPU gigabytes: not when Python next looks for rings."""
    model = build(family)
    gc.collect()
    gc.disable()
    try:
        weights = [weakref.ref(parameter) for parameter in model.parameters()]
        comrope.swap(model, "comrope-torus")
        seen(model)
        del model
        assert [weight() for weight in weights if weight() is not None] == []
    finally:
        gc.enable()


def test_a_shallow_copy_of_a_layer_that_is_gone_says_so():
    model = comrope.swap(build("vit"))
    kept = copy.copy(next(m for m in model.modules() if "forward" in vars(m)))
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match=r"copy.deepcopy, not copy.copy"):
        kept(torch.zeros(1, 4, 32))
