# mypy: disable-error-code="assignment, misc, var-annotated"
"""Arithmetic of small square matrices inside kernels.

P is the size of a matrix, padded with zeros to a power of two. Up to P = 8, a matrix ``x`` is a
tuple of P^2 vectors, one an entry, over the matrices of a program: each thread holds a whole matrix
in its registers, and a product is nothing but multiply-adds. Beyond, ``x`` is a (P, P) tensor, the
program's only matrix.

Entries are added by ``tl.fma``, and matrices are loaded and stored whole, because the compiler
takes a time proportional to the loads and stores times the square of the operations between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "GENERAL",
    "IN_REGISTERS",
    "SKEW",
    "SYMMETRIC",
    "add",
    "add_identity",
    "from_upper",
    "half_square",
    "join_columns",
    "load",
    "multiply",
    "scale",
    "select",
    "split_columns",
    "split_entries",
    "store",
    "transpose",
]

IN_REGISTERS = tl.constexpr(8)  # the largest P of which a thread holds a matrix
GENERAL, SYMMETRIC, SKEW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(-1)


@triton.jit
def multiply(x, y, RESULT: tl.constexpr, HOLLOW: tl.constexpr, P: tl.constexpr):
    """Return x y, known to be RESULT. HOLLOW: how many of x, y, in order, have a zero diagonal."""
    if P > IN_REGISTERS:
        product = tl.dot(x, y, input_precision="ieee")
    else:
        product = ()
        for i in tl.static_range(P):
            for j in tl.static_range(P):
                if RESULT != GENERAL and j < i:
                    entry = product[j * P + i]
                    if RESULT == SKEW:
                        entry = -entry
                else:
                    entry = tl.zeros_like(x[0])
                    if not (RESULT == SKEW and j == i):
                        for k in tl.static_range(P):
                            if not ((HOLLOW > 0 and k == i) or (HOLLOW > 1 and k == j)):
                                entry = tl.fma(x[i * P + k], y[k * P + j], entry)
                product = product + (entry,)
    return product


@triton.jit
def add(x, a, y, P: tl.constexpr):
    """Return x + a y."""
    if P > IN_REGISTERS:
        total = x + a * y
    else:
        factor = tl.zeros_like(x[0]) + a
        total = ()
        for entry in tl.static_range(P * P):
            total = total + (tl.fma(factor, y[entry], x[entry]),)
    return total


@triton.jit
def scale(a, x, P: tl.constexpr):
    """Return a x."""
    if P > IN_REGISTERS:
        scaled = a * x
    else:
        scaled = ()
        for entry in tl.static_range(P * P):
            scaled = scaled + (a * x[entry],)
    return scaled


@triton.jit
def add_identity(x, a, P: tl.constexpr):
    """Return x + a I."""
    if P > IN_REGISTERS:
        total = x + tl.where(tl.arange(0, P)[:, None] == tl.arange(0, P)[None, :], a, 0.0)
    else:
        total = ()
        for entry in tl.static_range(P * P):
            if entry % (P + 1) == 0:
                total = total + (x[entry] + a,)
            else:
                total = total + (x[entry],)
    return total


@triton.jit
def transpose(x, P: tl.constexpr):
    """Return x^T."""
    if P > IN_REGISTERS:
        transposed = tl.trans(x)
    else:
        transposed = ()
        for entry in tl.static_range(P * P):
            transposed = transposed + (x[entry % P * P + entry // P],)
    return transposed


@triton.jit
def from_upper(x, P: tl.constexpr):
    """Return the skew matrix x, from its upper triangle: a loop then carries no more of it."""
    if P > IN_REGISTERS:
        skew = x
    else:
        skew = ()
        for entry in tl.static_range(P * P):
            if entry // P < entry % P:
                skew = skew + (x[entry],)
            else:
                skew = skew + (-x[entry % P * P + entry // P],)
    return skew


@triton.jit
def half_square(x, P: tl.constexpr):
    """Return half the sum of squares of the entries of the skew matrix x."""
    if P > IN_REGISTERS:
        total = 0.5 * tl.sum(tl.sum(x * x, 1), 0)
    else:
        total = tl.zeros_like(x[0])
        for entry in tl.static_range(P * P):
            if entry // P < entry % P:
                total = tl.fma(x[entry], x[entry], total)
    return total


@triton.jit
def select(condition, x, y, P: tl.constexpr):
    """Return x for matrices where ``condition`` holds, else y."""
    if P > IN_REGISTERS:
        chosen = tl.where(condition, x, y)
    else:
        chosen = ()
        for entry in tl.static_range(P * P):
            chosen = chosen + (tl.where(condition, x[entry], y[entry]),)
    return chosen


@triton.jit
def _addresses(base, offset, inside, SIZE: tl.constexpr, P: tl.constexpr):
    """Return where the entries of padded matrices are, (P, P) or (M, P^2), and which exist."""
    if P > IN_REGISTERS:  # the only matrix of a program is always inside
        row, column = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
        at = base + (offset + row * SIZE + column)
        mask = (row < SIZE) & (column < SIZE)
    else:
        entry = tl.arange(0, P * P)[None, :]
        mask = inside[:, None]
        if SIZE < P:
            mask = mask & (entry // P < SIZE) & (entry % P < SIZE)
            entry = entry // P * SIZE + entry % P
        at = base + (offset[:, None] + entry)
    return at, mask


@triton.jit
def load(base, offset, inside, SIZE: tl.constexpr, P: tl.constexpr):
    """Load contiguous (SIZE, SIZE) matrices at ``base + offset`` where ``inside``, not split."""
    at, mask = _addresses(base, offset, inside, SIZE, P)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def split_entries(x, P: tl.constexpr):
    """Return what ``load`` returns, (P, P) or (M, P^2), as a matrix."""
    if P > IN_REGISTERS:
        single = x
    else:
        single = split_columns(x, P * P)
    return single


@triton.jit
def split_columns(x, COUNT: tl.constexpr):
    """Split (M, COUNT), COUNT a power of two up to 128, into as many (M,), by halves."""
    parts = (x,)
    for step in tl.static_range(7):
        if COUNT >> step > 1:
            halves = ()
            for part in tl.static_range(1 << step):
                both = tl.reshape(parts[part], (x.shape[0], 2, COUNT >> (step + 1)))
                first, second = tl.split(tl.permute(both, (0, 2, 1)))
                halves = halves + (first, second)
            parts = halves
    single = ()
    for part in tl.static_range(COUNT):
        single = single + (tl.reshape(parts[part], (x.shape[0],)),)
    return single


@triton.jit
def join_columns(x, COUNT: tl.constexpr):
    """Join COUNT (M,), a power of two up to 128, to (M, COUNT)."""
    parts = ()
    for part in tl.static_range(COUNT):
        parts = parts + (tl.reshape(x[part], (x[0].shape[0], 1)),)
    for step in tl.static_range(7):
        if COUNT >> step > 1:
            pairs = ()
            for pair in tl.static_range(COUNT >> (step + 1)):
                both = tl.permute(tl.join(parts[2 * pair], parts[2 * pair + 1]), (0, 2, 1))
                pairs = pairs + (tl.reshape(both, (x[0].shape[0], 2 << step)),)
            parts = pairs
    return parts[0]


@triton.jit
def store(base, offset, x, inside, SIZE: tl.constexpr, P: tl.constexpr):
    """Store a matrix where ``load`` would read it."""
    at, mask = _addresses(base, offset, inside, SIZE, P)
    if P > IN_REGISTERS:
        tl.store(at, x, mask=mask)
    else:
        tl.store(at, join_columns(x, P * P), mask=mask)
