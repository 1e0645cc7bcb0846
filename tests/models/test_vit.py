"""The N-dimensional ViT: shapes, sizes, positions."""

from __future__ import annotations

import pytest
import torch
from helpers import COMMUTING, fits, raises_for
from torch import nn

import comrope
from comrope.analysis import rotary_modules
from comrope.models import POSITIONS, ViT, create_model

SLOW = ("rope", "comrope-ap", "comrope-ld")


def nano(position="comrope-ld", **options):
    options = {"in_chans": 1, "num_classes": 10, **options}
    return create_model("vit_nano_patch2_12", position=position, **options)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(
    ("canvas", "patch"), [((24,), (2,)), ((12, 12), (2, 3)), ((4, 12, 12), (2, 4, 4))]
)
def test_any_rank_any_size_any_aspect(position, canvas, patch):
    options = {}
    if position in comrope.METHODS:
        options = {"block_size": 2, "embed_dim": 48}
        if not fits(position, num_axes=len(canvas)):
            pytest.skip(f"{position} has no rotation with {len(canvas)} axes")
    model = nano(position, img_size=canvas, patch_size=patch, **options).eval()
    assert model(torch.randn(2, 1, *canvas)).shape == (2, 10)
    other = tuple(size * factor for size, factor in zip(patch, (3, 5, 2), strict=False))
    assert model(torch.randn(2, 1, *other)).shape == (2, 10)


@pytest.mark.parametrize("position", POSITIONS)
def test_every_parameter_gets_a_gradient(position):
    model = nano(position)
    positions = comrope.perturb(comrope.grid((6, 6)), 1 / 6, 1.0, batch_size=3)
    model(torch.randn(3, 1, 12, 12), positions).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_only_the_chosen_encoding_exists():
    assert nano("ape").ape is not None
    assert not rotary_modules(nano("ape"))
    for method in comrope.METHODS:
        assert nano(method).ape is None
        assert len(rotary_modules(nano(method))) == 3


def test_absolute_positions_and_rotations():
    """At zero angles only they have an effect; the names of weights stay the same."""
    plain, both = nano("ape").eval(), nano("comrope-ld", init="zeros", ape=True).eval()
    angles = {n for n in both.state_dict() if ".rope." in n}
    assert set(both.state_dict()) - angles == set(plain.state_dict())
    both.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 1, 12, 12)
    torch.testing.assert_close(both(x), plain(x), rtol=1e-5, atol=1e-5)
    assert both.position_parameters() > plain.position_parameters() > 0
    with raises_for("ape"):
        nano("none", ape=True)


def test_without_positions_the_patches_may_be_shuffled():
    """The negative control of the next test: with ``none`` order means nothing."""
    x = torch.randn(2, 1, 12, 12)
    flipped = x.view(2, 1, 6, 2, 6, 2).flip(2).reshape(2, 1, 12, 12)  # rows of patches upside down
    for position in POSITIONS:
        model = nano(position).eval()
        with torch.no_grad():
            same = torch.allclose(model(x), model(flipped), rtol=1e-3, atol=1e-4)
        assert same == (position == "none"), position


def moved(model: ViT, x: torch.Tensor, offset: float) -> float:
    positions = model.token_positions((6, 6))
    with torch.no_grad():
        before, after = model(x, positions), model(x, positions + offset)
    return float((after - before).norm() / before.norm())


def test_moving_the_image_changes_nothing_if_the_rotations_commute():
    x = torch.randn(2, 1, 12, 12)
    for position in comrope.METHODS:
        model = nano(position).eval()
        if position in COMMUTING:
            assert moved(model, x, 1.0) < 1e-4, position
        else:
            assert moved(model, x, 1.0) > 1e-2, position
    assert moved(nano("ape").eval(), x, 1.0) > 1e-2


def test_an_unrotated_class_token_breaks_the_invariance():
    x = torch.randn(2, 1, 12, 12)
    assert moved(nano(class_position="unrotated").eval(), x, 1.0) > 1e-3
    pooled = nano(class_token=False, global_pool="avg").eval()
    assert moved(pooled, x, 1.0) < 1e-4


def test_vanilla_rope_counts_patches_of_the_training_grid_by_default():
    patch, relative = nano("rope"), nano("rope", position_units="relative")
    ratio = (
        rotary_modules(patch)["blocks.0.attn.rope"].spectrum()[1]
        / rotary_modules(relative)["blocks.0.attn.rope"].spectrum()[1]
    )
    assert torch.allclose(ratio[ratio.isfinite()], torch.tensor(6.0))
    same = nano("comrope-ld", init="rope")
    torch.testing.assert_close(
        rotary_modules(same)["blocks.1.attn.rope"].angle_matrices().detach(),
        rotary_modules(patch)["blocks.1.attn.rope"].angle_matrices(),
        rtol=1e-5,
        atol=1e-6,
    )


def test_positions_of_patches_or_of_all_tokens():
    model = nano("comrope-torus").eval()
    x = torch.randn(2, 1, 8, 12)
    with torch.no_grad():
        default = model(x)
        torch.testing.assert_close(model(x, comrope.grid((4, 6))), default)
        torch.testing.assert_close(model(x, model.token_positions((4, 6))), default)
    with raises_for("positions"):
        model(x, comrope.grid((4, 4)))


