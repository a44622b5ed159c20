"""Exact products of int8 matrices on the CPU, in int32.

PyTorch's `_int_mm` computes them with VNNI instructions. For up to 8 rows, our own kernel (`cpu_kernels.py`) takes 0.3
to 0.7 of its time. Without VNNI, `_int_mm` multiplies number by number, so our own kernel multiplies any number of
rows. Where it cannot, parts of the matrices are multiplied as floats, in sums that float32 holds exactly. Our own
kernel takes half of that time. Measured by `python -m bench.int8_kernels`.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from subclasses.int8.matmul import cpu_kernels
from subclasses.int8.matmul.ops import define_op, register_product

WITHOUT_VNNI = ("SSE41", "AVX", "AVX2", "AVX512_CORE")  # sets of instructions, by the names of oneDNN
# The number of products of two int8 numbers, each at most 2**14, whose sum float32 holds exactly.
EXACT = 2**10
PART_BYTES = 2**21  # of floats that are multiplied at a time
SMALL = 2**17  # entries of a matrix; up to here calling the op costs more time than it saves
FEW_ROWS = 8  # up to here our own kernel takes less time than `_int_mm`; without VNNI it does for any number


@functools.cache
def is_without_vnni() -> bool:
    """Whether this is an x86 processor without VNNI, or an environment variable stops oneDNN from using VNNI.

    With such a variable, the sums of `_int_mm` overflow.
    """
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    if isa.upper() in WITHOUT_VNNI:
        return True
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # older releases lack the function
    has_vnni = any(capabilities.get(name) for name in ("avx512_vnni", "avx_vnni"))
    return capabilities.get("architecture") == "x86_64" and not has_vnni


def multiply_on_cpu(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a @ b.T`` as int32, where not both matrices have one row."""
    return integer_product(a, b) if b.numel() > SMALL or is_without_vnni() else _int_mm(a, b)


@define_op("subclasses::int8_integer_product(Tensor a, Tensor b) -> Tensor")
def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the exact ``a @ b.T`` of int8 matrices ``[M, K]`` and ``[N, K]`` as int32, ``[M, N]``.

    ``K`` is not 1, and one of the matrices has two rows or more.
    """
    if (a.shape[0] <= FEW_ROWS or is_without_vnni()) and _takes_own(a, b):
        return cpu_kernels.integers_times_rows(a, b)
    return _as_floats(a, b) if is_without_vnni() else _int_mm(a, b)


register_product(integer_product, lambda a: torch.int32)


def _takes_own(a: Tensor, b: Tensor) -> bool:
    return a.is_contiguous() and cpu_kernels.takes_integers(b)


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies by PyTorch's kernel.

    The kernel first reorders its second matrix. With the input there instead of the weight, it takes one fifth to one
    half of the time for up to 64 rows. Some releases silently return wrong results for an expanded or sliced matrix.
    They do so for a second matrix of one column with an unusual stride, too, which Inductor gives it.
    """
    if a.shape[0] == 1:
        a, b = (t.reshape(-1).view(t.shape) for t in (a, b))
        return torch.ops.aten._int_mm.default(a, b.t())
    return transposed_product(a, b).t().contiguous()


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``b @ a.T`` by PyTorch's kernel, where ``a`` has two rows or more."""
    a, b = (t.reshape(-1).view(t.shape) for t in (a, b))
    return torch.ops.aten._int_mm.default(b, a.t())


def _as_floats(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies parts of both matrices as floats."""
    total = a.new_zeros((b.shape[0], a.shape[0]), dtype=torch.int32)
    columns = [part.float().t().contiguous() for part in a.split(EXACT, 1)]
    height = max(1, PART_BYTES // (4 * EXACT))
    for rows, sums in zip(b.split(height), total.split(height), strict=True):
        for part, column in zip(rows.split(EXACT, 1), columns, strict=True):
            sums += (part.float() @ column).to(torch.int32)
    return total.t().contiguous()
