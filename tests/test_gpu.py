"""What only a GPU can show: run with `python -m pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import COMMUTING, make, queries_and_keys, relative_error, scores_and_gradients
from support import gpts

import comrope
from comrope.experiments.common import timing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(rope, *tensors, dtype=torch.float32):
    rope.to("cuda", dtype)
    return [t.detach().to("cuda", dtype).requires_grad_(t.requires_grad) for t in tensors]


@pytest.mark.parametrize("init", ["normal", "zeros", "rope"])
def test_float32_gradients_against_the_float64_reference(method, init):
    rope = make(method, block_size=8, init=init)
    q, k = queries_and_keys(rope, tokens=50)
    positions = torch.rand(2, 50, 2, dtype=torch.float64)
    expected = scores_and_gradients(rope, q, k, positions, "reference")
    q, k, positions = on_gpu(rope, q, k, positions)
    got = scores_and_gradients(rope, q, k, positions, "auto")
    for name, value in expected.items():
        if value.norm() > 1e-10:
            assert relative_error(got[name].double().cpu(), value) < 1e-4, name


def test_phases_stay_float32(method):
    """Under autocast: bit for bit what float32 gives; of low inputs, the same rounded once."""
    slow = "spectral" if method in COMMUTING else "reference"
    for dtype, backend in itertools.product((torch.bfloat16, torch.float16), ("auto", slow)):
        rope = make(method, block_size=8, dtype=torch.float32, backend=backend)
        q, k = (x.detach().to(dtype).float() for x in queries_and_keys(rope))
        q, k, positions = on_gpu(rope, q, k, 50 * torch.rand(6, 2))
        expected = rope(q, k, positions)
        with torch.autocast("cuda", dtype=dtype):
            full = rope(q, k, positions)
            low = rope(q.to(dtype), k.to(dtype), positions)
        for a, b, c in zip(full, low, expected, strict=True):
            assert torch.equal(a, c)
            assert b.dtype == dtype
            rounding = 0.51 * torch.finfo(dtype).eps
            torch.testing.assert_close(b.float(), c, rtol=rounding, atol=2e-5)


@pytest.mark.parametrize("name", ["rope", "rope-mixed"])
def test_phases_never_run_in_tf32(name):
    rope = make(name, block_size=8, dtype=torch.float32, backend="spectral")
    q, k = queries_and_keys(rope)
    q, k, positions = on_gpu(rope, q, k, 50 * torch.rand(6, 2))
    expected = rope(q, k, positions)
    torch.set_float32_matmul_precision("medium")
    try:
        got = rope(q, k, positions)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_compiled_on_the_gpu(method):
    torch._dynamo.reset()
    rope = make(method, block_size=8, dtype=torch.float32)
    compiled = torch.compile(rope, fullgraph=True)
    for tokens in (8, 17, 33):
        q, k = queries_and_keys(rope, tokens=tokens, groups=1)
        q, k, positions = on_gpu(rope, q, k, torch.rand(tokens, 2))
        outputs = []
        for module in (rope, compiled):
            a, b = module(q, k, positions)
            loss = (a @ b.mT).tanh().sum()
            outputs.append((a, b, *torch.autograd.grad(loss, [q, k, *rope.parameters()])))
        torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)


def test_nothing_waits_for_the_gpu(method):
    rope = make(method, block_size=8, dtype=torch.float32)
    q, k = queries_and_keys(rope)
    q, k, positions = on_gpu(rope, q, k, torch.rand(6, 2))
    rope(q, k, positions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        a, b = rope(q, k, positions)
        (a.sum() + b.square().sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_that_is_replayed(method):
    """A whole training step, spectrum and all, follows what changes in inputs and angles."""
    rope = make(method, block_size=8, dtype=torch.float32)
    q, k = queries_and_keys(rope)
    q, k, positions = on_gpu(rope, q, k, torch.rand(6, 2))
    inputs = [q, k, *rope.parameters()]

    def step():
        a, b = rope(q, k, positions)
        return torch.autograd.grad((a @ b.repeat_interleave(2, 1).mT).tanh().sum(), inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    with torch.no_grad():
        for tensor in (*inputs, positions):
            tensor.add_(0.1 * torch.randn_like(tensor))
    graph.replay()
    torch.testing.assert_close(replayed, step(), rtol=1e-4, atol=1e-4)


def test_a_graph_is_timed_without_the_launches():
    x = torch.zeros(1, device="cuda")

    def call() -> None:
        for _ in range(3000):  # more than a queue holds
            x.add_(1)

    graph = timing.make_ready(call, x.device, rounds=3, recorder=timing.Recorder())
    plain = timing.make_ready(call, x.device, rounds=3)
    found = timing.time_in_turns({"graph": graph, "plain": plain}, x.device)
    assert (found["graph"].graph, found["plain"].graph) == (True, False)
    assert found["graph"].ms < 0.9 * found["plain"].ms
    before = float(x)
    graph.run()
    assert float(x) == before + 3000 * graph.repeats


def test_noise_from_a_generator_is_the_same_on_every_device():
    positions = comrope.grid((4, 4))
    here, there = (
        comrope.perturb(p, 0.25, 1.0, generator=torch.Generator().manual_seed(0))
        for p in (positions, positions.cuda())
    )
    assert there.is_cuda
    torch.testing.assert_close(here, there.cpu())


def test_millions_of_exponentials():
    """LieRE with positions per sample, as in training a ViT-B: more than torch takes at once."""
    rope = comrope.RotaryEmbedding("liere", num_heads=12, head_dim=64, device="cuda")
    q = torch.randn(128, 12, 197, 64, device="cuda", requires_grad=True)
    positions = torch.rand(128, 197, 2, device="cuda")
    out = rope(q, q, positions)[0]
    out.square().sum().backward()
    torch.testing.assert_close(q.grad, 2 * q, rtol=1e-3, atol=1e-3)  # rotations keep lengths
    few = rope(q[-1:], q[-1:], positions[-1:])[0]
    torch.testing.assert_close(out[-1:], few, rtol=1e-4, atol=1e-4)


def test_built_on_the_gpu(method):
    rope = comrope.RotaryEmbedding(method, num_heads=2, head_dim=32, device="cuda")
    q = torch.randn(1, 2, 4, 32, device="cuda")
    positions = comrope.grid((2, 2), device="cuda")
    assert rope(q, q, positions)[0].is_cuda
    assert rope.angle_matrices().is_cuda
    assert rope.rotation_matrices(positions).is_cuda


@pytest.mark.parametrize(
    ("position", "values"),
    [
        ("none", False), ("ape", False), ("rope", False), ("comrope-ld", False), ("liere", False),
        ("rope", True), ("comrope-torus", True), ("comrope-ld", True), ("liere", True),
    ],
)  # fmt: skip
def test_a_network_never_waits_for_the_gpu(position, values):
    model = comrope.models.create_model(
        "vit_tiny_patch16_224", position=position, depth=2, rotate_values=values
    ).cuda()
    images = torch.randn(2, 3, 64, 64, device="cuda")

    def step():
        places = comrope.perturb(comrope.grid((4, 4), device="cuda"), 0.25, 1.0, batch_size=2)
        (model(images, places).square().sum() + model(images).square().sum()).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_optimizer_is_fused_and_can_be_saved():
    from comrope.experiments.config import load_recipe
    from comrope.experiments.training.optim import create_optimizer
    from comrope.experiments.training.state import (
        load_optimizer,
        optimizer_numbers,
        optimizer_tensors,
    )

    config, x = load_recipe("digits"), torch.ones(2, 4, device="cuda")
    models = [torch.nn.Linear(4, 3, device="cuda") for _ in range(2)]
    first, second = optimizers = [create_optimizer(config, model) for model in models]
    assert all(group["fused"] for group in first.param_groups)
    models[0](x).square().sum().backward()
    first.step()
    tensors = {n: t.cpu() for n, t in optimizer_tensors(models[0], first).items()}
    load_optimizer(models[1], second, tensors, optimizer_numbers(first))
    models[1].load_state_dict(models[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=0, atol=0)


@pytest.mark.parametrize("position", [*comrope.METHODS, "none"])
def test_a_language_model_with_a_cache(position):
    """The logits of the whole text, without synchronizing after the first call."""
    rotation = {} if position == "none" else {"rotate_values": True, "backend": "auto"}
    for low, limit in ((False, 1e-4), (True, 0.05)):
        model = gpts.nano(position, dtype=torch.float32, num_kv_heads=2, **rotation).cuda()
        tokens = gpts.text(2, 40).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=low), torch.no_grad():
            expected, cache = model(tokens), model.new_cache(2, 40)
            parts = [model(tokens[:, :30], cache=cache)]
            torch.cuda.set_sync_debug_mode("error")
            try:
                parts += [model(part, cache=cache) for part in tokens[:, 30:].split(1, dim=1)[:6]]
                parts += [model(tokens[:, 36:], cache=cache)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert relative_error(torch.cat(parts, 1).float(), expected.float()) < limit
        texts = [model.generate(tokens, 10, use_cache=use_cache) for use_cache in (True, False)]
        assert torch.equal(*texts)


@pytest.mark.parametrize("position", ["comrope-ld", "comrope-torus", "rope"])
def test_a_compiled_language_model(position):
    model = gpts.nano(position, dtype=torch.float32, rotate_values=True, num_kv_heads=2).cuda()
    tokens = gpts.text(2, 40).cuda()

    def outcome():
        logits = model(tokens)
        loss = logits.log_softmax(-1)[..., 0].sum()
        return [logits, *torch.autograd.grad(loss, [*model.parameters()])]

    expected, continued = outcome(), model.generate(tokens, 10)
    for block in model.blocks:
        block.compile(fullgraph=True)
    for a, b in zip(outcome(), expected, strict=True):
        assert relative_error(a, b) < 1e-3
    assert torch.equal(model.generate(tokens, 10), continued)
    torch.compiler.reset()
