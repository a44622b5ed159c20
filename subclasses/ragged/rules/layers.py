"""Layers that compute each entry alone, and matrix products.

Gaps are 0 in inputs, so that no gradient of a parameter depends on them. They are 0 in results, so that they receive no
cotangent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses._torch import grouped_mm_traces
from subclasses.errors import DispatchError
from subclasses.ragged.autocast import autocast_operands
from subclasses.ragged.base import first_ragged, is_ragged, shown
from subclasses.ragged.checks import is_traced
from subclasses.ragged.registry import Rules

RULES = Rules()

# ---- layers ----------------------------------------------------------------------------------------------------

NORMS = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
RANDOM = (F.dropout, F.alpha_dropout, F.rrelu, torch.dropout, torch.alpha_dropout, torch.rrelu)


@RULES.of(F.linear)
def _linear(func: Any, input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    check_dense(func, weight, bias)
    _check_features(func, input, 1)
    return input.with_kept(func(input.clean(), weight, bias))


@RULES.of(F.bilinear)
def _bilinear(func: Any, input1: Any, input2: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    check_dense(func, weight, bias)
    x = first_ragged((input1, input2))
    _check_features(func, x, 1)
    given = (
        x.alongside(func, t) if is_ragged(t) else x.like_dense(t.expand(*x.shape[:-1], -1))
        for t in (input1, input2)
    )
    return x.with_kept(func(*(t.clean() for t in given), weight, bias))


@RULES.of(*NORMS)
def _norm(func: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    check_dense(func, *args, *kwargs.values())
    _check_features(func, input, len(normalized_shape))
    return input.with_kept(func(input.clean(), normalized_shape, *args, **kwargs))


@RULES.of(*RANDOM)
def _dropout(func: Any, input: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
    stored = input.unwrap_stored()
    drawn = func(stored, *args, **kwargs)
    if drawn is stored:  # as in evaluation
        return input
    result = input.with_stored(drawn)
    return input.copy_(result) if inplace else result


@RULES.of(F.embedding)
def _embedding(  # noqa: PLR0913
    func: Any,
    input: Any,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    check_dense(func, weight)
    if (max_norm is not None or scale_grad_by_freq) and input.has_gaps:
        raise DispatchError(
            f"{func.__name__}: max_norm and scale_grad_by_freq look at every stored index of {shown(input)}, those "
            "that do not exist as well",
            code="padding-counted",
            hint="use JaggedTensor.from_tensors(x.to_tensors())",
        )
    options = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    return input.with_kept(func(input.clean(), weight, *options))


def _check_features(func: Any, x: Any, count: int) -> None:
    """Raises unless the last ``count`` dimensions are dimensions of an entry."""
    if max(x.row_dims) >= x.rank - count:
        raise DispatchError(
            f"{func.__name__}: works along the last {count} dimensions, and {shown(x)} has its rows along one of them",
            code="row-dims",
            hint="swap them by transpose",
        )


def check_dense(func: Any, *parameters: Any) -> None:
    """Raises unless the parameters of a layer are dense."""
    for p in parameters:
        if is_ragged(p):
            raise DispatchError(
                f"{func.__name__}: expected dense parameters, got {shown(p)}", code="argument-refused"
            )


# ---- matrix products -------------------------------------------------------------------------------------------


@RULES.of(torch.bmm, torch.mm)
def _product(func: Any, input: Any, mat2: Any) -> Any:
    return torch.matmul(input, mat2)


@RULES.of(torch.matmul)
def _matmul(func: Any, input: Any, other: Any) -> Any:
    if _is_dense(other, 1, 2) and max(input.row_dims) < input.dim() - 1:
        return input.with_kept(torch.matmul(input.clean(), other))
    if _is_dense(input, 2):
        batch, ragged = other.row_dims
        if batch < other.dim() - 2 and ragged == other.dim() - 1:
            return other.with_kept(torch.matmul(input, other.clean()))
    return _multiply_tables(func, input, other)


def _is_dense(t: Tensor, *dims: int) -> bool:
    return not is_ragged(t) and t.dim() in dims


def _multiply_tables(func: Any, a: Any, b: Any) -> Any:
    """Multiplies tables row by row; the ragged dimension is contracted, or keeps its index."""
    x, n = first_ragged((a, b)), max(a.dim(), b.dim())
    x.check_factors(func, a, b)
    ragged = [(t, t.ragged_dim) for t in (a, b) if isinstance(t, x.ragged_class)]
    contracted = [(t is a and dim == n - 1) or (t is b and dim == n - 2) for t, dim in ragged]
    if len(ragged) == 2:
        if not (contracted == [True, True] or ragged[0][1] == ragged[1][1] < n - 2):
            raise DispatchError(
                f"{func.__name__}: the product of {shown(a)} and {shown(b)} would have two ragged dimensions",
                code="ragged-dims",
                hint="use F.scaled_dot_product_attention, or x.to_dense() with x.mask()",
            )
        x.check_same_rows(func, a, b)
    elif contracted[0]:
        raise DispatchError(
            f"{func.__name__}: {shown(a)} and {shown(b)} are contracted along rows of other lengths",
            code="ragged-dims",
            hint=x.contraction_hint,
        )
    if x is a and _takes_a_matrix_each(x, b):
        values, matrices = autocast_operands(x.device.type, x.unwrap_stored(), b)
        if _is_grouped(values, matrices):
            return x.with_stored(RowProducts.apply(values, matrices, x.offsets[1:].to(torch.int32)))
        if _is_uneven(x, b):
            rows = x.unwrap_stored().split(x.counts.tolist())
            return x.with_stored(torch.cat([row @ matrix for row, matrix in zip(rows, b, strict=True)]))
    x, width = ragged[0][0], max(t.width for t, _ in ragged)
    product = torch.matmul(*(t.to_table(width) if isinstance(t, x.ragged_class) else t for t in (a, b)))
    if contracted[0]:
        return x.per_row(product, x.batch_dim)
    if not x.rows_first:
        return x.like_dense(product)  # which checks that a dense factor added no rows
    return x.from_table(product.narrow(x.ragged_dim, 0, x.width) if len(ragged) == 2 else product)


# ---- a matrix for each row -------------------------------------------------------------------------------------


class RowProducts(torch.autograd.Function):
    """Products ``[total, K] @ [rows, K, N]`` of each row and a matrix of its own, by ``F.grouped_mm``."""

    @staticmethod
    def forward(values: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        """Returns ``[total, N]``; ``ends`` are the offsets of the rows without the first, in int32."""
        return F.grouped_mm(values, matrices, offs=ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Saves the operands."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns both gradients; the kernel refuses an expanded operand."""
        values, matrices, ends = ctx.saved_tensors
        by_values, by_matrices, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        return (
            RowProducts.apply(grad, matrices.mT, ends) if by_values else None,
            F.grouped_mm(values.mT, grad, offs=ends) if by_matrices else None,
            None,
        )


