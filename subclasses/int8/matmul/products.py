"""Products of floats with int8 matrices on the CPU: one op, which chooses its kernel by the size of the batch.

A compiler keeps the op as one node. So a program compiled for any batch size still runs the fastest kernel for each
batch, without a guard on the size. :data:`KERNELS` lists the kernels and their products; the times in docs/int8.md were
measured by ``python -m bench.int8_sizes``. Products with a small matrix do not use the op: a compiler traces their
conversion and their product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.int8 import affine
from subclasses.int8.matmul import cpu_kernels
from subclasses.int8.matmul.ops import apply, define_op, register_product

PART_BYTES = 2**22  # floats that are converted at a time
SMALL = 2**15  # entries of a matrix; up to here calling the op costs more time than it saves

# ---- the op ------------------------------------------------------------------------------------------------


@define_op("subclasses::int8_product(Tensor x, Tensor qdata, Tensor? scale, Tensor? zero_point) -> Tensor")
def int8_product(x: Tensor, qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    """Returns ``x @ w.T`` in the dtype of ``x``, where ``w`` is ``(qdata - zero_point) * scale``.

    Args:
        x: floats, ``[M, K]``.
        qdata: int8, ``[N, K]``, with any strides.
        scale: floats, one for each block of ``qdata``; None means 1 everywhere.
        zero_point: int8, one for each block of ``qdata``; None means 0 everywhere.
    """
    if 0 in (*x.shape, *qdata.shape):
        return x.new_zeros(x.shape[0], qdata.shape[0])
    for kernel in KERNELS:
        fits = x.shape[0] <= kernel.rows and qdata.numel() <= kernel.entries
        if fits and x.dtype in kernel.dtypes and kernel.is_for() and kernel.takes(qdata, scale, zero_point):
            return kernel.multiply(x, qdata, scale, zero_point)
    raise TypeError(f"int8_product: expected floats of 16, 32 or 64 bits, got {x.dtype}")


register_product(int8_product, lambda x: x.dtype)


# ---- kernels -----------------------------------------------------------------------------------------------


def _by_rows(x: Tensor, qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    """Reads the matrix as int8, by rows; our own kernel."""
    return _times_integers(cpu_kernels.times_rows, x, qdata, scale, zero_point)


def _by_columns(x: Tensor, qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    """Reads the transposed matrix as int8, by rows; our own kernel."""
    return _times_integers(lambda x, q: cpu_kernels.times_columns(x, q.t()), x, qdata, scale, zero_point)


def _times_integers(
    multiply: Callable[..., Tensor], x: Tensor, qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None
) -> Tensor:
    """Calls a kernel that returns float32, with the scale of each column of ``qdata``, or of each sum.

    The product with the zero points, which are one for each row, each column or for all, is subtracted from the sums.
    """
    before = scale if scale is not None and scale.shape[1] != 1 else None
    after = scale if before is None else None
    has_kernel = x.dtype is torch.bfloat16 and cpu_kernels.has_bfloat16() and before is None
    values = x if has_kernel else x.float()
    values = values if before is None else (values * before).float()
    y = multiply(values, qdata)
    if zero_point is not None:
        each = (
            values.float() if zero_point.shape[1] != 1 else values.sum(-1, keepdim=True, dtype=torch.float32)
        )
        y -= each @ zero_point.float().t()
    return (y if after is None else y * after.reshape(-1)).to(x.dtype)


def _packed(x: Tensor, qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    """Reads the matrix as int8; PyTorch's kernel for a few rows of bfloat16, which sums in float32."""
    ones = x.new_ones(qdata.shape[0])  # a scale in bfloat16 would be rounded; the caller scales
    return torch.ops.aten._weight_int8pack_mm.default(x.contiguous(), qdata, ones)


