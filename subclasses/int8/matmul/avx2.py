"""Products of one row on x86 processors with AVX2 alone, without AVX-512, in a form that a compiler fuses.

With AVX2, compilers convert int8 numbers one at a time. Four neighbours are one 32-bit word, and the shifts that take
words apart have vector instructions.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 4  # int8 numbers in a 32-bit word


def is_avx2() -> bool:
    """Whether PyTorch uses AVX2 here, and nothing newer."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def has_words(matrix: Tensor) -> bool:
    """Whether the rows of an int8 matrix can be read as words."""
    return matrix.is_contiguous() and matrix.shape[-1] % WORD == 0 and matrix.storage_offset() % WORD == 0


def row_times_int8(row: Tensor, matrix: Tensor, zero_point: Tensor | None) -> Tensor:
    """Returns ``row @ (matrix - zero_point).T`` in the dtype of the row, in a form that a compiler fuses.

    Args:
        row: floats, ``[K]``.
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