def _takes_a_matrix_each(x: Any, other: Any) -> bool:
    if not x.rows_first or x.has_gaps or x.row_dims != (0, 1) or is_ragged(other) or x.rank != 3:
        return False
    return other.dim() == 3 and other.shape[0] == x.shape[0]


_ALIGNED = 16  # bytes, of which ``F.grouped_mm`` wants multiples as strides


def _is_grouped(values: Tensor, matrices: Tensor) -> bool:
    """Returns whether PyTorch's grouped product supports the operands, and takes less time than a table."""
    if values.dtype != matrices.dtype or values.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    if values.dtype != torch.bfloat16 and (
        values.device.type == "cuda" or (is_traced(values) and not grouped_mm_traces)
    ):
        return False
    if not values.is_contiguous() or not (matrices.is_contiguous() or matrices.mT.is_contiguous()):
        return False
    sizes = *matrices.shape[1:], values.itemsize
    return all(type(n) is int for n in sizes) and all(n and n * sizes[2] % _ALIGNED == 0 for n in sizes[:2])


# How many multiplications take as long as one more product, whose forward and backward calls take microseconds.
_A_PRODUCT_MORE = 200_000


def _is_uneven(x: Any, other: Any) -> bool:
    """Returns whether a product for each row takes less time than one product of a table, padding included."""
    if x.device.type != "cpu" or is_traced(x.stored):
        return False
    padding = x.shape[0] * x.width - x.stored.shape[0]
    return padding * other.shape[1] * other.shape[2] > x.shape[0] * _A_PRODUCT_MORE
