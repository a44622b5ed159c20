"""Products of a few rows of floats with int8 matrices on CUDA: one kernel, which reads the matrix as int8, once.

A compiler has no such kernel for 2 to 64 rows: a product needs its operands in one dtype, so the integers would be
converted to floats in memory first, and the floats read again, six times the bytes. Here each program of the grid reads
a few rows of the matrix, converts them in registers and multiplies on matrix units. Imported on the first use, since
Triton comes with PyTorch's builds for GPUs only.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Rows of the matrix for each program: with 16, a matrix of 4096 rows has 256 programs, two for each multiprocessor
# of the largest devices. The matrix units take no fewer.
BLOCK_N, BLOCK_K = 16, 256


@triton.jit
def int8_rows_kernel(  # noqa: PLR0913
    x_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    rows,
    columns,
    width,
    scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes `BLOCK_N` columns of ``(x @ w.T) * scale``, summed in float32; all matrices are contiguous."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + m[:, None] * width + k[None, :],
            mask=(m[:, None] < rows) & (k[None, :] < width),
            other=0.0,
        )
        w = tl.load(
            w_ptr + n[None, :].to(tl.int64) * width + k[:, None],
            mask=(n[None, :] < columns) & (k[:, None] < width),
            other=0,
        )
        total = tl.dot(x, w.to(x.dtype), total)
    scale = tl.load(scale_ptr + n * scale_stride, mask=n < columns, other=0.0)
    total = total * scale[None, :]
    inside = (m[:, None] < rows) & (n[None, :] < columns)
    tl.store(y_ptr + m[:, None] * columns + n[None, :], total.to(y_ptr.dtype.element_ty), mask=inside)


@torch.library.triton_op("subclasses::int8_rows", mutates_args={})
def int8_rows(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """Returns ``(x @ qdata.T) * scale.T`` in the dtype of ``x``; sums and the scaling are in float32.

    Args:
        x: bfloat16 or float16, ``[M, K]`` contiguous, at most 64 rows.
        qdata: int8, ``[N, K]`` contiguous.
        scale: floats, ``[N, 1]`` or ``[1, 1]``.
    """
    (rows, width), columns = x.shape, qdata.shape[0]
    y = x.new_empty(rows, columns)
    scale_stride = 0 if scale.shape[0] == 1 else scale.stride(0)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    torch.library.wrap_triton(int8_rows_kernel)[(triton.cdiv(columns, BLOCK_N),)](
        x,
        qdata,
        scale,
        y,
        rows,
        columns,
        width,
        scale_stride,
        block_m,
        BLOCK_N,
        BLOCK_K,
        num_warps=4,
        num_stages=4,
    )
    return y
