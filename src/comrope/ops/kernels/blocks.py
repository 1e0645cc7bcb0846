# mypy: disable-error-code="assignment, misc, var-annotated"
"""The rotation of blocks of four or eight channels, each in the registers of one thread.

As rotation.py, for the sizes that matter most. The basis stays in registers from row to row, and
its change is plain multiply-adds in float32: nothing passes through shared memory but what is
fetched ahead, and no thread waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from comrope.ops.kernels.items import (
    channels,
    load_basis,
    load_frequencies,
    load_item,
    parts,
    rotated,
    store_item,
    times,
    turns_of,
    work_of,
)
from comrope.ops.kernels.tiles import place_of

__all__ = ["rotate_blocks_kernel"]


@triton.jit
def rotate_blocks_kernel(
    q, k, v, q_out, k_out, v_out, positions, frequencies, basis,
    q_strides, k_strides, v_strides, q_out_strides, k_out_strides, v_out_strides,
    rows, tokens, prefix, position_rows, heads, blocks, shares,
    GROUP: tl.constexpr, AXES: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, FLAT: tl.constexpr, PER_SAMPLE: tl.constexpr,
    HAS_V: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = Rot(phi) Q^T x for q and k; v, where given, is copied. Strides: sample, head, token."""
    head, first, share = work_of(heads, blocks, BLOCKS)
    item = tl.arange(0, ROWS * BLOCKS)
    block = first + item % BLOCKS
    matrix = load_basis(basis, head, block, blocks, SIZE)
    w = load_frequencies(frequencies, head, block, heads, blocks, AXES, SIZE // 2)
    tiles = tl.cdiv(rows, ROWS)
    for step in tl.range(share, tiles, shares, num_stages=STAGES):
        row = (tiles - 1 - step) * ROWS + item // BLOCKS
        live = (row < rows) & (block < blocks)
        place, turned = place_of(row, live, tokens, prefix, position_rows, PER_SAMPLE)
        cos, sin = turns_of(positions, place, turned, w, AXES, SIZE // 2, FAST)
        k_at = channels(k, row, tokens, head, k_strides, block, SIZE, HALVES, FLAT)
        key = load_item(k_at, live, blocks, SIZE, HALVES)
        if HAS_V:
            v_at = channels(v, row, tokens, head, v_strides, block, SIZE, False, FLAT)
            value = load_item(v_at, live, blocks, SIZE, False)
        for member in tl.static_range(GROUP):
            query = head * GROUP + member
            at = channels(q, row, tokens, query, q_strides, block, SIZE, HALVES, FLAT)
            x = load_item(at, live, blocks, SIZE, HALVES)
            at = channels(q_out, row, tokens, query, q_out_strides, block, SIZE, HALVES, FLAT)
            y = rotated(times(parts(x, SIZE, HALVES), matrix, SIZE, True), cos, sin, SIZE)
            store_item(at, y, live, blocks, SIZE, HALVES)
        at = channels(k_out, row, tokens, head, k_out_strides, block, SIZE, HALVES, FLAT)
        y = rotated(times(parts(key, SIZE, HALVES), matrix, SIZE, True), cos, sin, SIZE)
        store_item(at, y, live, blocks, SIZE, HALVES)
        if HAS_V:
            at = channels(v_out, row, tokens, head, v_out_strides, block, SIZE, False, FLAT)
            tl.store(at, value[0], mask=live[:, None])
