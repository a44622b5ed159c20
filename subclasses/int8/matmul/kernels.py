"""Matrix products with int8 weights: floats times integers, and integers times integers.

Weight-only layers multiply floats with the integers and scale the sum. On CUDA, kernels of this library multiply a few
rows of half precision (`cuda_products.py`). For one row elsewhere, and for few rows of a small matrix on the CPU, the
product is a sum of products. A compiler fuses this sum, so that the weight is read as int8. Processors with AVX2 alone
do not use it. On the CPU, all other products are one op (`products.py`). Dynamic layers quantize their input, by row or
as a whole, multiply integers into int32, and scale.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses._torch import current_transform
from subclasses.int8 import affine
from subclasses.int8.matmul import cpu_kernels, dynamic_products, products
from subclasses.int8.matmul.integers import multiply_on_cpu
from subclasses.int8.matmul.ops import apply, is_traced
from subclasses.spec.values import holds_always

# Requirements of the CUDA kernel: more than 16 rows, and extents that are multiples of 8.
CUDA_ROWS, CUDA_MULTIPLE = 17, 8
# Up to the first number of rows, a product on CUDA takes as long as reading the weight. Up to the second number, each
# program of a kernel quantizes the rows itself.
CUDA_FEW_ROWS, CUDA_ROWS_QUANTIZED_INSIDE = 64, 4
HALF = (torch.bfloat16, torch.float16)
# Up to this many products on the CPU, the call of a matrix product takes more time than a fused sum.
FEW_PRODUCTS = 2**14


class Rows(NamedTuple):
    """An int8 matrix with a scale, and optionally a zero point, for blocks of its entries.

    Products with floats accept any blocks. Products of integers accept a scale for each row, ``[rows, 1]``, or for all
    rows, ``[1, 1]``.
    """

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor | None

    def to_float(self, dtype: torch.dtype) -> Tensor:
        """Dequantizes the matrix."""
        return affine.from_int8(self.qdata, self.scale, self.zero_point, dtype)

    def sums(self) -> Tensor:
        """Returns the sum of each row's integers, ``[rows, 1]`` int32."""
        return self.qdata.sum(-1, keepdim=True, dtype=torch.int32)


# ---- floats times integers ---------------------------------------------------------------------------------


def float_times_int8(x: Tensor, w: Rows) -> Tensor:
    """Returns ``x @ w.T`` in the dtype of ``x``; differentiable in ``x`` and the scale."""
    if _is_few_rows_on_cuda(x, w.qdata) and _has_kernel_on_cuda(x, w):
        return _few_rows_on_cuda(x, w)
    if _is_fused(x, w):
        return _sum_products(x, w)
    rows = _matrix_of(x)
    # A sum of unscaled products may overflow float16.
    scales_sums = w.scale.shape[1] == 1 and x.dtype is not torch.float16
    y = products.multiply(rows, w.qdata, None if scales_sums else w.scale, w.zero_point)
    y = y if rows is x else y.reshape(*x.shape[:-1], w.qdata.shape[0])
    return (y * w.scale.reshape(-1)).to(x.dtype) if scales_sums else y


