"""Attention with rotated values."""

from __future__ import annotations

import pytest
import torch
from helpers import COMMUTING, FROM_ZERO, raises_for, relative_error
from support.vits import nano

import comrope
from comrope.models import ViT
from comrope.models.attention import Attention
from comrope.models.export import Exportable


def image() -> torch.Tensor:
    return torch.randn(2, 1, 10, 14)


def test_every_parameter_learns(method):
    model = nano(position=method, rotate_values=True)
    model(image()).square().sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_it_is_another_function_of_the_same_parameters(method):
    model = nano(position=method, rotate_values=True)
    plain = nano(position=method)
    plain.load_state_dict(model.state_dict())
    x = image()
    assert relative_error(plain(x), model(x)) > 1e-2
    for block in model.blocks:
        block.attn.rotate_values = False
    assert torch.equal(plain(x), model(x))


@pytest.mark.parametrize("method", FROM_ZERO)
def test_without_angles_it_is_plain_attention(method):
    torch.manual_seed(1)
    model = comrope.create_model(
        "vit_nano_patch2_12", in_chans=1, position=method, init="zeros", rotate_values=True
    )
    none = comrope.create_model("vit_nano_patch2_12", in_chans=1, position="none")
    none.load_state_dict(model.state_dict(), strict=False)
    x = image()
    assert relative_error(model(x), none(x)) < 1e-5


def test_moving_the_image_changes_nothing_if_the_rotations_commute(method):
    model = nano(position=method, rotate_values=True).double()
    x, positions = image().double(), model.token_positions((5, 7)).double()
    change = relative_error(model(x, positions + 2.5), model(x, positions))
    assert change < 1e-10 if method in COMMUTING else change > 1e-3


def test_an_unrotated_class_token_breaks_the_invariance():
    model = nano(position="comrope-ld", rotate_values=True, class_position="unrotated").double()
    x, positions = image().double(), model.token_positions((5, 7)).double()
    assert relative_error(model(x, positions + 2.5), model(x, positions)) > 1e-3


@pytest.mark.parametrize("order", ["interleaved", "half"])
def test_constant_angles_change_nothing(method, order):
    """What exporters get."""
    model, x = nano(position=method, rotate_values=True, channel_order=order), image()
    with torch.no_grad():
        assert relative_error(Exportable(model)(x), model(x)) < 1e-5


@pytest.mark.parametrize("order", ["interleaved", "half"])
def test_folding_with_rotated_values(commuting, order, tmp_path):
    model, x = nano(position=commuting, rotate_values=True, channel_order=order), image()
    with torch.no_grad():
        before = model(x)
        comrope.fold(model)
        assert relative_error(model(x), before) < 1e-4
        model.save_pretrained(tmp_path)
        again = ViT.from_pretrained(tmp_path)
        assert again.arguments()["rotate_values"] is True
        assert torch.equal(again(x), model(x))


