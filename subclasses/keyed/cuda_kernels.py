"""Lookups in the tables of several keys on CUDA: kernels that read the offsets of the rows on the device.

The ops in `kernels.py` slice out the entries of a key, whose number is data: on CUDA each lookup, and each backward,
would wait for the device. Here one kernel for each key gets all entries; a program of its grid reads where its row
begins and ends. Imported on the first use, since Triton comes with PyTorch's builds for GPUs only.

Sums are in float32 for half precision. Gradients of a table are added up by atomic operations, in any order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from subclasses.keyed.gradients import lookup_derivative, pool_derivative, save_lookup, save_pool
from subclasses.keyed.kernels import (
    ENTRIES,
    LOOKUPS,
    MAX,
    MEAN,
    NO_POOLING,
    SUM,
    Entries,
    allocate_results,
    unflatten_arguments,
)

# An id is spread over the columns before it is compared: Triton's interpreter takes no mask made of a single truth.
# A kernel sees no global numbers except constants of Triton.
IS_SUM, IS_MEAN, IS_MAX = tl.constexpr(SUM), tl.constexpr(MEAN), tl.constexpr(MAX)

# ---- kernels ---------------------------------------------------------------------------------------------------


@triton.jit
def row_bounds(offsets_ptr, lengths_ptr, first_offset, first_length, HAS_LENGTHS: tl.constexpr):
    """Returns where the entries of this program's row begin and end."""
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
        counts = id != padding
        x = tl.load(table_ptr + id * width + d, mask=(d < width) & counts, other=0.0).to(SUM_IN)
        if HAS_WEIGHTS:
            x = x * tl.load(weights_ptr + e).to(SUM_IN)
        if MODE == IS_MAX:
            larger = counts & ((number == 0) | (x > total))
            total = tl.where(larger, x, total)
            best = tl.where(larger, id, best)
        else:
            total += x
        number += counts.to(tl.int64)
    if MODE == IS_MEAN:
        total = total / tl.maximum(number, 1).to(SUM_IN)
    place = row.to(tl.int64) * row_step + left + d
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=d < width)
    if MODE != IS_SUM:
        at = counts_ptr + first_length + row + d * 0
        tl.store(at, number.to(counts_ptr.dtype.element_ty), mask=d == 0)
    if MODE == IS_MAX:
        tl.store(picked_ptr + place, best.to(picked_ptr.dtype.element_ty), mask=d < width)