def _matrix_of(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(num_rows(x), x.shape[-1])


def num_rows(x: Tensor) -> int:
    """Returns the product of all but the last extent; ``reshape(-1, ...)`` is ambiguous for empty rows."""
    rows = 1
    for extent in x.shape[:-1]:
        rows = rows * extent
    return rows


def _is_fused(x: Tensor, w: Rows) -> bool:
    """Whether a compiler may fuse the product with the ops around it, in less time than a matrix product takes."""
    if torch.is_grad_enabled() and (x.requires_grad or w.scale.requires_grad):
        return False
    if x.dim() < 2 or not _has_few_rows(x, w):
        return False
    if x.device.type == "cpu" and cpu_kernels.has_avx2_alone():
        return False  # with AVX2, compilers convert int8 numbers one at a time
    # Without compilation, this would write all products to memory.
    return x.device.type in ("cpu", "cuda") and x.dtype is not torch.float64 and is_traced(x)


def _has_few_rows(x: Tensor, w: Rows) -> bool:
    """Whether the input has one row, or few. Compilers specialize on one row; a symbol gets no further guard."""
    if all(extent == 1 for extent in x.shape[:-1]):
        return True
    return x.device.type == "cpu" and holds_always(num_rows(x) * w.qdata.numel() <= FEW_PRODUCTS)


def _sum_products(x: Tensor, w: Rows) -> Tensor:
    """Computes a sum of products, which Inductor fuses: it reads the weight as int8 and never writes it as floats.

    The sum is in float32 and is narrowed once it is scaled.
    """
    rows = x.reshape(num_rows(x), x.shape[-1]).to(torch.float32)
    if x.device.type == "cpu" and x.dtype is not torch.float32:
        # Inductor writes the operand of as_strided to memory. It would convert each row anew for each row of the
        # weight, and take five times as long.
        rows = rows.as_strided(rows.shape, (rows.shape[1], 1))
    scales_sums = w.scale.shape[1] == 1
    floats = products.to_floats(w.qdata, None if scales_sums else w.scale, w.zero_point, rows.dtype)
    y = (rows.unsqueeze(1) * floats).sum(-1)
    if scales_sums:
        y = y * w.scale.reshape(-1)
    return y.to(x.dtype).reshape(*x.shape[:-1], w.qdata.shape[0])


def _is_few_rows_on_cuda(x: Tensor, qdata: Tensor) -> bool:
    """Whether a product is one that kernels for a few rows compute; they have no rule for vmap."""
    return (
        x.device.type == "cuda"
        and has_triton()
        and qdata.is_contiguous()
        and current_transform() is None
        and 0 < num_rows(x) <= CUDA_FEW_ROWS
        and 0 not in qdata.shape
    )


@functools.cache
def has_triton() -> bool:
    """Whether PyTorch is built for CUDA, and Triton is installed; on Windows it is not."""
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


def _has_kernel_on_cuda(x: Tensor, w: Rows) -> bool:
    """Whether the kernels accept the dtype and the blocks along a matrix's rows; they have no derivatives."""
    if x.dtype not in HALF or torch.is_grad_enabled():
        return False
    if w.scale.shape[1] == 1:
        return True
    from subclasses.int8.matmul.cuda_products import takes_groups_of  # needs Triton

    return takes_groups_of(w.qdata.shape[1] // w.scale.shape[1])


def _few_rows_on_cuda(x: Tensor, w: Rows) -> Tensor:
    """Multiplies by a kernel that reads the weight as int8, once; the sum is in float32 and is narrowed once scaled."""
    from subclasses.int8.matmul.cuda_products import int8_rows  # needs Triton

    y = int8_rows(_matrix_of(x).contiguous(), w.qdata, w.scale, w.zero_point)
    return y.reshape(*x.shape[:-1], w.qdata.shape[0])


# ---- integers times integers -------------------------------------------------------------------------------


def longest_sum(x_symmetric: bool, w_symmetric: bool) -> int:
    """Returns the number of products of int8 numbers, less their zero points, whose sum always fits into int32."""
    largest = (-affine.LOWEST if s else affine.HIGHEST - affine.LOWEST for s in (x_symmetric, w_symmetric))
    return (2**31 - 1) // math.prod(largest)


def quantize_rows(x: Tensor, activation: str, symmetric: bool) -> Rows:
    """Quantizes a matrix of floats to int8, with one scale for each row or for the whole."""
    counts = (x.shape[0] if activation == "row" else 1, 1)
    scale, zero_point = affine.choose_scale(x, counts, symmetric)
    return Rows(affine.to_int8(x, scale, zero_point), scale, zero_point)


def int8_times_int8(x: Rows, w: Rows, dtype: torch.dtype) -> Tensor:
    """Returns ``x @ w.T``: int32 products of the integers, corrected for the zero points, then scaled."""
    total = multiply_integers(x.qdata, w.qdata)
    if x.zero_point is not None:
        total = total - x.zero_point * w.sums().t()
    if w.zero_point is not None:
        total = total - x.sums() * w.zero_point.t()
    if x.zero_point is not None and w.zero_point is not None:
        total = total + x.qdata.shape[1] * x.zero_point.to(torch.int32) * w.zero_point.t()
    return (total.to(x.scale.dtype) * x.scale * w.scale.t()).to(dtype)


def multiply_integers(a: Tensor, b: Tensor) -> Tensor:
    """Returns the exact ``a @ b.T`` of int8 matrices ``[M, K]`` and ``[N, K]`` as int32."""
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return a.new_zeros((m, n), dtype=torch.int32)
    if a.device.type == "cpu" and k > 1 and (m != 1 or n != 1):
        return multiply_on_cpu(a, b)
    if a.device.type != "cuda":
        return a.to(torch.int32) @ b.to(torch.int32).t()
    a = _pad(a, max(0, CUDA_ROWS - m), -k % CUDA_MULTIPLE)
    b = _pad(b, -n % CUDA_MULTIPLE, -k % CUDA_MULTIPLE)
    return torch.ops.aten._int_mm.default(a, b.t())[:m, :n]


def _pad(t: Tensor, rows: int, columns: int) -> Tensor:
    """Pads zeros after the last row and column; without padding the matrix is made contiguous."""
    return F.pad(t, (0, columns, 0, rows)) if rows or columns else t.contiguous()


class DynamicLinear(torch.autograd.Function):
    """``int8(x) @ w.T`` with the derivative of ``x @ w.T``: the straight-through estimator of rounding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, qdata: Tensor, scale: Tensor, zero_point: Any, activation_args: Any) -> Tensor:
        """Quantizes the input and multiplies integers."""
        return _quantized_linear(x, Rows(qdata, scale, zero_point), *activation_args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves the input for the backward only if the scale requires grad."""
        x, qdata, scale, zero_point, ctx.activation_args = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, qdata, scale, zero_point)
        ctx.save_for_forward(x, qdata, scale, zero_point)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Returns the gradients of the input, and of the scale at the quantized input."""
        (g,), (x, qdata, scale, zero_point) = cotangents, ctx.saved_tensors
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_x = _times_transposed(g, qdata, scale, zero_point)
        if x is not None:
            unscaled = _unscaled(x, qdata, scale, zero_point, ctx.activation_args)
            grad_scale = (g.to(scale.dtype) * unscaled).sum(0).unsqueeze(1).sum_to_size(scale.shape)
        return grad_x, None, grad_scale, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Returns the derivative along tangents of the input and of the scale."""
        x, qdata, scale, zero_point = ctx.saved_tensors
        along_x, _, along_scale, *_ = tangents
        parts = []
        if along_x is not None:
            parts.append(products.multiply(along_x.to(scale.dtype), qdata, None, zero_point) * scale.t())
        if along_scale is not None:
            parts.append(_unscaled(x, qdata, scale, zero_point, ctx.activation_args) * along_scale.t())
        return sum(parts[1:], parts[0]).to(x.dtype)


def _times_transposed(g: Tensor, qdata: Tensor, scale: Tensor, zero_point: Any) -> Tensor:
    """Returns ``g @ w``: each output is scaled once, and the integers stay exact. Sums are in float32 at least."""
    scaled = g.to(scale.dtype) * scale.t()
    if g.dtype is torch.bfloat16:
        scaled = scaled.to(g.dtype)
    zero_points = None if zero_point is None else zero_point.t()
    return products.multiply(scaled, qdata.t(), None, zero_points).to(g.dtype)


def _unscaled(x: Tensor, qdata: Tensor, scale: Tensor, zero_point: Any, activation_args: Any) -> Tensor:
    """Returns the product with the weight before scaling."""
    ones = Rows(qdata, torch.ones_like(scale), zero_point)
    return int8_times_int8(quantize_rows(x.detach(), *activation_args), ones, scale.dtype)


def dynamic_linear(x: Tensor, w: Rows, activation: str, symmetric: bool) -> Tensor:
    """Returns ``x @ w.T`` for a matrix of floats that is quantized dynamically."""
    return apply(DynamicLinear, x, *w, (activation, symmetric))


def _quantized_linear(x: Tensor, w: Rows, activation: str, symmetric: bool) -> Tensor:
    if not (activation == "row" and symmetric and w.zero_point is None):
        return int8_times_int8(quantize_rows(x, activation, symmetric), w, x.dtype)
    if dynamic_products.takes(x, w.qdata, w.scale):
        return dynamic_products.dynamic_product(x, w.qdata, w.scale)
    if x.dtype is not torch.float64 and _is_few_rows_on_cuda(x, w.qdata):
        return _dynamic_rows_on_cuda(x, w)
    return int8_times_int8(quantize_rows(x, activation, symmetric), w, x.dtype)


def _dynamic_rows_on_cuda(x: Tensor, w: Rows) -> Tensor:
    """Multiplies by a kernel that scales the sums, and that quantizes the fewest rows itself."""
    from subclasses.int8.matmul.cuda_products import int8_by_int8_rows  # needs Triton

    if x.shape[0] <= CUDA_ROWS_QUANTIZED_INSIDE and x.dtype in HALF:
        return int8_by_int8_rows(x.contiguous(), None, w.qdata, w.scale, x.dtype)
    rows = quantize_rows(x, "row", symmetric=True)
    return int8_by_int8_rows(rows.qdata.contiguous(), rows.scale, w.qdata, w.scale, x.dtype)
