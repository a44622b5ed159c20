"""Products of a few rows of floats with int8 matrices on CUDA: one kernel, which reads the matrix as int8, once.

A compiler has no such kernel for 2 to 64 rows: a product needs operands of one dtype. So it would write the integers to
memory as floats and read the floats again: six times the bytes. Here each program of the grid reads a few rows of the
matrix, converts them in registers and multiplies on matrix units. The module is imported on the first use, since Triton
comes with PyTorch's builds for GPUs only.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from subclasses.int8.blocks import block_size_of

# `BLOCK_N` is the number of the matrix's rows for each program: with 16, a matrix of 4096 rows has 256 programs, two
# for each multiprocessor of the largest devices. The matrix units accept no fewer rows. `BLOCK_K` is the number of
# entries of a row that a program reads at a time. It is smaller for many rows of the input, so that prefetched data
# fits into the shared memory of small devices, 99 KiB.
BLOCK_N, BLOCK_K, BLOCK_K_OF_MANY = 16, 256, 128


@triton.jit
def int8_rows_kernel(  # noqa: PLR0913
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    y_ptr,
    rows,
    columns,
    width,
    group_width,
    row_step,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """Computes `BLOCK_N` columns of ``x @ ((w - zero) * scale).T``, summed in float32; all matrices are contiguous.

    With one scale for each row of the matrix, the sum is scaled. Else the entries are scaled, and rounded to the dtype
    of `x`. The entries of a row are read in parts of `PART`, each of one group, with one scale and one zero point.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    parts, within = tl.arange(0, BLOCK_K // PART), tl.arange(0, PART)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + m[:, None] * width + k[None, :],
            mask=(m[:, None] < rows) & (k[None, :] < width),
            other=0.0,
        )
        split_k = start + parts[:, None, None] * PART + within[None, :, None]
        integers = tl.load(
            w_ptr + n[None, None, :].to(tl.int64) * width + split_k,
            mask=(n[None, None, :] < columns) & (split_k < width),
            other=0,
        )
        place, exists = n[None, :] * row_step, n[None, :] < columns
        if IS_GROUPED:
            first = start + parts[:, None] * PART
            place, exists = place + first // group_width, exists & (first < width)
        if HAS_ZERO:
            zero = tl.load(zero_ptr + place, mask=exists, other=0)
            integers = integers.to(tl.int16) - zero[:, None, :].to(tl.int16)
        if IS_GROUPED:
            scale = tl.load(scale_ptr + place, mask=exists, other=0.0)
            w = (integers.to(tl.float32) * scale[:, None, :]).to(x.dtype)
        else:
            w = integers.to(x.dtype)
        total = tl.dot(x, tl.reshape(w, (BLOCK_K, BLOCK_N)), total)
    if not IS_GROUPED:
        total = total * tl.load(scale_ptr + n * row_step, mask=n < columns, other=0.0)[None, :]
    inside = (m[:, None] < rows) & (n[None, :] < columns)
    tl.store(y_ptr + m[:, None] * columns + n[None, :], total.to(y_ptr.dtype.element_ty), mask=inside)


def takes_groups_of(width: int) -> bool:
    """Whether the kernel accepts groups of ``width`` entries: of whole tiles, or equal parts of a tile."""
    return width % BLOCK_K == 0 or (width < BLOCK_K and width.bit_count() == 1)


@torch.library.triton_op("subclasses::int8_rows", mutates_args={})
def int8_rows(x: Tensor, qdata: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Returns ``x @ ((qdata - zero_point) * scale).T`` in the dtype of ``x``; sums and the scaling are in float32.

    Args:
        x: bfloat16 or float16, ``[M, K]`` contiguous, at most 64 rows.
        qdata: int8, ``[N, K]`` contiguous.
        scale: floats, ``[N or 1, groups]``; with more than one group, their width fulfils :func:`takes_groups_of`.
        zero_point: int8, of the size of ``scale``; None means 0 everywhere.
    """
    (rows, width), columns, groups = x.shape, qdata.shape[0], scale.shape[1]
    y = x.new_empty(rows, columns)
    group_width = block_size_of(qdata.shape, scale.shape)[1]
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    block_k = BLOCK_K if block_m <= 32 else BLOCK_K_OF_MANY
    scale, zero_point = scale.contiguous(), None if zero_point is None else zero_point.contiguous()
    torch.library.wrap_triton(int8_rows_kernel)[(triton.cdiv(columns, BLOCK_N),)](
        x,
        qdata,
        scale,
        qdata if zero_point is None else zero_point,
        y,
        rows,
        columns,
        width,
        group_width,
        0 if scale.shape[0] == 1 else groups,
        block_m,
        BLOCK_N,
        block_k,
        block_k if groups == 1 else min(block_k, group_width),
        groups > 1,
        zero_point is not None,
        num_warps=4,
        num_stages=4,
    )
    return y
