"""torch.compile: one graph, no complex numbers in it, no recompilation for another length."""

from __future__ import annotations

import shutil

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.testing import CompileCounterWithBackend

import comrope

pytestmark = pytest.mark.slow

# Inductor needs a C++ compiler on the CPU; without one the graphs are traced and run unchanged.
BACKEND = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


def inputs(tokens: int, dtype: torch.dtype = torch.float32):
    q = torch.randn(2, 4, tokens, 16, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 2, tokens, 16, dtype=dtype, requires_grad=True)
    return q, k, torch.rand(2, tokens, 2)


def gradients(rope, q, k, positions):
    out = rope(q, k, positions)
    score = out[0].float() @ out[1].float().repeat_interleave(2, dim=1).mT
    return torch.autograd.grad(score.tanh().sum(), [q, k, *rope.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_forward_and_backward(method, dtype):
    torch._dynamo.reset()
    rope = comrope.RotaryEmbedding(method, num_heads=2, head_dim=16, block_size=8)
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(rope, fullgraph=True, backend=counter)
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.04, "atol": 0.05}
    )
    frames = []
    for tokens in (5, 9, 13, 21, 4):
        q, k, positions = inputs(tokens, dtype)
        got = gradients(compiled, q, k, positions)
        torch.testing.assert_close(got, gradients(rope, q, k, positions), **tolerance)
        frames.append(counter.frame_count)
    assert frames[1:] == [frames[1]] * 4  # the second length makes the graph dynamic, once
    assert frames[-1] <= 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("comrope-ld", {"shared_heads": True}),
        ("comrope-torus", {"shared_heads": True, "log_frequencies": True}),
        ("liere", {"shared_heads": True}),
        ("rope", {"rotated_share": 0.5}),
    ],
)
def test_options_of_methods_are_compiled(name, options):
    torch._dynamo.reset()
    rope = comrope.RotaryEmbedding(name, num_heads=2, head_dim=16, block_size=8, **options)
    compiled = torch.compile(rope, fullgraph=True, backend=BACKEND)
    q, k, positions = inputs(5)
    expected = gradients(rope, q, k, positions)
    torch.testing.assert_close(gradients(compiled, q, k, positions), expected, rtol=1e-4, atol=1e-4)


def test_no_complex_numbers_in_the_graph(method):
    torch._dynamo.reset()
    rope = comrope.RotaryEmbedding(method, num_heads=2, head_dim=16, block_size=8)
    seen = []

    def record(graph, example_inputs):
        seen.extend(n.meta["val"] for n in graph.graph.nodes if "val" in n.meta)
        return make_boxed_func(graph.forward)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=record, bw_compiler=record)
    gradients(torch.compile(rope, fullgraph=True, backend=backend), *inputs(5))
    tensors = [
        t
        for value in seen
        for t in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(t, torch.Tensor)
    ]
    assert len(tensors) > 20
    assert not any(t.is_complex() for t in tensors)


def test_export_keeps_the_length_dynamic(method):
    rope = comrope.RotaryEmbedding(method, num_heads=2, head_dim=16, block_size=8)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    dynamic = {"q": {2: tokens}, "k": {2: tokens}, "positions": {1: tokens}}
    with torch.no_grad():
        # As many queries as keys: with grouped ones, torch 2.11 cannot prove its own guards.
        _, k, positions = (x.detach() for x in inputs(7))
        exported = torch.export.export(rope, (k, k, positions), dynamic_shapes=dynamic).module()
        _, k, positions = (x.detach() for x in inputs(19))
        torch.testing.assert_close(exported(k, k, positions), rope(k, k, positions))
