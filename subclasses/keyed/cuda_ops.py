"""Lookups in the tables of several keys on CUDA, which read the offsets of the rows on the device.

The ops in `kernels.py` slice out the entries of a key, whose number is data: on CUDA each lookup, and each backward,
would wait for the device. Here one kernel for each key gets all entries (`cuda_kernels.py`). The module is imported on
the first use, since Triton comes with PyTorch's builds for GPUs only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from subclasses.keyed.cuda_kernels import (
    keyed_lookup_kernel,
    keyed_pool_kernel,
    keyed_table_grad_kernel,
    keyed_weights_grad_kernel,
)
from subclasses.keyed.gradients import lookup_derivative, pool_derivative, save_lookup, save_pool
from subclasses.keyed.kernels import (
    ENTRIES,
    LOOKUPS,
    NO_POOLING,
    Entries,
    allocate_results,
    signature_of,
    unflatten_arguments,
)

# ---- arguments -------------------------------------------------------------------------------------------------

_WIDEST_BLOCK = 256  # columns for a program


def _block(width: int) -> int:
    return min(_WIDEST_BLOCK, triton.next_power_of_2(width))


def _sum_in(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype is torch.float64 else tl.float32


def _contiguous(entries: Entries) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ids, offsets, lengths and weights; passes offsets for missing lengths, and ids for missing weights."""
    values, offsets, lengths, weights = (None if t is None else t.contiguous() for t in entries)
    assert values is not None and offsets is not None  # both are tensors
    return values, offsets, offsets if lengths is None else lengths, values if weights is None else weights


def _triton_op(name: str, schema: str) -> Any:
    """Returns a decorator that registers an op without mutated arguments, whose kernels a compiler traces."""

    def register(function: Any) -> Any:
        function.__signature__ = signature_of(schema)
        return torch.library.triton_op(f"subclasses::{name}", function, mutates_args=(), schema=schema)

    return register


# ---- ops -------------------------------------------------------------------------------------------------------


@_triton_op(
    "keyed_pool_cuda",
    f"(Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> (Tensor, Tensor, Tensor)",
)
def keyed_pool_cuda(tables: list[Tensor], *flat_args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `keyed_pool` on CUDA."""
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
                table.shape[0],
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
        table_grad = grad.new_zeros(count, width, dtype=wide)
        if batch and width:
            torch.library.wrap_triton(keyed_table_grad_kernel)[(batch, triton.cdiv(width, _block(width)))](
                grad,
                table_grad,
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
                count,
                lookups.paddings[k],
                lookups.modes[k],
                is_pooled,
                entries.lengths is not None,
                entries.weights is not None,
                _block(width),
            )
        grads.append(table_grad.to(grad.dtype))
        left += width if is_pooled else 0
    return grads


@_triton_op(
    "keyed_pool_backward_cuda",
    f"(Tensor grad, int[] rows, int[] widths, Tensor counts, Tensor picked, {ENTRIES}, {LOOKUPS}) -> Tensor[]",
)
def keyed_pool_backward_cuda(
    grad: Tensor, rows: list[int], widths: list[int], counts: Tensor, picked: Tensor, *flat_args: Any
) -> list[Tensor]:
    """Computes `keyed_pool_backward` on CUDA."""
    return _table_gradients(grad, rows, widths, counts, picked, flat_args)


@_triton_op(
    "keyed_pool_weights_backward_cuda",
    f"(Tensor grad, Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> Tensor",
)
def keyed_pool_weights_backward_cuda(grad: Tensor, tables: list[Tensor], *flat_args: Any) -> Tensor:
    """Computes `keyed_pool_weights_backward` on CUDA."""
    entries, lookups = unflatten_arguments(flat_args)
    values, offsets, lengths, _ = _contiguous(entries)
    weights_grad, left, grad = grad.new_zeros(values.shape[0]), 0, grad.contiguous()
    batch = offsets.shape[1] - 1
    for k, table in enumerate(tables):
        width = table.shape[1]
        if batch and width:
            torch.library.wrap_triton(keyed_weights_grad_kernel)[(batch,)](
                grad,
                table.contiguous(),
                weights_grad,
                values,
                offsets,
                lengths,
                width,
                grad.shape[1],
                left,
                k * (batch + 1),
                k * batch,
                table.shape[0],
                lookups.paddings[k],
                entries.lengths is not None,
                _sum_in(grad.dtype),
                _block(width),
            )
        left += width
    return weights_grad


@_triton_op(
    "keyed_lookup_cuda",
    f"(Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> Tensor",
)
def keyed_lookup_cuda(tables: list[Tensor], *flat_args: Any) -> Tensor:
    """Computes `keyed_lookup` on CUDA."""
    entries, _ = unflatten_arguments(flat_args)
    values, offsets, lengths, _ = _contiguous(entries)
    width, batch = tables[0].shape[1], offsets.shape[1] - 1
    rows = tables[0].new_zeros(values.shape[0], width)
    for k, table in enumerate(tables):
        if batch and width:
            torch.library.wrap_triton(keyed_lookup_kernel)[(batch, triton.cdiv(width, _block(width)))](
                table.contiguous(),
                values,
                offsets,
                lengths,
                rows,
                width,
                k * (batch + 1),
                k * batch,
                table.shape[0],
                entries.lengths is not None,
                _block(width),
            )
    return rows


@_triton_op(
    "keyed_lookup_backward_cuda",
    f"(Tensor grad, int[] rows, {ENTRIES}, {LOOKUPS}) -> Tensor[]",
)
def keyed_lookup_backward_cuda(grad: Tensor, rows: list[int], *flat_args: Any) -> list[Tensor]:
    """Computes `keyed_lookup_backward` on CUDA."""
    unused = unflatten_arguments(flat_args)[0].offsets  # for counts and picked ids, which only pooling has
    return _table_gradients(grad, rows, [grad.shape[1]] * len(rows), unused, unused, flat_args)


keyed_pool_cuda.register_autograd(
    pool_derivative(keyed_pool_backward_cuda, keyed_pool_weights_backward_cuda), setup_context=save_pool
)
keyed_lookup_cuda.register_autograd(lookup_derivative(keyed_lookup_backward_cuda), setup_context=save_lookup)