def _in_parts(x: Tensor, qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    """Converts a number of rows of ``qdata`` at a time to floats, which fit into the cache, and multiplies.

    The whole matrix in floats would be written to memory and read again, in pages that the system first has to clear.
    """
    memory = x.new_empty(0)
    products = []
    for part in _split_rows(qdata, scale, zero_point, x.element_size()):
        floats = _convert(*part, memory)
        # For float32, kernels take less time for a matrix of many rows times one of few columns than the other way.
        products.append(x @ floats.t() if x.element_size() < 4 else floats @ x.t())
    return torch.cat(products, 1) if x.element_size() < 4 else torch.cat(products).t().contiguous()


def _at_once(x: Tensor, qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    """Converts the whole matrix to floats, which fit into the cache, and multiplies."""
    return F.linear(x, _convert(qdata, scale, zero_point, x.new_empty(0)))


def _convert(qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None, memory: Tensor) -> Tensor:
    """Dequantizes a part of a matrix to the dtype of ``memory``, which our own kernel writes to, where there is one."""
    rows = qdata if qdata.stride(1) == 1 else qdata.t()
    plain = scale is None and zero_point is None and memory.dtype is torch.bfloat16
    if not (plain and cpu_kernels.can_convert(rows)):
        return to_floats(qdata, scale, zero_point, memory.dtype)
    floats = cpu_kernels.to_bfloat16(rows, memory.resize_(rows.shape))
    return floats if rows is qdata else floats.t()


def _split_rows(
    qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None, itemsize: int
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Yields parts of whole blocks, of about ``PART_BYTES`` in floats."""
    height, width = qdata.shape
    blocks = next((t for t in (scale, zero_point) if t is not None and t.shape[0] != 1), None)
    block = 1 if blocks is None else height // blocks.shape[0]
    step = max(1, PART_BYTES // (itemsize * width * block))  # blocks in a part
    for start in range(0, height // block, step):
        end = start + step
        scale_part, zero_part = (
            t if t is None or t.shape[0] == 1 else t[start:end] for t in (scale, zero_point)
        )
        yield qdata[start * block : end * block], scale_part, zero_part


def to_floats(qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantizes a matrix; without a scale it returns the integers less their zero points, which bfloat16 holds."""
    if scale is not None:
        return affine.from_int8(qdata, scale, zero_point, dtype)
    integers = qdata.to(dtype)
    return integers if zero_point is None else affine.shift(integers, zero_point)


# ---- the choice --------------------------------------------------------------------------------------------

Takes = Callable[[Tensor, Tensor | None, Tensor | None], bool]


class Kernel(NamedTuple):
    """A kernel and the products that it is for.

    Attributes:
        multiply: computes ``int8_product``.
        dtypes: the dtypes of the floats.
        rows: the greatest number of rows of floats.
        takes: whether the kernel multiplies by a matrix with this scale and zero point.
        is_for: whether the kernel is for this processor.
        entries: the greatest number of entries of the matrix.
    """

    multiply: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    dtypes: tuple[torch.dtype, ...]
    rows: float
    takes: Takes
    is_for: Callable[[], bool] = lambda: True
    entries: float = float("inf")


def _takes_rows(qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> bool:
    """Whether there is a library, a scale for each row or column, and a contiguous matrix of whole vectors."""
    height, width = qdata.shape
    simple = all(t is None or t.shape in ((1, 1), (height, 1), (1, width)) for t in (scale, zero_point))
    return simple and cpu_kernels.is_whole(qdata) and cpu_kernels.library() is not None


def _takes_columns(qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> bool:
    """Whether `_takes_rows` is true of the transposed matrix."""
    swapped = (None if t is None else t.t() for t in (scale, zero_point))
    return _takes_rows(qdata.t(), *swapped)


def _takes_packed(qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> bool:
    return scale is None and zero_point is None and cpu_kernels.is_whole(qdata)


def _takes_all(*weight: Tensor | None) -> bool:
    return True


def _lacks_bfloat16() -> bool:
    return not cpu_kernels.has_bfloat16()


def _has_tiles() -> bool:
    return cpu_kernels.has_tiles()


def _lacks_tiles() -> bool:
    return not cpu_kernels.has_tiles()


ANY = float("inf")
FLOAT, HALF = (torch.float32,), (torch.bfloat16,)
WIDE = *FLOAT, torch.float16
# The first kernel that accepts a product multiplies. Beyond a kernel's limits, the next kernel took less time for 4096
# by 4096 numbers (`python -m bench.int8_kernels`): more rows are limited by arithmetic, and a product of a converted
# part reads each converted number more often.
KERNELS = (
    # Where processors multiply tiles, a small matrix is in the cache as floats too, and more rows pay for conversion.
    Kernel(_by_rows, WIDE, 24, _takes_rows),
    Kernel(_by_columns, WIDE, 24, _takes_columns),
    Kernel(_at_once, FLOAT, ANY, _takes_all, _has_tiles, entries=2**18),
    Kernel(_by_rows, WIDE, 48, _takes_rows),
    Kernel(_by_columns, WIDE, 48, _takes_columns),
    Kernel(_by_rows, WIDE, 96, _takes_rows, cpu_kernels.has_avx512),
    Kernel(_by_columns, WIDE, 96, _takes_columns, cpu_kernels.has_avx512),
    Kernel(_at_once, FLOAT, ANY, _takes_all, _has_tiles, entries=2**20),
    Kernel(_by_rows, WIDE, ANY, _takes_rows, cpu_kernels.has_avx512),
    Kernel(_in_parts, FLOAT, ANY, _takes_columns, _has_tiles),
    Kernel(_by_columns, WIDE, ANY, _takes_columns, cpu_kernels.has_avx512),
    Kernel(_by_rows, HALF, 8, _takes_rows),
    Kernel(_by_rows, HALF, 32, _takes_rows, _lacks_tiles),
    Kernel(_by_columns, HALF, 12, _takes_columns),
    Kernel(_by_columns, HALF, 24, _takes_columns, _lacks_tiles),
    # Without instructions for bfloat16, oneDNN's products of bfloat16 take three times as long as ours of float32.
    Kernel(_by_rows, HALF, ANY, _takes_rows, _lacks_bfloat16),
    Kernel(_by_columns, HALF, ANY, _takes_columns, _lacks_bfloat16),
    Kernel(_packed, HALF, 16, _takes_packed, _lacks_tiles),
    Kernel(_at_once, HALF, ANY, _takes_all, entries=PART_BYTES // 2),
    Kernel(_in_parts, (torch.float64, *WIDE, *HALF), ANY, _takes_all),
)


# ---- derivatives -------------------------------------------------------------------------------------------


class Int8Product(torch.autograd.Function):
    """``int8_product`` with its derivatives in the input and in the scale."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, qdata: Tensor, scale: Any, zero_point: Any) -> Tensor:
        """Calls the op."""
        return int8_product(x, qdata, scale, zero_point)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves the input for the backward only if the scale requires grad."""
        x, *weight = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, *weight)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Returns the gradients of the input and of the scale."""
        (g,), (x, qdata, scale, zero_point) = cotangents, ctx.saved_tensors
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            scale_t, zero_point_t = (None if t is None else t.t() for t in (scale, zero_point))
            grad_x = multiply(g, qdata.t(), scale_t, zero_point_t)
        if x is not None:
            per_entry = (g.t().to(scale.dtype) @ x.to(scale.dtype)) * to_floats(
                qdata, None, zero_point, scale.dtype
            )
            grad_scale = affine.sum_blocks(per_entry, scale.shape)
        return grad_x, None, grad_scale, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Returns the derivative along tangents of the input and of the scale."""
        x, qdata, scale, zero_point = ctx.saved_tensors
        along_x, _, along_scale, _ = tangents
        parts = []
        if along_x is not None:
            parts.append(multiply(along_x, qdata, scale, zero_point))
        if along_scale is not None:
            parts.append(multiply(x, qdata, along_scale, zero_point))
        return sum(parts[1:], parts[0])


def multiply(x: Tensor, qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    """Returns ``int8_product``, on any device; differentiable in ``x`` and ``scale``, forward and backward."""
    if x.device.type != "cpu" or qdata.numel() <= SMALL:
        # The floats have the strides of the integers. A compiled call makes no view of them.
        scale, zero_point = (None if t is None else t.t() for t in (scale, zero_point))
        return x @ to_floats(qdata.t(), scale, zero_point, x.dtype)
    return apply(Int8Product, x, qdata, scale, zero_point)
