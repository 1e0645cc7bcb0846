"""What ViT and GPT share: rotations that belong to several layers."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import LEARNED, relative_error
from support.gpts import nano, text

import comrope
from comrope.analysis import rotary_modules
from comrope.experiments.training.state import Average
from comrope.models import GPT
from comrope.models.transformer import RotaryTransformer


def shared(position="comrope-ld", **options) -> GPT:
    return nano(position, share_rotations="layers", **options)


@pytest.mark.parametrize("position", LEARNED)
def test_layers_share_one_rotation(position):
    """The same logits as separate rotations with equal parameters; their gradients add up."""
    model, separate, tokens = shared(position), nano(position), text()
    assert list(rotary_modules(model)) == ["rope"]
    assert {id(block.attn.rope) for block in model.blocks} == {id(model.rope)}
    names = [name for name in model.state_dict() if ".method." in name]
    assert all(name.startswith("rope.") for name in names)
    state = {n: t for n, t in model.state_dict().items() if not n.startswith("rope.")}
    for name in names:
        state |= {f"blocks.{i}.attn.{name}": model.state_dict()[name] for i in range(2)}
    separate.load_state_dict(state)
    logits = [each(tokens) for each in (model, separate)]
    assert relative_error(*logits) < 1e-13
    for each in logits:
        each.log_softmax(-1)[..., 0].sum().backward()
    total = dict(separate.named_parameters())
    for name, parameter in model.rope.named_parameters():
        expected = sum(total[f"blocks.{i}.attn.rope.{name}"].grad for i in range(2))
        assert relative_error(parameter.grad, expected) < 1e-10


def test_their_angles_are_computed_once(monkeypatch):
    model, calls = shared(), []
    ours = model.rope.method.angles_of

    def counted(**parameters):
        calls.append(len(parameters["P"]))
        return ours(**parameters)

    monkeypatch.setattr(model.rope.method, "angles_of", counted)
    model(text())
    assert calls == [4]  # the heads of one layer


def test_copies_averages_and_files(tmp_path):
    model, tokens = shared(), text()
    copied = copy.deepcopy(model)
    assert copied.blocks[1].attn.rope is copied.rope is not model.rope
    expected, average = model(tokens), Average(model, 0.5)
    names = [name for name, _ in model.named_parameters()]
    assert list(average.tensors) == names
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert relative_error(model(tokens), expected) > 1e-2
    with average.applied(model):
        assert torch.equal(model(tokens), expected)
    model.save_pretrained(tmp_path)
    loaded = GPT.from_pretrained(tmp_path)
    assert loaded.blocks[1].attn.rope is loaded.rope
    assert torch.equal(loaded(tokens), model(tokens))
    pickled = tmp_path / "model.pt"
    torch.save(model, pickled)
    again = torch.load(pickled, weights_only=False)
    assert again.blocks[1].attn.rope is again.rope
    assert torch.equal(again(tokens), model(tokens))


def test_moving_and_freezing_concern_every_layer():
    model, tokens = shared(dtype=torch.float32), text()
    model.double()
    assert model.blocks[0].attn.rope.method.P.dtype == torch.float64
    model.rope.requires_grad_(False)
    model(tokens).sum().backward()
    assert model.rope.method.P.grad is None
    assert model.blocks[0].attn.qkv.weight.grad is not None


@pytest.mark.parametrize("where", ["block", "rope", "method"])
def test_parameters_that_hooks_fetch(where):
    """As sharding and offloading do: old values until the module with the hook is called."""
    model, plain = shared(), shared()
    model.load_state_dict(plain.state_dict())
    parameter = model.rope.method.P
    whole = parameter.data
    module = {"block": model.blocks[0], "rope": model.rope, "method": model.rope.method}[where]
    if where == "rope":
        parameter.data = torch.zeros_like(whole)
        module.register_forward_pre_hook(lambda *_: setattr(parameter, "data", whole))
    else:
        module.register_forward_pre_hook(lambda *_: None)
    tokens = text()
    assert relative_error(model(tokens), plain(tokens)) < 1e-12
    assert torch.equal(model.generate(tokens, 6), plain.generate(tokens, 6))


def test_folding_shared_rotations(tmp_path):
    model, tokens = shared("comrope-torus", rotate_values=True, num_kv_heads=2), text()
    before = model(tokens)
    comrope.fold(model)
    assert model.arguments()["share_rotations"] == "layers"
    assert relative_error(model(tokens), before) < 1e-12
    assert list(rotary_modules(model)) == ["rope"]
    model.save_pretrained(tmp_path)
    assert torch.equal(GPT.from_pretrained(tmp_path)(tokens), model(tokens))


def test_the_base_class_describes_no_input():
    for method in (RotaryTransformer.example_input, RotaryTransformer.dynamic_sizes):
        with pytest.raises(NotImplementedError):
            method(nano(), *([1] if method is RotaryTransformer.example_input else []))