@triton.jit
def keyed_table_grad_kernel(  # noqa: PLR0913
    grad_ptr,
    found_ptr,
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
    dtype = found_ptr.dtype.element_ty
    place = row.to(tl.int64) * row_step + left + d
    g = tl.zeros((BLOCK,), dtype=dtype)
    if IS_POOLED:
        g = tl.load(grad_ptr + place, mask=d < width, other=0.0).to(dtype)
    if MODE == IS_MAX:
        id = tl.load(picked_ptr + place, mask=d < width, other=-1).to(tl.int64)
        tl.atomic_add(found_ptr + id * width + d, g, mask=(d < width) & (id >= 0))
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
            tl.atomic_add(found_ptr + id * width + d, one, mask=(d < width) & (id != padding))


@triton.jit
def keyed_weights_grad_kernel(  # noqa: PLR0913
    grad_ptr,
    table_ptr,
    found_ptr,
    ids_ptr,
    offsets_ptr,
    lengths_ptr,
    width,
    row_step,
    left,
    first_offset,
    first_length,
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
            inside = (d < width) & (id != padding)
            g = tl.load(grad_ptr + row.to(tl.int64) * row_step + left + d, mask=inside, other=0.0)
            total += g.to(SUM_IN) * tl.load(table_ptr + id * width + d, mask=inside, other=0.0).to(SUM_IN)
        tl.store(found_ptr + e, tl.sum(total).to(found_ptr.dtype.element_ty))


@triton.jit
def keyed_lookup_kernel(  # noqa: PLR0913
    table_ptr,
    ids_ptr,
    offsets_ptr,
    lengths_ptr,
    found_ptr,
    width,
    first_offset,
    first_length,
    HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies the table's rows at the ids of one row, `BLOCK` columns of them."""
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = row_bounds(offsets_ptr, lengths_ptr, first_offset, first_length, HAS_LENGTHS)
    for e in range(start, end):
        id = tl.load(ids_ptr + e).to(tl.int64)
        x = tl.load(table_ptr + id * width + d, mask=d < width, other=0.0)
        tl.store(found_ptr + e * width + d, x, mask=d < width)


# ---- arguments -------------------------------------------------------------------------------------------------

_WIDEST_BLOCK = 256  # columns for a program


def _block(width: int) -> int:
    return min(_WIDEST_BLOCK, triton.next_power_of_2(width))


def _sum_in(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype is torch.float64 else tl.float32


def _contiguous(entries: Entries) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ids, offsets, lengths and weights; offsets stand for missing lengths, ids for missing weights."""
    values, offsets, lengths, weights = (None if t is None else t.contiguous() for t in entries)
    assert values is not None and offsets is not None  # both are tensors
    return values, offsets, offsets if lengths is None else lengths, values if weights is None else weights


# ---- ops -------------------------------------------------------------------------------------------------------


@torch.library.triton_op(
    "subclasses::keyed_pool_cuda",
    mutates_args=(),
    schema=f"(Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> (Tensor, Tensor, Tensor)",
)
def keyed_pool_cuda(tables: list[Tensor], *flat_args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Does what `keyed_pool` does."""
    entries, lookups = unflatten_arguments(flat_args)
    pooled, counts, picked = allocate_results(tables, entries, lookups)
    values, offsets, lengths, weights = _contiguous(entries)
    batch, left = offsets.shape[1] - 1, 0
    for k, table in enumerate(tables):
        width = table.shape[1]
        if batch and width:
            torch.library.wrap_triton(keyed_pool_kernel)[(batch, triton.cdiv(width, _block(width)))](
                table.contiguous(),
                values,
                offsets,
                lengths,
                weights,
                pooled,
                counts,
                picked,
                width,
                pooled.shape[1],
                left,
                k * (batch + 1),
                k * batch,
                lookups.paddings[k],
                lookups.modes[k],
                entries.lengths is not None,
                entries.weights is not None,
                _sum_in(table.dtype),
                _block(width),
            )
        left += width
    return pooled, counts, picked


def _table_gradients(
    grad: Tensor,
    rows: list[int],
    widths: list[int],
    counts: Tensor,
    picked: Tensor,
    flat_args: tuple[Any, ...],
) -> list[Tensor]:
    """Returns the gradient of each table, ``[rows[k], widths[k]]``."""
    entries, lookups = unflatten_arguments(flat_args)
    values, offsets, lengths, weights = _contiguous(entries)
    batch, left, grads = offsets.shape[1] - 1, 0, []
    grad = grad.contiguous()
    for k, (count, width) in enumerate(zip(rows, widths, strict=True)):
        is_pooled = lookups.modes[k] != NO_POOLING
        wide = grad.dtype if grad.dtype is torch.float64 else torch.float32
        found = grad.new_zeros(count, width, dtype=wide)
        if batch and width:
            torch.library.wrap_triton(keyed_table_grad_kernel)[(batch, triton.cdiv(width, _block(width)))](
                grad,
                found,
                values,
                offsets,
                lengths,
                weights,
                counts,
                picked,
                width,
                grad.shape[1],
                left,
                k * (batch + 1),
                k * batch,
                lookups.paddings[k],
                lookups.modes[k],
                is_pooled,
                entries.lengths is not None,
                entries.weights is not None,
                _block(width),
            )
        grads.append(found.to(grad.dtype))
        left += width if is_pooled else 0
    return grads


@torch.library.triton_op(
    "subclasses::keyed_pool_backward_cuda",
    mutates_args=(),
    schema=f"(Tensor grad, int[] rows, int[] widths, Tensor counts, Tensor picked, {ENTRIES}, {LOOKUPS}) -> Tensor[]",
)
def keyed_pool_backward_cuda(
    grad: Tensor, rows: list[int], widths: list[int], counts: Tensor, picked: Tensor, *flat_args: Any
) -> list[Tensor]:
    """Does what `keyed_pool_backward` does."""
    return _table_gradients(grad, rows, widths, counts, picked, flat_args)


@torch.library.triton_op(
    "subclasses::keyed_pool_weights_backward_cuda",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> Tensor",
)
def keyed_pool_weights_backward_cuda(grad: Tensor, tables: list[Tensor], *flat_args: Any) -> Tensor:
    """Does what `keyed_pool_weights_backward` does."""
    entries, lookups = unflatten_arguments(flat_args)
    values, offsets, lengths, _ = _contiguous(entries)
    found, left, grad = grad.new_zeros(values.shape[0]), 0, grad.contiguous()
    batch = offsets.shape[1] - 1
    for k, table in enumerate(tables):
        width = table.shape[1]
        if batch and width:
            torch.library.wrap_triton(keyed_weights_grad_kernel)[(batch,)](
                grad,
                table.contiguous(),
                found,
                values,
                offsets,
                lengths,
                width,
                grad.shape[1],
                left,
                k * (batch + 1),
                k * batch,
                lookups.paddings[k],
                entries.lengths is not None,
                _sum_in(grad.dtype),
                _block(width),
            )
        left += width
    return found


@torch.library.triton_op(
    "subclasses::keyed_lookup_cuda",
    mutates_args=(),
    schema=f"(Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> Tensor",
)
def keyed_lookup_cuda(tables: list[Tensor], *flat_args: Any) -> Tensor:
    """Does what `keyed_lookup` does."""
    entries, _ = unflatten_arguments(flat_args)
    values, offsets, lengths, _ = _contiguous(entries)
    width, batch = tables[0].shape[1], offsets.shape[1] - 1
    found = tables[0].new_zeros(values.shape[0], width)
    for k, table in enumerate(tables):
        if batch and width:
            torch.library.wrap_triton(keyed_lookup_kernel)[(batch, triton.cdiv(width, _block(width)))](
                table.contiguous(),
                values,
                offsets,
                lengths,
                found,
                width,
                k * (batch + 1),
                k * batch,
                entries.lengths is not None,
                _block(width),
            )
    return found


@torch.library.triton_op(
    "subclasses::keyed_lookup_backward_cuda",
    mutates_args=(),
    schema=f"(Tensor grad, int[] rows, {ENTRIES}, {LOOKUPS}) -> Tensor[]",
)
def keyed_lookup_backward_cuda(grad: Tensor, rows: list[int], *flat_args: Any) -> list[Tensor]:
    """Does what `keyed_lookup_backward` does."""
    unused = unflatten_arguments(flat_args)[0].offsets  # of counts and picked ids, which pooling alone has
    return _table_gradients(grad, rows, [grad.shape[1]] * len(rows), unused, unused, flat_args)


keyed_pool_cuda.register_autograd(
    pool_derivative(keyed_pool_backward_cuda, keyed_pool_weights_backward_cuda), setup_context=save_pool
)
keyed_lookup_cuda.register_autograd(lookup_derivative(keyed_lookup_backward_cuda), setup_context=save_lookup)
