"""Checks of both layouts; each error has the expected value, the given value and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import in_backward
from subclasses._torch_tracing import is_compiling_here
from subclasses.errors import DispatchError, one_of

# How to construct a batch without rows.
_EMPTY = {
    "JaggedTensor": "JaggedTensor(values, torch.zeros(1, dtype=torch.int64)) with values of shape [0, ...]",
    "PaddedTensor": "PaddedTensor(padded, torch.zeros(0, dtype=torch.int64)) with a table of shape [0, T, ...]",
}

# The greatest bound of row lengths that may exceed the number of entries; no batch of rows is padded further.
GREATEST_BOUND = 1 << 20

# ---- parts -----------------------------------------------------------------------------------------------------


def is_traced(t: Tensor) -> bool:
    """Returns whether a graph is traced, where the data of a tensor is unknown."""
    return is_compiling_here() or type(t) is not Tensor


def check_rows(rows: Sequence[Any], name: str = "JaggedTensor", method: str = "from_tensors") -> None:
    """Raises unless ``rows`` are tensors that differ in their first extent alone."""
    if isinstance(rows, Tensor) or not all(isinstance(row, Tensor) for row in rows):
        kinds = type(rows).__name__ if isinstance(rows, Tensor) else [type(row).__name__ for row in rows]
        raise TypeError(f"{name}.{method}: expected a list of tensors, one for each row, got {kinds}")
    if not rows:
        raise ValueError(
            f"{name}.{method}: expected at least one row, for its dtype and shape; an empty batch is made from "
            f"its parts, {_EMPTY[name]}"
        )
    first = rows[0]
    for number, row in enumerate(rows):
        if row.dim() == 0:
            raise ValueError(
                f"{name}.{method}: a row has a length, so at least one dimension, and row {number} has none; "
                f"row.reshape(1) makes one of a number"
            )
        if row.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"{name}.{method}: rows may differ in their first extent only; row 0 has shape "
                f"{tuple(first.shape)} and row {number} {tuple(row.shape)}"
            )
        if row.dtype != first.dtype or row.device != first.device:
            raise ValueError(
                f"{name}.{method}: row 0 is {first.dtype} on {first.device} and row {number} {row.dtype} on "
                f"{row.device}; convert one of them"
            )


def check_mask(padded: Any, mask: Any, name: str = "JaggedTensor") -> None:
    """Raises unless ``mask [B, T]`` is a bool mask of the entries of ``padded [B, T, ...]``."""
    fits = isinstance(padded, Tensor) and isinstance(mask, Tensor) and mask.dim() == 2
    if not fits or mask.dtype != torch.bool or padded.shape[:2] != mask.shape:
        described = [f"{t.dtype} {tuple(t.shape)}" if isinstance(t, Tensor) else t for t in (padded, mask)]
        raise ValueError(
            f"{name}.from_mask: expected entries [B, T, ...] and a bool mask [B, T], True where one exists, "
            f"got {described[0]} and {described[1]}"
        )


def check_bound(name: str, bound: Any, longest: int, total: int) -> None:
    """Raises unless ``bound`` is an upper bound of the lengths of rows, and possible for rows of ``total`` entries."""
    most = max(total, GREATEST_BOUND)
    if not longest <= bound <= most:
        raise ValueError(
            f"{name}.max_length: expected from {longest}, the longest row, to {most} for {total} entries, got {bound}"
        )


def check_has_rows(x: Any, method: str) -> None:
    """Raises if the batch and the ragged dimension are merged."""
    if x.ragged_dim == 0:
        raise DispatchError(
            f"JaggedTensor.{method} needs rows, and this one has its batch and ragged dimensions merged",
            code="row-dims",
            hint="unmerge them by x.unflatten(0, (B, T))",
        )


def check_all_exist(x: Any, name: str) -> None:
    """Raises if a batch may have spare rows, which a function does not leave out."""
    if getattr(x, "count", None) is not None:
        raise DispatchError(
            f"{name}: expected rows that all exist, got a JaggedTensor with a count, whose spare rows would count",
            code="padding-counted",
            hint="JaggedTensor.from_tensors(x.to_tensors()) has the rows that exist",
        )


def check_reached(x: Any, least: int | Tensor, message: str) -> None:
    """Asserts that each row of the batch has at least ``least`` entries, an int or ``[B]``; asynchronous on a GPU."""
    reached, count = x.counts >= least, x.row_count
    if count is not None:
        reached = reached | (torch.arange(reached.shape[0], device=reached.device) >= count)
    torch.ops.aten._assert_async.msg(reached.all(), message)


# ---- autograd --------------------------------------------------------------------------------------------------


def is_recorded(*tensors: Any) -> bool:
    """Returns whether autograd records ops on these tensors."""
    wanted = any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    return wanted and torch.is_grad_enabled() and not in_backward()


def check_not_recorded(op: Any, x: Any) -> None:
    """Raises if the derivative of an op below autograd would count entries that do not exist.

    Rules above autograd never reach this check with a value that requires grad; derivatives may.
    """
    if is_recorded(x):
        raise DispatchError(
            f"{op}: reached from inside another op, whose gradient would count entries that {one_of(type(x))} does not "
            "have",
            code="padding-counted",
            hint="use x.sum(...), or decompose the op into ops that have rules",
        )
