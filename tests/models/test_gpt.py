"""The GPT: what it computes, its sizes, its errors."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import raises_for, relative_error
from support.gpts import CASES, CONTEXT, VOCABULARY, nano, slow_logits, text
from torch import nn

import comrope
from comrope.analysis import rotary_modules
from comrope.inits import RoPE
from comrope.models import GPT, create_gpt
from comrope.models.gpt import POSITIONS, SIZES


@pytest.mark.parametrize(("position", "options"), CASES)
def test_logits_and_gradients_equal_those_of_explicit_rotations(position, options):
    model, tokens = nano(position, **options), text()
    weights = torch.randn(*tokens.shape, VOCABULARY, dtype=torch.float64)
    found, expected = [], []
    for results, logits in ((found, model(tokens)), (expected, slow_logits(model, tokens))):
        loss = (logits.log_softmax(-1) * weights).sum()
        results += [logits, *torch.autograd.grad(loss, [*model.parameters()])]
    names = ("logits", *(name for name, _ in model.named_parameters()))
    for name, a, b in zip(names, found, expected, strict=True):
        assert relative_error(a, b) < 1e-9, name
        assert b.abs().max() > 1e-3, name  # every parameter has an effect
    places = 30 * torch.rand(*tokens.shape, 1, dtype=torch.float64)
    assert relative_error(model(tokens, places), slow_logits(model, tokens, places)) < 1e-12


@pytest.mark.parametrize("position", POSITIONS)
def test_later_tokens_have_no_effect(position):
    model, tokens = nano(position), text()
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    assert relative_error(after[:, :9], before[:, :9]) < 1e-13
    assert relative_error(after[:, 9:], before[:, 9:]) > 1e-2
    last = model(tokens, last_only=True)
    assert relative_error(last, before[:, -1:]) < 1e-13


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("values", [False, True])
def test_logits_depend_on_relative_positions_only(position, values):
    """On one axis every method commutes."""
    if position == "none" and values:
        pytest.skip("there is nothing to rotate values with")
    model, tokens = nano(position, rotate_values=values), text()
    places = torch.arange(tokens.shape[1])[:, None]
    expected = model(tokens)
    assert relative_error(model(tokens, places), expected) == 0
    assert relative_error(model(tokens, places + 1000), expected) < 1e-9
    stretched = relative_error(model(tokens, 1.5 * places), expected)
    assert stretched == 0 if position == "none" else stretched > 1e-3


def test_the_usual_sizes():
    assert set(SIZES) == {
        "gpt_nano", "gpt_micro", "gpt_tiny", "gpt_small", "gpt_medium", "gpt_1b"
    }  # fmt: skip
    with torch.device("meta"):
        models = {name: create_gpt(name, vocab_size=50304) for name in SIZES}
    sizes = {name: sum(p.numel() for p in m.parameters()) / 1e6 for name, m in models.items()}
    assert sizes["gpt_small"] == pytest.approx(124, rel=0.02)  # GPT-2, without its positions
    assert sizes["gpt_medium"] == pytest.approx(354, rel=0.02)
    assert sizes["gpt_1b"] == pytest.approx(1000, rel=0.02)
    with pytest.raises(ValueError, match=r"^name: .*did you mean 'gpt_small'"):
        create_gpt("gpt_smal", vocab_size=256)
    with raises_for("name", naming="create_gpt"):
        comrope.create_model("gpt_small")


@torch.no_grad()
def first(width: int, depth: int) -> tuple[float, float, float]:
    """Loss of first weights, in nats above that of equal probabilities, and the standard deviations
    of logits and of the residual stream."""
    torch.manual_seed(1)
    model = GPT(vocab_size=64, embed_dim=width, depth=depth, num_heads=2)
    streams = []
    model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    tokens = torch.randint(64, (4, 33))
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return float(loss) - math.log(64), float(logits.std()), float(streams[0].std())


def test_first_weights_suit_every_size():
    sizes = {(64, 2): 0.0, (512, 2): 0.0, (64, 24): 0.0}
    for size in sizes:
        excess, logits, sizes[size] = first(*size)
        assert abs(excess) < 0.4
        assert 0.4 < logits < 0.9
        assert 0.2 < sizes[size] < 1.0
    assert sizes[64, 24] < 1.5 * sizes[64, 2]  # it does not grow with the depth


def test_it_learns():
    """Eight tokens in a circle."""
    torch.manual_seed(0)
    model = GPT(vocab_size=8, context=16, embed_dim=32, depth=2, num_heads=2, block_size=4)
    optimizer = torch.optim.AdamW(comrope.parameter_groups(model, weight_decay=0.1, lr=1e-2))
    tokens = (torch.arange(17) + torch.arange(8)[:, None]) % 8
    for _ in range(30):
        loss = nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1
    assert torch.equal(model.generate(tokens[:, :4], 13), tokens)


def test_angles_are_not_decayed():
    model = nano("comrope-ld")
    assert model.no_weight_decay() == {n for n, _ in model.named_parameters() if ".rope." in n}
    undecayed = comrope.parameter_groups(model, weight_decay=0.1)
    names = dict(model.named_parameters())
    decayed = {id(p) for g in undecayed if g["weight_decay"] for p in g["params"]}
    assert id(names["embed.weight"]) in decayed
    assert id(names["norm.weight"]) not in decayed
    assert model.position_parameters() == sum(
        p.numel() for rope in rotary_modules(model).values() for p in rope.parameters()
    )


@pytest.mark.parametrize("position", POSITIONS)
def test_a_model_made_on_the_meta_device_can_be_filled(position):
    with torch.device("meta"):
        model = GPT(vocab_size=9, embed_dim=32, depth=2, num_heads=2, position=position)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.reset_parameters()
    assert model(torch.randint(9, (2, 5))).isfinite().all()


@pytest.mark.parametrize(
    ("options", "argument", "error"),
    [
        ({"position": "ape"}, "position", ValueError),
        ({"position": "comrope-lb"}, "position", ValueError),
        ({"position": "none", "init": "zeros"}, "position", ValueError),
        ({"position": "none", "base": 100.0}, "position", ValueError),
        ({"position": "none", "rotate_values": True}, "rotate_values", ValueError),
        ({"position": "none", "share_rotations": "layers"}, "share_rotations", ValueError),
        ({"share_rotations": "layer"}, "share_rotations", ValueError),
        ({"position": "rope", "share_rotations": "heads"}, "share_rotations", ValueError),
        ({"attention_temperature": "linear"}, "attention_temperature", ValueError),
        ({"vocab_size": 0}, "vocab_size", ValueError),
        ({"vocab_size": True}, "vocab_size", ValueError),
        ({"context": 1}, "context", ValueError),
        ({"depth": 0}, "depth", ValueError),
        ({"embed_dim": 0}, "embed_dim", ValueError),
        ({"num_heads": 5}, "num_heads", ValueError),
        ({"num_kv_heads": 3}, "num_kv_heads", ValueError),
        ({"num_kv_heads": 0}, "num_kv_heads", ValueError),
        ({"num_kv_heads": 8}, "num_kv_heads", ValueError),
        ({"block_size": 3}, "block_size", ValueError),
        ({"init_std": -1.0}, "init_std", ValueError),
        ({"init": RoPE(base=100.0)}, "init", TypeError),
        ({"num_axes": 2}, "num_axes", TypeError),
        ({"unknown": 2}, "unknown", TypeError),
    ],
)
def test_errors_name_the_argument(options, argument, error):
    with raises_for(argument, error):
        nano(**options)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([[1, 2], [3]], TypeError),  # of different lengths
        (torch.ones(2, 3), TypeError),
        (torch.ones(2, 3, dtype=torch.uint8), TypeError),
        (torch.ones(2, 3, dtype=torch.int32), TypeError),
        (torch.ones(3, dtype=torch.int64), ValueError),
        (torch.ones(2, 3, 1, dtype=torch.int64), ValueError),
        (torch.ones(2, 0, dtype=torch.int64), ValueError),
        (torch.ones(0, 2, dtype=torch.int64), ValueError),
        (torch.tensor([[0, VOCABULARY]]), ValueError),
        (torch.tensor([[-1, 0]]), ValueError),
    ],
)
def test_wrong_tokens(tokens, error):
    model = nano()
    for call in (model, lambda t: model.generate(t, 3)):
        with raises_for("tokens", error):
            call(tokens)


def test_wrong_positions():
    model, tokens = nano(), text(2, 5)
    for wrong in (torch.rand(4, 1), torch.rand(5, 2), torch.rand(3, 5, 1), torch.rand(5)):
        with raises_for("positions"):
            model(tokens, wrong.double())
    assert model.context == CONTEXT


@pytest.mark.parametrize(("given", "meant"), [("none", "heads"), ("layers", "both")])
def test_the_option_of_rotations_is_the_same_as_sharing_heads(given, meant, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = nano(share_rotations=given, shared_heads=True)
    torch.manual_seed(0)
    other = nano(share_rotations=meant)
    assert model.arguments() == other.arguments()
    tokens = torch.randint(9, (2, 5))
    assert torch.equal(model(tokens), other(tokens))
    old = {**model.arguments(), "share_rotations": given, "shared_heads": True}
    monkeypatch.setattr(model, "_given", old)  # as older versions saved it
    model.save_pretrained(tmp_path)
    assert "shared_heads" in (tmp_path / "config.json").read_text()
    assert torch.equal(GPT.from_pretrained(tmp_path)(tokens), model(tokens))
