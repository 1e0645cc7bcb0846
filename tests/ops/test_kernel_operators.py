"""The kernels as operators: packed tensors, the compiler, checkpointing, and who is chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import make, queries_and_keys

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", ["rope-mixed", "comrope-ld", "comrope-torus", "liere"])
def test_packed_is_the_same_with_the_gradients_in_one_tensor(name):
    rope = make(name, dtype=torch.float32, head_dim=16, backend="triton").to(DEVICE)
    qkv = torch.randn(2, 7, 2 * 2 + 2 * 2, 16, device=DEVICE, requires_grad=True)
    positions = torch.rand(2, 7, 2, device=DEVICE)
    apart = [x.transpose(1, 2) for x in qkv.split([4, 2, 2], dim=2)]
    expected = (*rope(*apart[:2], positions), apart[2])
    got = rope.rotate_qkv(qkv, positions)
    grads = [torch.randn_like(x) for x in expected]
    inputs = [qkv, *rope.parameters()]
    got = (*got, *torch.autograd.grad(got, inputs, grads))
    expected = (*expected, *torch.autograd.grad(expected, inputs, grads))
    for a, b in zip(got, expected, strict=True):  # two compilations may round differently
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_packed_without_gradients_turns_in_place():
    rope = make("comrope-ld", dtype=torch.float32, head_dim=16, backend="triton").to(DEVICE)
    qkv, positions = torch.randn(2, 7, 6, 16, device=DEVICE), torch.rand(7, 2, device=DEVICE)
    q, k, v = (x.transpose(1, 2).clone() for x in qkv.split([2, 2, 2], dim=2))
    with torch.no_grad():
        expected = (*rope(q, k, positions), v)
        kept = qkv.clone()
        apart = rope.rotate_qkv(qkv, positions)
        assert torch.equal(qkv, kept)
        got = rope.rotate_qkv(qkv, positions, inplace=True)
    for a, b, c in zip(got, expected, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(c, b, rtol=1e-6, atol=1e-6)
        assert a.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", ["expanded", "channels apart"])
def test_packed_in_any_layout(layout):
    rope = make("comrope-torus", dtype=torch.float32, head_dim=16, backend="triton").to(DEVICE)
    positions = torch.rand(7, 2, device=DEVICE)
    if layout == "expanded":
        qkv = torch.randn(1, 7, 6, 16, device=DEVICE).expand(3, -1, -1, -1)
    else:
        qkv = torch.randn(3, 16, 7, 6, device=DEVICE).permute(0, 2, 3, 1)
    with torch.no_grad():
        copied = qkv.clone(memory_format=torch.contiguous_format)
        expected = rope.rotate_qkv(copied, positions, inplace=True)
        got = rope.rotate_qkv(qkv, positions, inplace=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_function_transforms_are_left_to_the_spectral_path():
    rope = make("comrope-ld", dtype=torch.float32, head_dim=16).to(DEVICE)
    q, k = (x.detach().float().to(DEVICE) for x in queries_and_keys(rope))
    positions = torch.rand(3, 6, 2, device=DEVICE)
    usual = "triton" if DEVICE == "cuda" else "spectral"
    assert rope.select_backend(q, k, positions[0]).backend == usual
    many = torch.func.vmap(lambda x: rope(q, k, x)[0])(positions)
    rope.backend = "triton"
    with pytest.raises(ValueError, match="no function transforms"):
        torch.func.vmap(lambda x: rope(q, k, x)[0])(positions)
    rope.backend = "spectral"
    for one, x in zip(many, positions, strict=True):
        torch.testing.assert_close(one, rope(q, k, x)[0])


@pytest.mark.parametrize("name", ["rope-mixed", "comrope-ld", "comrope-torus"])
def test_operators_are_well_formed(name):
    from comrope.ops.kernels import operators

    rope = make(name, dtype=torch.float32, block_size=8, head_dim=16).to(DEVICE)
    q, k = (x.detach().float().to(DEVICE).requires_grad_() for x in queries_and_keys(rope))
    positions = torch.rand(6, 2, device=DEVICE)
    prepared = operators.prepare(positions, rope.angles())
    prepared = tuple(p.detach() if isinstance(p, torch.Tensor) else p for p in prepared)
    torch.library.opcheck(operators.rotate, (q, k, *prepared, 0, False))
    qkv = torch.randn(2, 6, 8, 16, device=DEVICE, requires_grad=True)
    torch.library.opcheck(operators.rotate_packed, (qkv, *prepared, 0, False))
    positions, frequencies, basis, *_, size = prepared
    arguments = (qkv.detach(), positions, frequencies, basis, size, 0, False)
    torch.library.opcheck(operators.rotate_packed_, arguments)


@pytest.mark.parametrize("name", ["rope-mixed", "comrope-ld", "comrope-torus"])
def test_compiles_as_one_graph(name):
    rope = make(name, dtype=torch.float32, head_dim=16, backend="triton").to(DEVICE)
    qkv = torch.randn(2, 7, 8, 16, device=DEVICE, requires_grad=True)
    positions = torch.rand(2, 7, 2, device=DEVICE)

    def attend(qkv, positions):
        q, k, v = rope.rotate_qkv(qkv * 1.0, positions, inplace=True)
        q, k = rope(q, k, positions)
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).square().sum()

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    inputs = [qkv, *rope.parameters()]
    expected = torch.autograd.grad(attend(qkv, positions), inputs)
    got = torch.autograd.grad(compiled(qkv, positions), inputs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(qkv, positions), attend(qkv, positions))
    torch.compiler.reset()


def test_checkpointing_recomputes_it():
    rope = make("comrope-ld", dtype=torch.float32, head_dim=16, backend="triton").to(DEVICE)
    qkv = torch.randn(2, 7, 6, 16, device=DEVICE, requires_grad=True)
    positions = torch.rand(7, 2, device=DEVICE)

    def loss(qkv):
        q, k, v = rope.rotate_qkv(qkv, positions)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).square().sum()

    recomputed = torch.utils.checkpoint.checkpoint(loss, qkv, use_reentrant=False)
    inputs = [qkv, *rope.parameters()]
    for a, b in zip(
        torch.autograd.grad(recomputed, inputs), torch.autograd.grad(loss(qkv), inputs),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(a, b)


def test_the_kernels_compile_for_a_gpu_and_stay_in_registers():
    """Without a GPU, by Triton's own compiler, for sizes that matter; types and all."""
    script = Path(__file__).with_name("compile_for_gpu.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {row["kernel"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 14
    for name, row in found.items():
        if name.startswith(("ViT-B", "Llama")):
            assert row["spilled"] <= 64, row  # a few numbers, once a row
            assert row["wide_loads"] > 0 or "angle gradients" in name, row


def test_an_empty_batch_has_empty_gradients():
    rope = make("comrope-ld", dtype=torch.float32, head_dim=16, backend="triton").to(DEVICE)
    q, k = torch.randn(0, 4, 7, 16, device=DEVICE), torch.randn(0, 2, 7, 16, device=DEVICE)
    positions = torch.rand(0, 7, 2, device=DEVICE, requires_grad=True)
    out = rope(q.requires_grad_(), k, positions)
    grads = torch.autograd.grad(sum(x.sum() for x in out), [q, positions, *rope.parameters()])
    assert grads[0].shape == q.shape
    assert all(not grad.any() for grad in grads)


def test_not_a_number_stays_one_in_tf32(monkeypatch):
    """The NaN that a GPU makes has all bits set, and rounding by its bits would make it zero."""
    from comrope.ops.kernels import launch

    monkeypatch.setitem(launch.PRECISIONS, torch.float32, "tf32")
    rope = make("comrope-torus", dtype=torch.float32, head_dim=16, backend="triton").to(DEVICE)
    q, k = (x.detach().float().to(DEVICE) for x in queries_and_keys(rope))
    q.view(torch.int32)[0, 0, 0, :] = 0x7FFFFFFF
    turned, _ = rope(q, k, torch.rand(6, 2, device=DEVICE))
    assert turned[0, 0, 0].isnan().all()
    assert turned[0, 0, 1:].isfinite().all()


def test_a_spectrum_may_lie_in_memory_as_it_likes():
    rope = make("comrope-ld", dtype=torch.float32, block_size=8, head_dim=16).to(DEVICE)
    q, k = (x.detach().float().to(DEVICE) for x in queries_and_keys(rope))
    positions = torch.rand(6, 2, device=DEVICE)
    line = rope.angles().cache_spectrum()
    basis, planes = line.cached_spectrum
    turned = line._replace(cached_spectrum=(basis.mT.contiguous().mT, planes))
    rope.backend = "triton"
    for a, b in zip(
        rope(q, k, positions, angles=turned), rope(q, k, positions, angles=line), strict=True
    ):
        assert torch.equal(a, b)


def test_whoever_looks_on_sees_operators():
    """Where launches would be hidden from: a tracer, other kinds of tensors, many gradients."""
    from torch.fx.experimental.proxy_tensor import make_fx

    rope = make("comrope-torus", dtype=torch.float32, head_dim=16, backend="triton").to(DEVICE)
    q, k = (x.detach().float().to(DEVICE) for x in queries_and_keys(rope))
    positions = torch.rand(6, 2, device=DEVICE)
    traced = make_fx(lambda q, k: rope(q, k, positions))(q, k)
    assert any(node.target == torch.ops.comrope.rotate.default for node in traced.graph.nodes)
    for got, expected in zip(traced(q, k), rope(q, k, positions), strict=True):
        assert torch.equal(got, expected)

    q.requires_grad_()
    out = rope(q, k, positions)[0]
    grads = torch.randn(3, *out.shape, device=DEVICE)
    (many,) = torch.autograd.grad(out, q, grads, retain_graph=True, is_grads_batched=True)
    for one, grad in zip(many, grads, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(out, q, grad, retain_graph=True)[0])


def test_forward_mode_is_left_to_others():
    rope = make("comrope-torus", dtype=torch.float32, head_dim=16, backend="triton").to(DEVICE)
    qkv = torch.randn(2, 5, 6, 16, device=DEVICE)
    positions = torch.rand(5, 2, device=DEVICE)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(qkv, torch.ones_like(qkv))
        with pytest.raises(ValueError, match="no function transforms"):
            rope.rotate_qkv(dual, positions, inplace=True)


def test_numbers_that_share_a_place_are_turned_once():
    rope = make("comrope-torus", dtype=torch.float32, head_dim=16, backend="triton").to(DEVICE)
    line = torch.randn(200, device=DEVICE)
    windows = line.as_strided((1, 4, 6, 16), (0, 20, 16, 1))  # a token begins within the last one
    positions = torch.rand(4, 2, device=DEVICE)
    with torch.no_grad():
        expected = rope.rotate_qkv(windows.clone(), positions)
        got = rope.rotate_qkv(windows, positions, inplace=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
