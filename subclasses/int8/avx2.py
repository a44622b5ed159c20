"""Products on x86 processors with AVX2 alone: without AVX-512, without VNNI instructions, or without both.

With AVX2, compilers convert int8 numbers one at a time. Four neighbours are one 32-bit word, and the shifts that take
words apart have vector instructions. Without VNNI, `_int_mm` of PyTorch multiplies number by number. There parts of the
matrices are multiplied as floats, in sums that float32 holds exactly.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from subclasses.int8.products import vmap_product

WITHOUT_VNNI = ("SSE41", "AVX", "AVX2", "AVX512_CORE")  # sets of instructions, by the names of oneDNN
WORD = 4  # int8 numbers in a 32-bit word
# Up to so many products of two int8 numbers, each at most 2**14, a sum is an integer that float32 holds.
EXACT = 2**10
PART_BYTES = 2**21  # of floats that are multiplied at a time


def is_avx2() -> bool:
    """Whether PyTorch uses AVX2 here, and nothing newer."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


@functools.cache
def is_without_vnni() -> bool:
    """Whether this is an x86 processor without VNNI, or oneDNN is told not to use it.

    Where it is told so, the sums of `_int_mm` overflow.
    """
    told = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    if told.upper() in WITHOUT_VNNI:
        return True
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # older releases do not say
    has_vnni = any(capabilities.get(name) for name in ("avx512_vnni", "avx_vnni"))
    return capabilities.get("architecture") == "x86_64" and not has_vnni


# ---- one row -----------------------------------------------------------------------------------------------


def has_words(matrix: Tensor) -> bool:
    """Whether the rows of an int8 matrix can be read as words."""
    return matrix.is_contiguous() and matrix.shape[-1] % WORD == 0 and matrix.storage_offset() % WORD == 0


def row_times_int8(row: Tensor, matrix: Tensor, zero_point: Tensor | None) -> Tensor:
    """Returns ``row @ (matrix - zero_point).T`` in the dtype of the row, in a form that a compiler fuses.

    Args:
        row: float32 or int32, ``[K]``.
        matrix: int8, ``[N, K]``, for which :func:`has_words` is true.
        zero_point: int8, ``[N, 1]`` or ``[1, 1]``; None means 0.
    """
    words, parts = matrix.view(torch.int32), row.reshape(-1, WORD)
    products = [
        _times(parts[:, n], (words << (24 - 8 * n)) >> 24, zero_point)  # the lowest byte comes first
        for n in range(WORD)
    ]
    return sum(products[1:], products[0]).sum(-1, dtype=row.dtype)


def _times(part: Tensor, integers: Tensor, zero_point: Tensor | None) -> Tensor:
    if zero_point is not None:
        integers = integers - zero_point.to(torch.int32)
    return part * integers.to(part.dtype)


# ---- integers times integers -------------------------------------------------------------------------------


@torch.library.custom_op("subclasses::int8_integer_product", mutates_args=(), device_types="cpu")
def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the exact ``a @ b.T`` of int8 matrices ``[M, K]`` and ``[N, K]`` as int32, ``[M, N]``."""
    total = a.new_zeros((b.shape[0], a.shape[0]), dtype=torch.int32)
    columns = [part.float().t().contiguous() for part in a.split(EXACT, 1)]
    height = max(1, PART_BYTES // (4 * EXACT))
    for rows, sums in zip(b.split(height), total.split(height), strict=True):
        for part, column in zip(rows.split(EXACT, 1), columns, strict=True):
            sums += (part.float() @ column).to(torch.int32)
    return total.t().contiguous()


@integer_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.int32)


vmap_product(integer_product)
