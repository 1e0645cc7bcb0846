"""Bases folded into weights: against the definition, matrix by matrix."""

from __future__ import annotations

import pytest
import torch

from comrope.ops.folding import fold_into_inputs, fold_into_outputs
from comrope.ops.layout import halves_to_neighbours

HEADS, BLOCKS, SIZE, INPUTS = 2, 3, 4, 5
DIM = BLOCKS * SIZE


@pytest.fixture
def basis():
    random = torch.randn(HEADS, BLOCKS, SIZE, SIZE, dtype=torch.float64)
    return torch.linalg.qr(random).Q


def whole(basis, order):
    """Q of whole heads (H, D, D), in the channel order of the model."""
    matrices = torch.stack([torch.block_diag(*blocks) for blocks in basis])
    if order == "half":
        back = torch.argsort(halves_to_neighbours(torch.arange(DIM)[None])[0])
        matrices = matrices[:, back][:, :, back]
    return matrices


@pytest.mark.parametrize("order", ["interleaved", "half"])
@pytest.mark.parametrize("inputs", [(), (INPUTS,)])  # a bias, a weight
def test_outputs(order, inputs, basis):
    parameter = torch.randn(2 * HEADS * DIM, *inputs, dtype=torch.float64)
    parts = parameter.unflatten(0, (2, HEADS, DIM))
    expected = torch.einsum("hij,phi...->phj...", whole(basis, order), parts).flatten(0, 2)
    torch.testing.assert_close(fold_into_outputs(parameter, basis, order), expected)


@pytest.mark.parametrize("order", ["interleaved", "half"])
def test_rows_of_grouped_queries(order, basis):
    """Four heads of queries for two of keys, somewhere in a parameter."""
    parameter = torch.randn(100, INPUTS, dtype=torch.float64)
    rows = torch.randperm(100)[: 2 * HEADS * DIM].view(2 * HEADS, DIM)
    folded = fold_into_outputs(parameter, basis, order, rows)
    for head, index in enumerate(rows):
        expected = whole(basis, order)[head // 2].mT @ parameter[index]
        torch.testing.assert_close(folded[index], expected)
    others = torch.tensor(sorted(set(range(100)) - set(rows.flatten().tolist())))
    assert torch.equal(folded[others], parameter[others])


@pytest.mark.parametrize("order", ["interleaved", "half"])
def test_inputs(order, basis):
    weight = torch.randn(INPUTS, HEADS * DIM, dtype=torch.float64)
    heads = weight.unflatten(1, (HEADS, DIM))
    expected = torch.einsum("chi,hij->chj", heads, whole(basis, order)).flatten(1)
    torch.testing.assert_close(fold_into_inputs(weight, basis, order, HEADS), expected)


def test_gradients_and_rounding(basis):
    weight = torch.randn(HEADS * DIM, INPUTS, dtype=torch.float64, requires_grad=True)
    rows = torch.arange(HEADS * DIM).view(HEADS, DIM)
    basis.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda w, q: fold_into_outputs(w, q, "half", rows), (weight, basis)
    )
    assert torch.autograd.gradcheck(
        lambda w, q: fold_into_inputs(w.mT, q, "half", HEADS), (weight, basis)
    )
    narrow = weight.detach().float()
    exact = fold_into_outputs(narrow, basis.detach().float(), "half", exact=True)
    wide = fold_into_outputs(narrow.double(), basis.detach().float().double(), "half")
    assert exact.dtype == torch.float32
    assert torch.equal(exact, wide.float())
