"""Triton kernels of the lookups in `cuda_ops.py`.

Each kernel gets all entries, and a program of its grid reads the start and the end of its row.
Sums are in float32 for half precision. Gradients of a table are added up by atomic operations, in any order. An id
outside of its table reads NaN, where PyTorch's kernels end the process.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from subclasses.keyed.kernels import MAX, MEAN, SUM

# An id is spread over the columns before it is compared: Triton's interpreter accepts no mask made of a single bool.
# A kernel reads no global numbers except constants of Triton.
IS_SUM, IS_MEAN, IS_MAX = tl.constexpr(SUM), tl.constexpr(MEAN), tl.constexpr(MAX)

# ---- kernels ---------------------------------------------------------------------------------------------------


@triton.jit
def row_bounds(offsets_ptr, lengths_ptr, first_offset, first_length, HAS_LENGTHS: tl.constexpr):
    """Returns the start and the end of this program's row among the entries."""
    row = tl.program_id(0)
    start = tl.load(offsets_ptr + first_offset + row).to(tl.int64)
    if HAS_LENGTHS:
        end = start + tl.load(lengths_ptr + first_length + row)
    else:
        end = tl.load(offsets_ptr + first_offset + row + 1).to(tl.int64)
    return start, end


@triton.jit
def keyed_pool_kernel(  # noqa: PLR0913
    table_ptr,
    ids_ptr,
    offsets_ptr,
    lengths_ptr,
    weights_ptr,
    out_ptr,
    counts_ptr,
    picked_ptr,
    width,
    row_step,
    left,
    first_offset,
    first_length,
    table_rows,
    padding,
    MODE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    SUM_IN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pools one row, `BLOCK` columns of it: a sum, a mean or a maximum of the table's rows at its ids."""
    row, d = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = row_bounds(offsets_ptr, lengths_ptr, first_offset, first_length, HAS_LENGTHS)
    total = tl.zeros((BLOCK,), dtype=SUM_IN)
    best = tl.full((BLOCK,), -1, dtype=tl.int64)
    number = tl.zeros((BLOCK,), dtype=tl.int64)
    for e in range(start, end):
        id = tl.load(ids_ptr + e).to(tl.int64) + tl.zeros((BLOCK,), dtype=tl.int64)
        counts, exists = id != padding, (id >= 0) & (id < table_rows)
        x = tl.load(table_ptr + id * width + d, mask=(d < width) & exists, other=float("nan")).to(SUM_IN)
        x = tl.where(counts, x, 0.0)
        if HAS_WEIGHTS:
            x = x * tl.load(weights_ptr + e).to(SUM_IN)
        if MODE == IS_MAX:
            larger = counts & ((number == 0) | (x > total) | ~exists)
            total = tl.where(larger, x, total)
            best = tl.where(larger, id, best)
        else:
            total += x
        number += counts.to(tl.int64)
    if MODE == IS_MEAN:
        total = total / tl.maximum(number, 1).to(SUM_IN)
    offset = row.to(tl.int64) * row_step + left + d
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=d < width)
    if MODE != IS_SUM:
        at = counts_ptr + first_length + row + d * 0
        tl.store(at, number.to(counts_ptr.dtype.element_ty), mask=d == 0)
    if MODE == IS_MAX:
        tl.store(picked_ptr + offset, best.to(picked_ptr.dtype.element_ty), mask=d < width)


@triton.jit
def keyed_table_grad_kernel(  # noqa: PLR0913
    grad_ptr,
    table_grad_ptr,
    ids_ptr,
    offsets_ptr,
    lengths_ptr,
    weights_ptr,
    counts_ptr,
    picked_ptr,
    width,
    row_step,
    left,
    first_offset,
    first_length,
    table_rows,
    padding,
    MODE: tl.constexpr,
    IS_POOLED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the cotangent of one row, or of each of its entries, to the gradient of the table at its ids."""
    row, d = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = row_bounds(offsets_ptr, lengths_ptr, first_offset, first_length, HAS_LENGTHS)
    dtype = table_grad_ptr.dtype.element_ty
    offset = row.to(tl.int64) * row_step + left + d
    g = tl.zeros((BLOCK,), dtype=dtype)
    if IS_POOLED:
        g = tl.load(grad_ptr + offset, mask=d < width, other=0.0).to(dtype)
    if MODE == IS_MAX:
        id = tl.load(picked_ptr + offset, mask=d < width, other=-1).to(tl.int64)
        tl.atomic_add(table_grad_ptr + id * width + d, g, mask=(d < width) & (id >= 0) & (id < table_rows))
    else:
        if MODE == IS_MEAN:
            g = g / tl.maximum(tl.load(counts_ptr + first_length + row), 1).to(dtype)
        for e in range(start, end):
            id = tl.load(ids_ptr + e).to(tl.int64) + tl.zeros((BLOCK,), dtype=tl.int64)
            one = g
            if not IS_POOLED:
                one = tl.load(grad_ptr + e * row_step + d, mask=d < width, other=0.0).to(dtype)
            if HAS_WEIGHTS:
                one = one * tl.load(weights_ptr + e).to(dtype)
            inside = (d < width) & (id >= 0) & (id < table_rows)
            tl.atomic_add(table_grad_ptr + id * width + d, one, mask=inside & (id != padding))


@triton.jit
def keyed_weights_grad_kernel(  # noqa: PLR0913
    grad_ptr,
    table_ptr,
    weights_grad_ptr,
    ids_ptr,
    offsets_ptr,
    lengths_ptr,
    width,
    row_step,
    left,
    first_offset,
    first_length,
    table_rows,
    padding,
    HAS_LENGTHS: tl.constexpr,
    SUM_IN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the gradient of the weights of one row's entries: the cotangent times the table's row."""
    row = tl.program_id(0)
    start, end = row_bounds(offsets_ptr, lengths_ptr, first_offset, first_length, HAS_LENGTHS)
    for e in range(start, end):
        id = tl.load(ids_ptr + e).to(tl.int64) + tl.zeros((BLOCK,), dtype=tl.int64)
        total = tl.zeros((BLOCK,), dtype=SUM_IN)
        for first in range(0, width, BLOCK):
            d = first + tl.arange(0, BLOCK)
            inside = (d < width) & (id != padding) & (id >= 0) & (id < table_rows)
            g = tl.load(grad_ptr + row.to(tl.int64) * row_step + left + d, mask=inside, other=0.0)
            total += g.to(SUM_IN) * tl.load(table_ptr + id * width + d, mask=inside, other=0.0).to(SUM_IN)
        tl.store(weights_grad_ptr + e, tl.sum(total).to(weights_grad_ptr.dtype.element_ty))


@triton.jit
def keyed_lookup_kernel(  # noqa: PLR0913
    table_ptr,
    ids_ptr,
    offsets_ptr,
    lengths_ptr,
    out_ptr,
    width,
    first_offset,
    first_length,
    table_rows,
    HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies the table's rows at the ids of one row, `BLOCK` columns of them."""
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = row_bounds(offsets_ptr, lengths_ptr, first_offset, first_length, HAS_LENGTHS)
    for e in range(start, end):
        id = tl.load(ids_ptr + e).to(tl.int64) + tl.zeros((BLOCK,), dtype=tl.int64)
        inside = (d < width) & (id >= 0) & (id < table_rows)
        x = tl.load(table_ptr + id * width + d, mask=inside, other=float("nan"))
        tl.store(out_ptr + e * width + d, x, mask=d < width)
