"""Convolutions and pools along rows, independently for each row.

Channels come first: rows are ``[B, C, T]``, ragged along the last dimension. A convolution of images takes rows
``[B, C, T, F]`` or ``[B, C, F, T]``. Zeros past the end of each row of a table equal zero padding of the row. So one
call on the table computes the results of each row. Results that start past the end of the padded row do not exist. A
row that is shorter than the kernel has no result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import is_ragged, name_of, shown
from subclasses.ragged.registry import Rules
from subclasses.ragged.rules.layers import check_dense

RULES = Rules()

# ---- convolutions ----------------------------------------------------------------------------------------------


@RULES.of(F.conv1d, F.conv2d)
def _conv(  # noqa: PLR0913
    func: Any,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    _check_channels_first(func, input, weight.dim(), weight, bias)
    table = func(input.to_dense(), weight, bias, stride, padding, dilation, groups)
    index = input.ragged_dim - 2
    span = _span(weight.shape[input.ragged_dim], _one(dilation, index))
    return _of_windows(input, table, _total_padding(padding, span, index) - span, _one(stride, index))


@RULES.of(F.conv_transpose1d)
def _conv_transpose1d(  # noqa: PLR0913
    func: Any,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    _check_channels_first(func, input, 3, weight, bias)
    table = func(input.to_dense(), weight, bias, stride, padding, output_padding, groups, dilation)
    span = _span(weight.shape[-1], dilation)
    more = span - 2 * _one(padding) + _one(output_padding) - _one(stride)
    lengths = input.row_lengths() * _one(stride) + more
    return input.of_lengths(table, torch.where(input.row_lengths() > 0, lengths, 0).clamp(min=0))


def _total_padding(padding: Any, span: int, index: int) -> int:
    """Returns how many zeros the padding adds to a row, before and after it."""
    if isinstance(padding, str):  # "same", which goes with stride 1, or "valid"
        return span - 1 if padding == "same" else 0
    return 2 * _one(padding, index)


def _of_windows(x: Any, table: Tensor, more: int, stride: int) -> Any:
    """Returns the results of a window at each position as rows of ``(length + more) // stride + 1`` entries."""
    if stride == 1 and more == -1:
        return x.from_table(table)
    return x.of_lengths(table, ((x.row_lengths() + more) // stride + 1).clamp(min=0))


def _span(kernel: int, dilation: Any) -> int:
    """Returns how many positions a kernel spans, including positions that its dilation skips."""
    return _one(dilation) * (kernel - 1) + 1


def _one(value: int | Sequence[int], index: int = 0) -> int:
    """Returns the number for one dimension of an int, of a sequence of one int, or of one for each dimension."""
    return value if isinstance(value, int) else value[index if len(value) > 1 else 0]


def _check_channels_first(func: Any, x: Any, dims: int, *parameters: Any) -> None:
    """Raises unless ``x`` has ``dims`` dimensions with rows after the channels, and the parameters are dense."""
    check_dense(func, *parameters)
    if not is_ragged(x) or x.dim() != dims or x.batch_dim != 0 or x.ragged_dim < 2:
        wanted = (
            "[B, C, T] ragged along 2"
            if dims == 3
            else "[B, C, T, F] ragged along 2, or [B, C, F, T] along 3"
        )
        raise DispatchError(
            f"{name_of(func)}: expected channels before the rows, {wanted}, got {shown(x)}",
            code="row-dims",
            hint="write x.transpose(1, 2) for rows [B, T, C]"
            + ("" if dims == 3 else ", x.unsqueeze(1) for [B, T, F]"),
        )


# ---- pools -----------------------------------------------------------------------------------------------------


@RULES.of(F.max_pool1d, torch.max_pool1d)
def _max_pool1d(  # noqa: PLR0913
    func: Any,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    size = _window(func, input, kernel_size, stride, padding, ceil_mode)
    stride, more = size[1], 2 * size[2] - _span(size[0], dilation)
    table = input.to_dense(fill=_lowest(input.dtype))
    options: tuple[Any, ...] = (*size, _one(dilation), False)
    if not return_indices:
        return _of_windows(input, torch.max_pool1d(table, *options), more, stride)
    results = F.max_pool1d_with_indices(table, *options)
    return tuple(_of_windows(input, t, more, stride) for t in results)


@RULES.of(F.max_pool1d_with_indices, torch.max_pool1d_with_indices)
def _max_pool1d_with_indices(func: Any, *args: Any, return_indices: bool = True, **kwargs: Any) -> Any:
    return _max_pool1d(F.max_pool1d, *args[:6], return_indices=True, **kwargs)


@RULES.of(F.avg_pool1d)
def _avg_pool1d(  # noqa: PLR0913
    func: Any,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:
    size = _window(func, input, kernel_size, stride, padding, ceil_mode)
    means = func(input.to_dense(), *size)
    if not count_include_pad:
        means = means / func(input.mask().unsqueeze(1).to(means.dtype), *size)
    return _of_windows(input, means, 2 * size[2] - size[0], size[1])


def _window(
    func: Any, x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool
) -> tuple[int, int, int]:
    """Returns the extent, the stride and the padding of a window."""
    _check_channels_first(func, x, 3)
    if ceil_mode:
        raise DispatchError(
            f"{name_of(func)}: a window past the end of a row, as with ceil_mode=True, is not supported for {shown(x)}",
            code="argument-refused",
            hint="pass ceil_mode=False, and padding if all entries are to count",
        )
    kernel = _one(kernel_size)
    return kernel, kernel if stride is None or stride == [] else _one(stride), _one(padding)


def _lowest(dtype: torch.dtype) -> float | int:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


# ---- pools of a given number of results ------------------------------------------------------------------------


@RULES.of(F.adaptive_avg_pool1d)
def _adaptive_avg_pool1d(func: Any, input: Any, output_size: Any) -> Tensor:
    inside = _parts_of_rows(func, input, _one(output_size)).to(input.dtype)
    sums = torch.matmul(input.to_dense(), inside.mT)
    return input.per_row(sums / inside.sum(-1).unsqueeze(1), 0)


@RULES.of(F.adaptive_max_pool1d, torch.adaptive_max_pool1d, F.adaptive_max_pool1d_with_indices)
def _adaptive_max_pool1d(func: Any, input: Any, output_size: Any, return_indices: bool = False) -> Any:
    inside = _parts_of_rows(func, input, _one(output_size))
    table, lowest = input.to_dense(), _lowest(input.dtype)
    maxima = [torch.where(part.unsqueeze(1), table, lowest).max(-1) for part in inside.unbind(1)]
    values, indices = (torch.stack([getattr(f, name) for f in maxima], -1) for name in ("values", "indices"))
    values, indices = input.per_row(values, 0), input.per_row(indices, 0)
    with_indices = return_indices or func is not F.adaptive_max_pool1d
    return (values, indices) if with_indices else values


def _parts_of_rows(func: Any, x: Any, count: int) -> Tensor:
    """Returns a mask ``[B, count, T]`` of the entries in each result, as PyTorch divides a single row.

    Raises:
        IndexError: a row is empty (on CUDA and in graphs by an asynchronous assertion).
    """
    _check_channels_first(func, x, 3)
    x.check_has_entries(func, [2])
    lengths = x.row_lengths().unsqueeze(1)
    number = torch.arange(count, device=lengths.device)
    first, last = number * lengths // count, -(-(number + 1) * lengths // count)
    positions = torch.arange(x.width, device=lengths.device)
    return (positions >= first.unsqueeze(2)) & (positions < last.unsqueeze(2))
