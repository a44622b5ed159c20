"""Products of a few rows with int8 matrices on CUDA: kernels that read the matrix as int8, once.

A compiler has no such kernels: a product needs operands of one dtype. So it would write the integers to memory as
floats and read the floats again: six times the bytes. Here each program of the grid reads tiles of the matrix and
converts them in registers. One row is a sum of products; more rows are products on matrix units. The module is imported
on the first use, since Triton comes with PyTorch's builds for GPUs only.

Programs that share a tile of the result write partial sums, which PyTorch's ops add in the order of the parts. A
compiler fuses this sum with the ops that follow. No program waits for another one, and no memory has to be zero before.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from subclasses.int8.blocks import block_size_of

# ---- tiles -----------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """The tile that a program reads at a time, and the options of its kernel.

    Attributes:
        rows: the rows of the input; matrix units accept no fewer than 16.
        columns: the rows of the matrix, which are columns of the result.
        width: the entries of a row of the matrix.
        warps: the warps of a program.
        stages: the tiles that are prefetched, with the tile in use; the kernel for one row prefetches by itself.
    """

    rows: int
    columns: int
    width: int
    warps: int = 4
    stages: int = 1


# Each fits into the shared memory of small devices, 99 KiB, and into registers; tests compile all of them.
ONE_ROW = (Tiles(1, 8, 512), Tiles(1, 4, 1024), Tiles(1, 4, 2048, 8), Tiles(1, 2, 2048), Tiles(1, 1, 4096))
# From wide to narrow for each number of rows: a wide tile reads the input less often.
FEW_ROWS = (
    *(Tiles(16, 64, 128, 4, 4), Tiles(16, 32, 256, 4, 4)),
    *(Tiles(32, 64, 128, 4, 4), Tiles(32, 32, 256, 4, 3)),
    Tiles(64, 64, 128, 4, 3),
)
# The product of integers does not split the entries of a row, so that it has narrower tiles.
FEW_ROWS_OF_INTEGERS = (
    *(Tiles(16, 64, 256, 4, 4), Tiles(16, 32, 256, 4, 4), Tiles(16, 16, 512, 4, 4)),
    *(Tiles(32, 64, 256, 4, 3), Tiles(32, 32, 256, 4, 4), Tiles(32, 16, 256, 4, 4)),
    *(Tiles(64, 64, 128, 4, 4), Tiles(64, 32, 256, 4, 3), Tiles(64, 16, 256, 4, 3)),
)
WARPS_OF_ONE_ROW, PROGRAMS_OF_FEW_ROWS = 16, 2  # for each multiprocessor; registers suffice for so many warps
# A program sums at least so many tiles of a row, and so many entries for each row of the input. So partial sums have
# at most a quarter of the matrix's bytes.
TILES_OF_A_PART, ENTRIES_OF_A_PART = 4, 16
LEAST_GROUP = 8  # groups of fewer entries, or no multiple of as many, would be read in pieces


def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a device, and of an H100 where no device is there."""
    if not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs_of_one_row(tiles: Tiles, count: int) -> int:
    """Returns the number of programs that run at a time on ``count`` multiprocessors."""
    return WARPS_OF_ONE_ROW // tiles.warps * count


def tiles_of_one_row(columns: int, width: int, count: int) -> Tiles:
    """Chooses the tile with which the last round of tiles leaves the fewest of all programs without work."""

    def share(tiles: Tiles) -> float:
        rounds = math.ceil(columns / tiles.columns) / programs_of_one_row(tiles, count)
        return rounds / math.ceil(rounds)

    fitting = [tiles for tiles in ONE_ROW if tiles.width <= width]
    return max(fitting or ONE_ROW[:1], key=share)


def tiles_of_rows(table: tuple[Tiles, ...], rows: int, columns: int, count: int) -> Tiles:
    """Chooses the widest tile that gives work to all programs, and else the narrowest."""
    programs = PROGRAMS_OF_FEW_ROWS * count
    height = next(tiles.rows for tiles in table if rows <= tiles.rows)
    fitting = [tiles for tiles in table if tiles.rows == height]
    return next((t for t in fitting if math.ceil(columns / t.columns) >= programs), fitting[-1])


def parts_of_rows(tiles: Tiles, columns: int, width: int, count: int) -> int:
    """Returns in how many parts a row is summed, a power of two, so that all programs have work."""
    parts, programs = 1, PROGRAMS_OF_FEW_ROWS * count
    least = max(TILES_OF_A_PART * tiles.width, ENTRIES_OF_A_PART * tiles.rows)
    while parts * math.ceil(columns / tiles.columns) < programs and width >= 2 * parts * least:
        parts *= 2
    return parts


def takes_groups_of(width: int) -> bool:
    """Whether the kernels accept groups of ``width`` entries."""
    return width % LEAST_GROUP == 0


