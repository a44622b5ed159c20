"""Matrix products with int8 weights: floats times integers, and integers times integers.

Weight-only layers multiply floats with the integers and scale the sum. The integers are exact in bfloat16 too, and the
product fuses when compiled. Dynamic layers quantize their input, by row or as a whole, multiply integers into int32,
and scale.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.int8 import affine

# Requirements of the CUDA kernel: more than 16 rows, and extents that are multiples of 8.
CUDA_ROWS, CUDA_MULTIPLE = 17, 8


class Rows(NamedTuple):
    """An int8 matrix with a scale, and optionally a zero point, of size ``[rows, 1]`` or ``[1, 1]``."""

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
    one_row = _is_one_row(x, w)
    if x.dtype is torch.float16 and not one_row:  # a sum of unscaled products may overflow float16
        return F.linear(x, w.to_float(x.dtype))
    integers = w.qdata
    if w.zero_point is not None:
        integers = integers.to(torch.int16) - w.zero_point
    y = _one_row(x, integers) if one_row else F.linear(x, integers.to(x.dtype))
    return (y * w.scale.reshape(-1)).to(x.dtype)


def _is_one_row(x: Tensor, w: Rows) -> bool:
    """Whether the input has one row, so that reading the weight dominates; 1 is specialized on anyway."""
    if torch.is_grad_enabled() and (x.requires_grad or w.scale.requires_grad):
        return False
    if x.dim() < 2 or any(extent != 1 for extent in x.shape[:-1]):
        return False
    if x.device.type == "cpu":
        return x.dtype is torch.float32
    # Without compilation, this would write all products to memory on CUDA.
    return x.device.type == "cuda" and x.dtype is not torch.float64 and is_traced(x)


def _one_row(x: Tensor, integers: Tensor) -> Tensor:
    """Computes a sum of products, which Inductor fuses: it reads the weight as int8 and never writes it as floats.

    The sum is in float32. The caller scales it before it is narrowed.
    """
    products = x.reshape(1, -1).to(torch.float32) * integers
    return products.sum(-1).reshape(*x.shape[:-1], integers.shape[0])


def is_traced(x: Tensor) -> bool:
    """Whether ops are being traced to a graph, which a compiler may fuse."""
    return torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter)


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
    if a.device.type == "cpu" and k > 1:
        # Some releases use the stride of a dimension with one entry, and are silently wrong for unusual strides there
        # and for an expanded or sliced matrix. With k = 1 the transposed matrix always has unusual strides.
        a, b = (t.reshape(-1).view(t.shape) for t in (a, b))
        return torch.ops.aten._int_mm.default(a, b.t())
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
        return int8_times_int8(quantize_rows(x, *activation_args), Rows(qdata, scale, zero_point), x.dtype)

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
            # In this order the scale is applied once for each output, and the integers stay exact.
            integers = _integers(qdata, zero_point, scale.dtype)
            grad_x = ((g.to(scale.dtype) * scale.t()) @ integers).to(g.dtype)
        if x is not None:
            products = _unscaled(x, qdata, scale, zero_point, ctx.activation_args)
            grad_scale = (g.to(scale.dtype) * products).sum(0).unsqueeze(1).sum_to_size(scale.shape)
        return grad_x, None, grad_scale, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Returns the derivative along tangents of the input and of the scale."""
        x, qdata, scale, zero_point = ctx.saved_tensors
        along_x, _, along_scale, *_ = tangents
        parts = []
        if along_x is not None:
            parts.append(along_x.to(scale.dtype) @ _integers(qdata, zero_point, scale.dtype).t() * scale.t())
        if along_scale is not None:
            parts.append(_unscaled(x, qdata, scale, zero_point, ctx.activation_args) * along_scale.t())
        return sum(parts[1:], parts[0]).to(x.dtype)


def _integers(qdata: Tensor, zero_point: Any, dtype: torch.dtype) -> Tensor:
    """Returns the weight before scaling."""
    return qdata.to(dtype) if zero_point is None else qdata.to(dtype) - zero_point.to(dtype)


def _unscaled(x: Tensor, qdata: Tensor, scale: Tensor, zero_point: Any, activation_args: Any) -> Tensor:
    """Returns the product with the weight before scaling."""
    ones = Rows(qdata, torch.ones_like(scale), zero_point)
    return int8_times_int8(quantize_rows(x.detach(), *activation_args), ones, scale.dtype)


def dynamic_linear(x: Tensor, w: Rows, activation: str, symmetric: bool) -> Tensor:
    """Returns ``x @ w.T`` for a matrix of floats that is quantized dynamically."""
    if torch.is_grad_enabled():  # forward-mode AD sets no requires_grad that could be tested here
        return DynamicLinear.apply(x, *w, (activation, symmetric))  # type: ignore[return-value]
    return int8_times_int8(quantize_rows(x, activation, symmetric), w, x.dtype)