def test_checkpointing_changes_nothing():
    model, x = nano(position="comrope-ld", rotate_values=True).train(), image()
    gradients = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        gradients.append(torch.autograd.grad(model(x).square().sum(), [*model.parameters()]))
    for a, b in zip(*gradients, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.fixture
def shortcuts(monkeypatch):
    """A list that grows with every layer that rotates back through its projection."""
    calls, ours = [], comrope.RotaryEmbedding._inverse_with_projection

    def counted(*args, **options):
        calls.append(1)
        return ours(*args, **options)

    monkeypatch.setattr(comrope.RotaryEmbedding, "_inverse_with_projection", counted)
    return calls


@pytest.mark.parametrize("order", ["interleaved", "half"])
def test_folding_into_the_projection_changes_nothing(method, order, shortcuts):
    """Outputs and gradients in float64, against layers with hooked projections, which are not
    folded."""
    model = nano(position=method, rotate_values=True, channel_order=order).double()
    x, wanted = image().double(), [*model.parameters()]
    got = torch.autograd.grad((out := model(x)).square().sum(), wanted)
    assert len(shortcuts) == len(model.blocks)
    called = []
    for block in model.blocks:
        block.attn.proj.register_forward_hook(lambda *_: called.append(1))
    slow = model(x)
    assert len(called) == len(shortcuts) == len(model.blocks)
    assert relative_error(out, slow) < 1e-12
    for a, b in zip(got, torch.autograd.grad(slow.square().sum(), wanted), strict=True):
        assert relative_error(a, b) < 1e-10


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


def patch(proj):
    ours = proj.forward
    proj.forward = lambda x: ours(2 * x)


@pytest.mark.parametrize("adapt", [
    lambda proj: setattr(proj, "__class__", Doubled),
    patch,
    lambda proj: proj.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
    lambda proj: torch.nn.utils.parametrizations.weight_norm(proj).parametrizations.weight
    .original0.data.mul_(2),
])  # fmt: skip
def test_changes_of_the_projection_take_effect(adapt):
    model, x = nano(position="comrope-torus", rotate_values=True), image()
    for block in model.blocks:
        block.attn.proj.bias.data.zero_()
    before = model(x)
    for block in model.blocks:
        adapt(block.attn.proj)
    after = model(x)
    assert relative_error(after, before) > 1e-3
    plain = nano(position="comrope-torus", rotate_values=True)
    plain.load_state_dict(doubled_state(model), strict=True)
    assert relative_error(after, plain(x)) < 1e-4


def doubled_state(model):
    """Return weights of a plain model that does what one with doubled projections does."""
    state = {n: v for n, v in model.state_dict().items() if "parametrizations" not in n}
    return state | {
        f"blocks.{n}.attn.proj.weight": block.attn.proj.weight.detach()
        * (1 if "parametrizations" in dir(block.attn.proj) else 2)
        for n, block in enumerate(model.blocks)
    }


def test_backward_hooks_of_the_projection_run():
    model, called = nano(position="comrope-torus", rotate_values=True), []
    for block in model.blocks:
        block.attn.proj.register_full_backward_hook(lambda *_: called.append(1))
    model(image()).sum().backward()
    assert len(called) == len(model.blocks)


def test_adapters_of_peft_learn_and_merge(shortcuts):
    peft = pytest.importorskip("peft")
    model, x = nano(position="comrope-torus", rotate_values=True).eval(), image()
    before = model(x)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["attn.proj"], r=2))
    shortcuts.clear()
    assert relative_error(adapted(x), before) < 1e-5
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    changed = adapted(x)
    assert not shortcuts
    assert relative_error(changed, before) > 1e-2
    merged = adapted.merge_and_unload()
    assert relative_error(merged(x), changed) < 1e-4
    assert len(shortcuts) == len(model.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["comrope-torus", "comrope-ld"])
def test_autocast_compile_and_other_parameters(position):
    model, x = nano(position=position, rotate_values=True), image()
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(model(x).float(), expected) < 0.05
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), expected) < 1e-5
    parameters = {name: 2 * p.detach() for name, p in model.named_parameters()}
    got = torch.func.functional_call(model, parameters, (x,))
    model.load_state_dict(parameters)
    assert relative_error(got, model(x)) < 1e-5


def test_what_has_no_rotation_is_refused():
    with raises_for("rotate_values"):
        nano(position="ape", rotate_values=True)
    with raises_for("rotate_values"):
        Attention(16, 2, rotate_values=True)


def test_a_layer_computes_its_angles_once(monkeypatch):
    rope = comrope.RotaryEmbedding("comrope-ld", num_heads=2, head_dim=16)
    layer, x = Attention(32, 2, rope=rope, rotate_values=True), torch.randn(1, 6, 32)
    calls, angles = [], rope.angles
    monkeypatch.setattr(rope, "angles", lambda: calls.append(1) or angles())
    expected = layer(x, torch.rand(6, 2, generator=torch.Generator().manual_seed(0)))
    assert len(calls) == 1
    seen = []
    rope.register_forward_hook(lambda *_: seen.append(1))  # a hook changes nothing
    got = layer(x, torch.rand(6, 2, generator=torch.Generator().manual_seed(0)))
    assert seen == [1]
    assert relative_error(got, expected) < 1e-5
