"""Frequencies as parameters: directly, or by their logarithms."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    assert_kernel_parity,
    assert_parity,
    fits,
    make,
    queries_and_keys,
    raises_for,
    relative_error,
)
from support import language_models as language

import comrope
from comrope import inits
from comrope.analysis import scores
from comrope.methods import method_class

NAMES = [name for name in comrope.METHODS if method_class(name).learns_frequencies]
INITS = ["normal", "rope", "rope-random-axes", "isotropic"]


def pair(name: str, **options):
    """The same draw with and without logarithms."""
    found = []
    for log in (True, False):
        torch.manual_seed(2)
        found.append(make(name, log_frequencies=log, **options))
    return found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("name", NAMES)
def test_logarithms_start_with_the_same_frequencies(name, init, shared):
    for axes in (1, 2, 3):
        if not fits(name, num_axes=axes):
            continue
        log, plain = pair(name, init=init, num_axes=axes, shared_heads=shared)
        expected = plain.spectrum()[1].abs() if axes == 1 else plain.spectrum()[1]
        torch.testing.assert_close(log.spectrum()[1], expected)
        assert not hasattr(log.method, "frequencies")
        assert hasattr(log.method, "direction") == (axes > 1)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_chain_rule(name, axes):
    """dL/d log_speed is sum_i w_i dL/dw_i; a direction of length one gets the rest, times |w|."""
    log, plain = pair(name, init="isotropic", num_axes=axes)
    q, k = queries_and_keys(log)
    positions = torch.randn(6, axes, dtype=torch.float64)
    if axes == 1:
        plain.method.frequencies.data.abs_()
    for rope in (log, plain):
        scores(rope, q, k, positions).tanh().square().sum().backward()
    w, of_w = plain.method.frequencies.detach(), plain.method.frequencies.grad
    torch.testing.assert_close(log.method.log_speed.grad, (w * of_w).sum(0))
    if axes > 1:
        speed, unit = w.norm(dim=0), w / w.norm(dim=0)
        across = of_w - unit * (unit * of_w).sum(0)
        torch.testing.assert_close(log.method.direction.grad, speed * across)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_backends_agree(name, axes):
    rope = make(name, log_frequencies=True, num_axes=axes, block_size=4, head_dim=16)
    with torch.no_grad():
        for parameter in rope.parameters():  # also directions of other lengths
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert_parity(rope, torch.randn(6, axes, dtype=torch.float64))
    assert_kernel_parity(rope, torch.rand(6, axes))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_adam_changes_every_frequency_by_the_same_share(name):
    rope = make(name, log_frequencies=True, init="rope", base=1e4, num_axes=1)
    groups = comrope.parameter_groups(rope, weight_decay=0.1, lr=1.0, angle_lr=0.01)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.01, 0.0)]
    before = rope.spectrum()[1].detach()
    q, k = queries_and_keys(rope)
    scores(rope, q, k, torch.arange(6.0)[:, None].double()).tanh().sum().backward()
    torch.optim.AdamW(groups, eps=0.0).step()
    change = (rope.spectrum()[1].detach() / before).log().abs()
    torch.testing.assert_close(change, torch.full_like(change, 0.01))


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"init": "zeros"}, "log_frequencies"),
        ({"init": "rope", "rotated_share": 0.5}, "log_frequencies"),
        ({"init": inits.RoPE(frequencies=[1.0] * 11 + [0.0])}, "log_frequencies"),
        ({"log_frequencies": 1}, "log_frequencies"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_logarithm_is_refused(name, options, argument):
    with raises_for(argument):
        make(name, **{"log_frequencies": True, "block_size": 2, "head_dim": 48, **options})


def test_only_methods_that_learn_frequencies_have_their_logarithms(method):
    if method not in NAMES:
        with raises_for("log_frequencies", naming=method):
            make(method, log_frequencies=True, init="rope")
    assert make(method, log_frequencies=False).name == method


@pytest.mark.parametrize("name", NAMES)
def test_swapped_trained_and_folded(name):
    model = language.build("llama")
    before = language.logits(model)
    comrope.swap(model, name, block_size=4, log_frequencies=True)
    assert relative_error(language.logits(model), before) < 1e-5
    language.train(model, steps=2)
    trained = language.logits(model)
    comrope.fold(model)
    assert relative_error(language.logits(model), trained) < 1e-4


def test_on_the_meta_device_nothing_is_checked():
    """Where values do not exist: they are checked when they do."""
    options = {"log_frequencies": True, "init": "rope", "rotated_share": 0.5}
    rope = make("rope-mixed", device="meta", **options).to_empty(device="cpu")
    with raises_for("log_frequencies"):
        rope.reset_parameters()