def test_angles_tokens_and_codebooks_are_not_decayed():
    names = nano("comrope-ld").no_weight_decay()
    assert {"cls_token", "blocks.0.attn.rope.method.P", "blocks.2.attn.rope.method.theta"} <= names
    assert "ape.codebook" in nano("ape").no_weight_decay()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 13}, r"x: expected 2 sizes that are multiples of patch_size \(2, 2\), got"),
        ({"position": "rotary"}, "position: expected one of rope"),
        ({"global_pool": "max"}, "global_pool: expected one of token, avg"),
        ({"class_token": False}, "global_pool: 'token' needs class_token=True"),
        ({"num_heads": 0}, "num_heads: expected an integer of at least 1"),
        ({"num_heads": 5}, "num_heads: expected a divisor of embed_dim 64, got 5"),
        ({"position": "ape", "init": "zeros"}, "position: 'ape' has no rotation"),
        ({"block_size": 3}, "block_size: expected a divisor of head_dim 32, got 3"),
        ({"patch_size": (2, 2, 2), "img_size": (12, 12)}, "patch_size: expected 2 sizes"),
    ],
)
def test_errors_name_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        nano(**options)


def test_errors_of_options_and_inputs():
    with raises_for("init", TypeError):
        nano(init=comrope.inits.RoPE())
    with raises_for("unknown", TypeError):
        nano(unknown=1)
    with raises_for("x"):
        nano()(torch.randn(2, 3, 12, 12))
    with raises_for("x"):
        nano()(torch.randn(2, 1, 12, 11))


@pytest.mark.parametrize("position", POSITIONS)
def test_a_model_made_on_the_meta_device_can_be_filled(position):
    with torch.device("meta"):
        model = nano(position, layer_scale=0.1)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.reset_parameters()
    assert all(p.isfinite().all() for p in model.parameters())
    assert model(torch.randn(1, 1, 12, 12)).isfinite().all()


def test_gradient_checkpointing_changes_nothing_but_memory():
    model, x = nano(), torch.randn(2, 1, 12, 12)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_new_classifier_fits_the_model():
    model = nano().double()
    model.reset_classifier(3)
    assert model(torch.randn(2, 1, 12, 12).double()).shape == (2, 3)
    model = nano(class_token=False, global_pool="avg")
    with raises_for("global_pool"):
        model.reset_classifier(3, "token")


def test_the_residual_stream_is_in_the_precision_of_the_weights():
    seen = []
    for options in ({}, {"position": "ape"}, {"class_token": False, "global_pool": "avg"}):
        model = nano(**options)
        model.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        with torch.autocast("cpu", dtype=torch.float16):
            model(torch.randn(2, 1, 12, 12))
    assert seen == [torch.float32] * 3


@pytest.mark.parametrize(
    "position",
    ["rope-mixed", *(pytest.param(p, marks=pytest.mark.slow) for p in SLOW)],
)
def test_kernels_in_a_compiled_model(position):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = nano(position, depth=2).to(device)
    model = nano(position, backend="triton", depth=2).to(device)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 1, 12, 12, device=device)

    def outcome(model):
        model.zero_grad()
        logits = model(x)
        logits.square().sum().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = outcome(plain)
    eager = outcome(model)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    for got in (eager, outcome(model)):
        for a, b in zip(got, expected, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


def test_a_frozen_block_has_no_gradient():
    """Learned angles must not be stacked with frozen ones."""
    model = nano("comrope-ld", depth=2)
    model.requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    outputs = []
    model.blocks[0].register_forward_hook(lambda *call: outputs.append(call[2]))
    model(torch.randn(2, 1, 12, 12)).sum().backward()
    assert not outputs[0].requires_grad
    assert model.blocks[1].attn.rope.method.P.grad.abs().sum() > 0


@pytest.mark.parametrize("before", ["empty", "stale"])
@pytest.mark.parametrize("where", ["block", "rope"])
def test_parameters_that_hooks_fetch_are_not_used_before(where, before):
    """As sharding and offloading do: empty, or old values, until the module is called."""
    model, plain = nano("comrope-ld", depth=2), nano("comrope-ld", depth=2)
    model.load_state_dict(plain.state_dict())
    for block in model.blocks:
        parameter = block.attn.rope.method.P
        whole = parameter.data
        parameter.data = torch.empty(0) if before == "empty" else torch.zeros_like(whole)

        def fetch(*_, parameter=parameter, whole=whole):
            parameter.data = whole

        (block if where == "block" else block.attn.rope).register_forward_pre_hook(fetch)
    x = torch.randn(2, 1, 12, 12)
    torch.testing.assert_close(model(x), plain(x))


def test_hooks_get_the_projection_unchanged():
    model = nano("comrope-ld", depth=1, backend="triton").eval()
    kept = []
    model.blocks[0].attn.qkv.register_forward_hook(lambda *call: kept.append((call[1], call[2])))
    with torch.no_grad():
        model(torch.randn(2, 1, 12, 12))
        (given,), output = kept[0]
        torch.testing.assert_close(output, nn.functional.linear(given, *_weights(model)))


def _weights(model):
    qkv = model.blocks[0].attn.qkv
    return qkv.weight, qkv.bias
