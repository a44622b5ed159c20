"""Products with int8 weights: floats times integers, and integers times integers.

Weight-only layers multiply floats by the integers as they are and scale the sum, which is exact in bfloat16 too
and fuses when compiled. Dynamic layers quantize their input row by row, multiply integers into int32, and scale.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.int8 import affine

# What CUDA's kernel wants: more than 16 rows, and extents that are multiples of 8.
CUDA_ROWS, CUDA_MULTIPLE = 17, 8


class Rows(NamedTuple):
    """An int8 matrix with a scale, and maybe a zero point, for each row: ``[rows, 1]``, or ``[1, 1]``."""

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor | None

    def to_float(self, dtype: torch.dtype) -> Tensor:
        """What it stands for."""
        return affine.from_int8(self.qdata, self.scale, self.zero_point, dtype)

    def sums(self) -> Tensor:
        """The sum of each row's integers, ``[rows, 1]`` int32."""
        return self.qdata.sum(-1, keepdim=True, dtype=torch.int32)


# ---- floats times integers ---------------------------------------------------------------------------------


def float_times_int8(x: Tensor, w: Rows) -> Tensor:
    """``x @ w.T`` in the dtype of ``x``; differentiable in ``x`` and the scale."""
    one_row = _is_one_row(x, w)
    if x.dtype is torch.float16 and not one_row:  # the sum of unscaled products may be more than it holds
        return F.linear(x, w.to_float(x.dtype))
    numbers = w.qdata
    if w.zero_point is not None:
        numbers = numbers.to(torch.int16) - w.zero_point
    y = _one_row(x, numbers) if one_row else F.linear(x, numbers.to(x.dtype))
    return (y * w.scale.reshape(-1)).to(x.dtype)


def _is_one_row(x: Tensor, w: Rows) -> bool:
    """Whether a layer only reads its weight. Asked for 1, which has a program of its own anyway."""
    if torch.is_grad_enabled() and (x.requires_grad or w.scale.requires_grad):
        return False
    if x.dim() < 2 or any(extent != 1 for extent in x.shape[:-1]):
        return False
    if x.device.type == "cpu":
        return x.dtype is torch.float32
    # Run op by op on CUDA, it would write all the products.
    return x.device.type == "cuda" and x.dtype is not torch.float64 and is_traced(x)


def _one_row(x: Tensor, numbers: Tensor) -> Tensor:
    """As a sum of products, which Inductor fuses: the weight is read as int8, and never written as floats.

    The sum is of float32, of which the scale has to be taken before it is narrowed.
    """
    products = x.reshape(1, -1).to(torch.float32) * numbers
    return products.sum(-1).reshape(*x.shape[:-1], numbers.shape[0])


def is_traced(x: Tensor) -> bool:
    """Whether a graph is made of what is done, so that a compiler may fuse it."""
    return torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter)


# ---- integers times integers -------------------------------------------------------------------------------


def longest_sum(x_symmetric: bool, w_symmetric: bool) -> int:
    """How many products of int8 numbers, less their zero points, are sure to have a sum that fits into int32."""
    largest = (-affine.LOWEST if s else affine.HIGHEST - affine.LOWEST for s in (x_symmetric, w_symmetric))
    return (2**31 - 1) // math.prod(largest)


def quantize_rows(x: Tensor, activation: str, symmetric: bool) -> Rows:
    """A matrix of floats as int8, with a scale for each row or one for all."""
    counts = (x.shape[0] if activation == "row" else 1, 1)
    scale, zero_point = affine.choose_scale(x, counts, symmetric)
    return Rows(affine.to_int8(x, scale, zero_point), scale, zero_point)


def int8_times_int8(x: Rows, w: Rows, dtype: torch.dtype) -> Tensor:
    """``x @ w.T``: the products of integers in int32, less what the zero points add, then scaled."""
    total = multiply_integers(x.qdata, w.qdata)
    if x.zero_point is not None:
        total = total - x.zero_point * w.sums().t()
    if w.zero_point is not None:
        total = total - x.sums() * w.zero_point.t()
    if x.zero_point is not None and w.zero_point is not None:
        total = total + x.qdata.shape[1] * x.zero_point.to(torch.int32) * w.zero_point.t()
    return (total.to(x.scale.dtype) * x.scale * w.scale.t()).to(dtype)


