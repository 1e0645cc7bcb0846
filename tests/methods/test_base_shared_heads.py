"""Parameters that all heads share: the same rotation as with equal parameters for every head."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import (
    LEARNED,
    assert_kernel_parity,
    assert_parity,
    make,
    queries_and_keys,
    raises_for,
    relative_error,
)
from support import language_models as language
from support import vision_models as vision

import comrope
from comrope import inits
from comrope.analysis import rotary_modules, scores
from comrope.methods import method_class
from comrope.methods.base import batched_angles

HEADS = 3


def pair(method: str, **options):
    """A rotation with shared parameters, and one with the same parameters for every head."""
    shared, own = (
        make(method, num_heads=HEADS, shared_heads=each, **options) for each in (True, False)
    )
    with torch.no_grad():
        for name, parameter in own.method.named_parameters():
            parameter.copy_(getattr(shared.method, name))
    return shared, own


@pytest.mark.parametrize(
    ("name", "init"),
    [
        (name, init)
        for name in LEARNED
        for init in ("normal", "rope", "isotropic")
        if not (inits.CLASSES[init].mixes_axes and method_class(name).axis_partitioned)
    ],
)
def test_the_parameters_are_those_of_one_head(name, init):
    torch.manual_seed(1)
    shared = make(name, num_heads=HEADS, shared_heads=True, init=init)
    torch.manual_seed(1)
    single = make(name, num_heads=1, init=init)
    for key, parameter in single.method.named_parameters():
        assert torch.equal(getattr(shared.method, key), parameter), key
    expected = single.angle_matrices().expand(-1, HEADS, -1, -1, -1)
    assert torch.equal(shared.angle_matrices(), expected)
    assert shared.rotation_matrices(torch.rand(4, 2)).shape[1] == HEADS
    assert set(shared.state_dict()) == set(single.state_dict())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[(name, {"block_size": size}) for name in LEARNED for size in (2, 3, 4)],
        ("comrope-ld", {"shared_theta": True}),
        ("comrope-ld", {"channel_order": "half"}),
        ("liere", {"num_axes": 1}),
        ("rope-mixed", {"log_frequencies": True}),
        ("comrope-torus", {"log_frequencies": True}),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_values_and_gradients(name, options, backend):
    """The gradient of a shared parameter is the sum over the heads."""
    shared, own = pair(name, backend=backend, **options)
    q, k = queries_and_keys(shared)
    positions = torch.randn(6, shared.num_axes, dtype=torch.float64)
    weights = torch.randn(2, 6, 6, 6, dtype=torch.float64)
    found = []
    for rope in (shared, own):
        value = scores(rope, q, k, positions)
        parameters = dict(rope.method.named_parameters())
        gradients = torch.autograd.grad((value.tanh() * weights).sum(), list(parameters.values()))
        found.append((value, dict(zip(parameters, gradients, strict=True))))
    assert relative_error(found[0][0], found[1][0]) < 1e-12
    for key, gradient in found[0][1].items():
        axis = shared.method.head_axis[key]
        assert gradient.shape[axis] == 1
        assert relative_error(gradient, found[1][1][key].sum(axis, keepdim=True)) < 1e-9, key


@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize("name", LEARNED)
def test_backends_agree(name, block_size):
    rope = make(name, num_heads=HEADS, shared_heads=True, block_size=block_size, head_dim=16)
    if rope.method.commutes:
        assert_parity(rope)
    assert_kernel_parity(rope, torch.rand(6, 2), groups=2)


@pytest.mark.parametrize("name", LEARNED)
def test_everything_that_rotates_gets_all_heads(name):
    shared, own = pair(name, block_size=4)
    positions = torch.randn(6, 2, dtype=torch.float64)
    qkv = torch.randn(2, 6, 3 * HEADS, shared.head_dim, dtype=torch.float64)
    for a, b in zip(*(rope.rotate_qkv(qkv, positions) for rope in (shared, own)), strict=True):
        assert relative_error(a, b) < 1e-12
    x = torch.randn(2, 2 * HEADS, 6, shared.head_dim, dtype=torch.float64)
    rotated = shared.rotate(x, positions)
    assert relative_error(shared.rotate(rotated, positions, inverse=True), x) < 1e-12
    if shared.method.commutes:
        for a, b in zip(shared.spectrum(), own.spectrum(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", LEARNED)
def test_the_angles_of_several_layers_at_once(name):
    layers = [make(name, num_heads=HEADS, shared_heads=True).method for _ in range(2)]
    together, apart = batched_angles(layers), [layer.angles() for layer in layers]
    for a, b in zip(together, apart, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a.matrices(), b.matrices())
    parameters = [p for layer in layers for p in layer.parameters()]
    weights = torch.randn_like(apart[0].matrices())
    losses = [sum((a.matrices() * weights).sum() for a in found) for found in (together, apart)]
    for a, b in zip(*(torch.autograd.grad(loss, parameters) for loss in losses), strict=True):
        torch.testing.assert_close(a, b)
    assert batched_angles([layers[0], make(name, num_heads=HEADS).method]) is None


def test_one_decomposition_serves_all_heads():
    angles = make("comrope-ld", num_heads=HEADS, shared_heads=True).angles()
    basis, planes = angles.cached_spectrum
    assert basis.stride(0) == planes.stride(0) == 0


@pytest.mark.parametrize("name", ["rope-mixed", "comrope-ld", "comrope-torus"])
def test_a_model_is_saved_folded_and_exported(name, tmp_path):
    torch.manual_seed(0)
    options = {"position": name, "num_classes": 5, "shared_heads": True, "rotate_values": True}
    model = comrope.create_model("vit_nano_patch8_32", **options).eval()
    own = comrope.create_model("vit_nano_patch8_32", **options | {"shared_heads": False})
    assert model.position_parameters() * 2 == own.position_parameters()
    expected = vision.seen(model)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(vision.seen(type(model).from_pretrained(tmp_path / "saved")), expected)
    from comrope.models.export import Exportable

    assert relative_error(vision.seen(Exportable(model)), expected) < 1e-4
    comrope.fold(model)
    assert relative_error(vision.seen(model), expected) < 1e-4
    (rope, *_) = rotary_modules(model).values()
    assert rope.name == "rope-mixed"
    assert rope.method.frequencies.shape[1] == 1  # heads go on sharing
    folded = vision.seen(model)
    model.save_pretrained(tmp_path / "folded")
    assert torch.equal(vision.seen(type(model).from_pretrained(tmp_path / "folded")), folded)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_swapped_into_a_language_model(family):
    model = language.build(family)
    before = language.logits(model)
    comrope.swap(model, "comrope-ld", block_size=4, shared_heads=True)
    assert relative_error(language.logits(model), before) < 1e-5
    language.train(model, steps=2)
    trained = language.logits(model)
    comrope.fold(model)
    assert relative_error(language.logits(model), trained) < 1e-4
    for rope in rotary_modules(model).values():
        assert {tensor.shape[0] for name, tensor in rope.named_buffers()} <= {1}
        assert rope.method.frequencies.shape[1] == 1


def test_learned_frequencies_of_a_host_are_not_shared():
    model = vision.build("timm mixed")
    before = copy.deepcopy(model.state_dict())
    with raises_for("shared_heads"):
        comrope.swap(model, "rope-mixed", shared_heads=True)
    assert set(model.state_dict()) == set(before)


def test_there_must_be_something_to_share():
    with raises_for("shared_heads", naming="rope"):
        make("rope", shared_heads=True)
    with raises_for("shared_heads"):
        make("rope-mixed", shared_heads="yes")
    assert make("rope", shared_heads=False).num_heads == 2