# ---- kernels ---------------------------------------------------------------------------------------------------


@triton.jit
def wait_for_last_kernel(IS_DEPENDENT: tl.constexpr):
    """Waits for the kernel before this one, which a dependent launch does not, and lets the next one start."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def int8_row_kernel(  # noqa: PLR0913
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    y_ptr,
    columns,
    width,
    group_width,
    row_step,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes ``x @ ((w - zero) * scale).T`` of one row in float32; all matrices are contiguous.

    A program computes every `num_programs`-th tile of `BLOCK_N` sums, and reads the next part of the matrix before it
    multiplies the last one. The entries of a row are read in parts of `PART`, each of one group.
    """
    wait_for_last_kernel(IS_DEPENDENT)
    n, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    parts = tl.arange(0, BLOCK_K // PART)
    first, start = tl.program_id(0) * BLOCK_N, 0
    tiles = tl.cdiv(tl.cdiv(columns, BLOCK_N) - tl.program_id(0), tl.num_programs(0))
    following = tl.load(
        w_ptr + (first + n)[:, None].to(tl.int64) * width + k[None, :],
        mask=(first + n < columns)[:, None] & (k < width)[None, :],
        other=0,
        eviction_policy="evict_first",
    )
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for _ in range(tiles * tl.cdiv(width, BLOCK_K)):
        integers, at, begin = following, first + n, start
        start += BLOCK_K
        is_end = start >= width
        if is_end:
            start = 0
            first += tl.num_programs(0) * BLOCK_N
        following = tl.load(
            w_ptr + (first + n)[:, None].to(tl.int64) * width + (start + k)[None, :],
            mask=(first + n < columns)[:, None] & (start + k < width)[None, :],
            other=0,
            eviction_policy="evict_first",
        )
        x = tl.load(x_ptr + begin + k, mask=begin + k < width, other=0.0, eviction_policy="evict_last")
        w = tl.reshape(integers.to(tl.float32), (BLOCK_N, BLOCK_K // PART, PART))
        offset, exists = at[:, None] * row_step, (at < columns)[:, None]
        if IS_GROUPED:
            entries = begin + parts * PART
            offset, exists = offset + (entries // group_width)[None, :], exists & (entries < width)[None, :]
        if HAS_ZERO:
            w -= tl.load(zero_ptr + offset, mask=exists, other=0).to(tl.float32)[:, :, None]
        if IS_GROUPED:
            w *= tl.load(scale_ptr + offset, mask=exists, other=0.0).to(tl.float32)[:, :, None]
        total += tl.reshape(w, (BLOCK_N, BLOCK_K)) * x.to(tl.float32)[None, :]
        if is_end:
            y = tl.sum(total, 1)
            if not IS_GROUPED:
                y *= tl.load(scale_ptr + at * row_step, mask=at < columns, other=0.0).to(tl.float32)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < columns)
            total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)


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
    part_width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes a tile of ``x @ ((w - zero) * scale).T``, summed in float32; all matrices are contiguous.

    The second index of a program chooses the part of `part_width` entries that it sums. With one scale for each row of
    the matrix, the sum is scaled. Else the entries are scaled, and rounded to the dtype of `x`. The entries of a row
    are read in parts of `PART`, each of one group, with one scale and one zero point.
    """
    wait_for_last_kernel(IS_DEPENDENT)
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    parts, within = tl.arange(0, BLOCK_K // PART), tl.arange(0, PART)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    begin = tl.program_id(1) * part_width
    for start in range(begin, tl.minimum(begin + part_width, width), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + m[:, None] * width + k[None, :],
            mask=(m[:, None] < rows) & (k[None, :] < width),
            other=0.0,
            eviction_policy="evict_last",
        )
        split_k = start + parts[:, None, None] * PART + within[None, :, None]
        integers = tl.load(
            w_ptr + n[None, None, :].to(tl.int64) * width + split_k,
            mask=(n[None, None, :] < columns) & (split_k < width),
            other=0,
            eviction_policy="evict_first",
        )
        offset, exists = n[None, :] * row_step, n[None, :] < columns
        if IS_GROUPED:
            first = start + parts[:, None] * PART
            offset, exists = offset + first // group_width, exists & (first < width)
        if HAS_ZERO:
            zero = tl.load(zero_ptr + offset, mask=exists, other=0)
            integers = integers.to(tl.int16) - zero[:, None, :].to(tl.int16)
        if IS_GROUPED:
            scale = tl.load(scale_ptr + offset, mask=exists, other=0.0)
            w = (integers.to(tl.float32) * scale[:, None, :]).to(x.dtype)
        else:
            w = integers.to(x.dtype)
        total = tl.dot(x, tl.reshape(w, (BLOCK_K, BLOCK_N)), total)
    if not IS_GROUPED:
        total = total * tl.load(scale_ptr + n * row_step, mask=n < columns, other=0.0)[None, :]
    at = (tl.program_id(1) * rows + m)[:, None] * columns + n[None, :]
    inside = (m[:, None] < rows) & (n[None, :] < columns)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def int8_by_int8_rows_kernel(  # noqa: PLR0913
    x_ptr,
    x_scale_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    rows,
    columns,
    width,
    row_step,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_ROWS: tl.constexpr,
    QUANTIZES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes a tile of ``(x @ w.T) * x_scale * scale.T`` of integers, summed in int32; all matrices are contiguous.

    With `QUANTIZES`, the rows of `x` are floats: the program computes their scales, as `affine.py` does, and quantizes.
    It reads `X_ROWS` rows of `x`, and repeats them where matrix units need more.
    """
    wait_for_last_kernel(IS_DEPENDENT)
    m, m_of_x = tl.arange(0, BLOCK_M), tl.arange(0, X_ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = m_of_x[:, None] < rows
    x_ptrs = x_ptr + m_of_x[:, None] * width
    if QUANTIZES:
        top = tl.zeros((X_ROWS, BLOCK_K), dtype=tl.float32)
        for start in range(0, width, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)[None, :]
            x = tl.load(x_ptrs + k, mask=exists & (k < width), other=0.0, eviction_policy="evict_last")
            top = _largest(top, tl.abs(x.to(tl.float32)))
        top = tl.reduce(top, 1, _largest)
        x_scale = tl.div_rn(top, tl.full((X_ROWS,), 127.5, tl.float32))
        if x_ptr.dtype.element_ty == tl.bfloat16:
            x_scale = x_scale.to(tl.bfloat16).to(tl.float32)
        x_scale = _largest(x_scale, 1.1754943508222875e-38)
    else:
        x_scale = tl.load(x_scale_ptr + m_of_x, mask=m_of_x < rows, other=0.0)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = exists & (k[None, :] < width)
        x = tl.load(x_ptrs + k[None, :], mask=inside, other=0, eviction_policy="evict_last")
        if QUANTIZES:
            divisor = tl.broadcast_to(x_scale[:, None], (X_ROWS, BLOCK_K))
            # Adding 1.5 * 2**23 rounds to the nearest integer, of two the even one.
            q = tl.div_rn(x.to(tl.float32), divisor) + 12582912.0 - 12582912.0
            q = tl.minimum(tl.maximum(q, -128.0), 127.0).to(tl.int8)
            repeated = tl.broadcast_to(q[None, :, :], (BLOCK_M // X_ROWS, X_ROWS, BLOCK_K))
            x = tl.reshape(repeated, (BLOCK_M, BLOCK_K))
        w = tl.load(
            w_ptr + n[None, :].to(tl.int64) * width + k[:, None],
            mask=(n[None, :] < columns) & (k[:, None] < width),
            other=0,
            eviction_policy="evict_first",
        )
        total = tl.dot(x, w, total)
    scale = tl.load(scale_ptr + n * row_step, mask=n < columns, other=0.0)
    repeated = tl.broadcast_to(x_scale[None, :], (BLOCK_M // X_ROWS, X_ROWS))
    y = total.to(tl.float32) * tl.reshape(repeated, (BLOCK_M,))[:, None] * scale[None, :]
    inside = (m[:, None] < rows) & (n[None, :] < columns)
    tl.store(y_ptr + m[:, None] * columns + n[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


# ---- launches --------------------------------------------------------------------------------------------------


def can_depend(device: torch.device) -> bool:
    """Whether kernels can start before the last kernel ends: Triton and the device, Hopper or later, offer it."""
    has_wait = hasattr(tl.extra.cuda, "gdc_wait")
    return has_wait and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] >= 9


def _launch(kernel: Any, grid: tuple[int, ...], tiles: Tiles, is_dependent: bool, *args: Any) -> None:
    options = {"launch_pdl": True} if is_dependent else {}
    launch = torch.library.wrap_triton(kernel)[grid]
    launch(*args, is_dependent, num_warps=tiles.warps, num_stages=tiles.stages, **options)


def multiply_row(w: Weight, x: Tensor, tiles: Tiles, is_dependent: bool = False) -> Tensor:
    """Computes :func:`int8_rows` of one row with tiles of `ONE_ROW`."""
    y = x.new_empty(1, w.qdata.shape[0])
    programs = programs_of_one_row(tiles, multiprocessors(x.device))
    grid = (min(triton.cdiv(w.qdata.shape[0], tiles.columns), programs),)
    args = (x, *w.pointers(), y, *w.qdata.shape, *w.steps(), *tiles[1:3], *w.constants(tiles))
    _launch(int8_row_kernel, grid, tiles, is_dependent, *args)
    return y


def multiply_rows(w: Weight, x: Tensor, tiles: Tiles, parts: int, is_dependent: bool = False) -> Tensor:
    """Computes :func:`int8_rows` with tiles of `FEW_ROWS`; each row of the matrix is summed in parts."""
    (rows, width), columns = x.shape, w.qdata.shape[0]
    y = x.new_empty((parts, rows, columns), dtype=x.dtype if parts == 1 else torch.float32)
    part_width = triton.cdiv(triton.cdiv(width, tiles.width), parts) * tiles.width
    args = (x, *w.pointers(), y, rows, columns, width, *w.steps(), part_width, *tiles[:3])
    grid = (triton.cdiv(columns, tiles.columns), parts)
    _launch(int8_rows_kernel, grid, tiles, is_dependent, *args, *w.constants(tiles))
    return y[0] if parts == 1 else y.sum(0).to(x.dtype)


def multiply_integers(
    w: Weight, x: Tensor, x_scale: Tensor | None, dtype: torch.dtype, tiles: Tiles, is_dependent: bool = False
) -> Tensor:
    """Computes :func:`int8_by_int8_rows` with tiles of `FEW_ROWS_OF_INTEGERS`."""
    (rows, width), columns = x.shape, w.qdata.shape[0]
    y = x.new_empty((rows, columns), dtype=dtype)
    qdata, scale, _ = w.pointers()
    args = (x, x if x_scale is None else x_scale.contiguous(), qdata, scale, y, rows, columns, width)
    read = triton.next_power_of_2(rows) if x_scale is None else tiles.rows
    args = (*args, w.steps()[1], *tiles[:3], read, x_scale is None)
    _launch(int8_by_int8_rows_kernel, (triton.cdiv(columns, tiles.columns),), tiles, is_dependent, *args)
    return y


class Weight(NamedTuple):
    """An int8 matrix, its scales and its zero points, which may be missing, as the kernels get them."""

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor | None = None

    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the matrix, the scales and the zero points; passes the matrix for missing zero points."""
        zero_point = self.qdata if self.zero_point is None else self.zero_point.contiguous()
        return self.qdata, self.scale.contiguous(), zero_point

    def steps(self) -> tuple[int, int]:
        """Returns the width of a group, and the number of scales from a row of the matrix to the next."""
        step = 0 if self.scale.shape[0] == 1 else self.scale.shape[1]
        return block_size_of(self.qdata.shape, self.scale.shape)[1], step

    def constants(self, tiles: Tiles) -> tuple[int, bool, bool]:
        """Returns the width of a part that lies in one group, whether there are groups, and zero points."""
        is_grouped = self.scale.shape[1] > 1
        part = math.gcd(tiles.width, self.steps()[0]) if is_grouped else tiles.width
        return part, is_grouped, self.zero_point is not None


# ---- ops -------------------------------------------------------------------------------------------------------


@torch.library.triton_op("subclasses::int8_rows", mutates_args={})
def int8_rows(x: Tensor, qdata: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Returns ``x @ ((qdata - zero_point) * scale).T`` in the dtype of ``x``; sums and the scaling are in float32.

    Args:
        x: bfloat16 or float16, ``[M, K]`` contiguous, at most 64 rows.
        qdata: int8, ``[N, K]`` contiguous.
        scale: floats, ``[N or 1, groups]``; with more than one group, their width fulfils :func:`takes_groups_of`.
        zero_point: int8, of the size of ``scale``; None means 0 everywhere.
    """
    (rows, width), columns = x.shape, qdata.shape[0]
    w, count = Weight(qdata, scale, zero_point), multiprocessors(x.device)
    if rows == 1:
        return multiply_row(w, x, tiles_of_one_row(columns, width, count))
    tiles = tiles_of_rows(FEW_ROWS, rows, columns, count)
    return multiply_rows(w, x, tiles, parts_of_rows(tiles, columns, width, count))


@torch.library.triton_op("subclasses::int8_by_int8_rows", mutates_args={})
def int8_by_int8_rows(
    x: Tensor, x_scale: Tensor | None, qdata: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns ``(x @ qdata.T) * x_scale * scale.T`` of integers in ``dtype``; sums are exact.

    Args:
        x: int8, ``[M, K]`` contiguous, at most 64 rows; or floats of 16 bits, which the kernel quantizes by row.
        x_scale: float32, ``[M, 1]``; None if ``x`` are floats.
        qdata: int8, ``[N, K]`` contiguous.
        scale: float32, ``[N, 1]`` or ``[1, 1]``.
        dtype: The dtype of the result.
    """
    tiles = tiles_of_rows(FEW_ROWS_OF_INTEGERS, x.shape[0], qdata.shape[0], multiprocessors(x.device))
    return multiply_integers(Weight(qdata, scale), x, x_scale, dtype, tiles)