def multiply_integers(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of int8 matrices ``[M, K]`` and ``[N, K]`` as int32, exactly."""
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return a.new_zeros((m, n), dtype=torch.int32)
    if a.device.type == "cpu" and k > 1:
        # Some releases read the strides of a dimension of one entry, and are silently wrong where these are not
        # the usual ones, or where an expanded or sliced matrix comes; k = 1 has no usual ones once transposed.
        a, b = (t.reshape(-1).view(t.shape) for t in (a, b))
        return torch.ops.aten._int_mm.default(a, b.t())
    if a.device.type != "cuda":
        return a.to(torch.int32) @ b.to(torch.int32).t()
    a = _padded(a, max(0, CUDA_ROWS - m), -k % CUDA_MULTIPLE)
    b = _padded(b, -n % CUDA_MULTIPLE, -k % CUDA_MULTIPLE)
    return torch.ops.aten._int_mm.default(a, b.t())[:m, :n]


def _padded(t: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros after the last row and column; the matrix itself, contiguous, where there are to be none."""
    return F.pad(t, (0, columns, 0, rows)) if rows or columns else t.contiguous()


class DynamicLinear(torch.autograd.Function):
    """``int8(x) @ w.T``, with the derivative of ``x @ w.T``: rounding is taken as the identity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, qdata: Tensor, scale: Tensor, zero_point: Any, how: Any) -> Tensor:
        """The product of integers."""
        return int8_times_int8(quantize_rows(x, *how), Rows(qdata, scale, zero_point), x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """The input is kept for the derivative by the scale alone."""
        x, qdata, scale, zero_point, ctx.how = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, qdata, scale, zero_point)
        ctx.save_for_forward(x, qdata, scale, zero_point)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Gradients of the input, and of the scale at the input as it was quantized."""
        (g,), (x, qdata, scale, zero_point) = cotangents, ctx.saved_tensors
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            # In this order the scale enters once for each output, and the integers stay exact.
            numbers = _numbers(qdata, zero_point, scale.dtype)
            grad_x = ((g.to(scale.dtype) * scale.t()) @ numbers).to(g.dtype)
        if x is not None:
            products = _unscaled(x, qdata, scale, zero_point, ctx.how)
            grad_scale = (g.to(scale.dtype) * products).sum(0).unsqueeze(1).sum_to_size(scale.shape)
        return grad_x, None, grad_scale, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The derivative along tangents of the input and of the scale."""
        x, qdata, scale, zero_point = ctx.saved_tensors
        along_x, _, along_scale, *_ = tangents
        parts = []
        if along_x is not None:
            parts.append(along_x.to(scale.dtype) @ _numbers(qdata, zero_point, scale.dtype).t() * scale.t())
        if along_scale is not None:
            parts.append(_unscaled(x, qdata, scale, zero_point, ctx.how) * along_scale.t())
        return sum(parts[1:], parts[0]).to(x.dtype)


def _numbers(qdata: Tensor, zero_point: Any, dtype: torch.dtype) -> Tensor:
    """The weight before it is scaled."""
    return qdata.to(dtype) if zero_point is None else qdata.to(dtype) - zero_point.to(dtype)


def _unscaled(x: Tensor, qdata: Tensor, scale: Tensor, zero_point: Any, how: Any) -> Tensor:
    """The product with the weight before it is scaled."""
    ones = Rows(qdata, torch.ones_like(scale), zero_point)
    return int8_times_int8(quantize_rows(x.detach(), *how), ones, scale.dtype)


def dynamic_linear(x: Tensor, w: Rows, activation: str, symmetric: bool) -> Tensor:
    """``x @ w.T`` of a matrix of floats that is quantized on the way."""
    if torch.is_grad_enabled():  # forward-mode derivatives are asked for without a requires_grad
        return DynamicLinear.apply(x, *w, (activation, symmetric))  # type: ignore[return-value]
    return int8_times_int8(quantize_rows(x, activation, symmetric), w, x.dtype)
