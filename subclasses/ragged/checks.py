"""What is asked of the parts of a ragged tensor, each with an error that says what came and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import in_backward
from subclasses.errors import DispatchError

# How a batch without rows is made.
_EMPTY = {
    "JaggedTensor": "JaggedTensor(values, torch.zeros(1, dtype=torch.int64)) with values of shape [0, ...]",
    "PaddedTensor": "PaddedTensor(padded, torch.zeros(0, dtype=torch.int64)) with a table of shape [0, T, ...]",
}

# ---- shapes ----------------------------------------------------------------------------------------------------


def check_parts(values: Any, offsets: Any, lengths: Any, ragged_dim: Any) -> None:
    """Raises unless the parts of a jagged tensor fit together by their shapes; types and dtypes come later."""
    if isinstance(values, Tensor) and values.dim() == 0:
        raise ValueError("JaggedTensor.values: expected at least one dimension, the entries, got a scalar")
    if isinstance(values, Tensor) and (type(ragged_dim) is not int or not 0 <= ragged_dim <= values.dim()):
        raise ValueError(
            f"JaggedTensor.ragged_dim: expected an int from 0 to {values.dim()} for values of shape "
            f"{tuple(values.shape)}, got {ragged_dim!r}"
        )
    if isinstance(offsets, Tensor) and (offsets.dim() != 1 or offsets.shape[0] == 0):
        raise ValueError(
            f"JaggedTensor.offsets: expected shape [B + 1], with a 0 first, got {tuple(offsets.shape)}"
        )
    if isinstance(lengths, Tensor) and (lengths.dim() != 1 or lengths.shape[0] != offsets.shape[0] - 1):
        raise ValueError(
            f"JaggedTensor.lengths: expected shape [{offsets.shape[0] - 1}], one for each row of the offsets, got "
            f"{tuple(lengths.shape)}"
        )


def is_traced(t: Tensor) -> bool:
    """Whether a graph is made, so that nobody knows what a tensor holds."""
    return torch.compiler.is_compiling() or type(t) is not Tensor


def check_rows(rows: Sequence[Any], name: str = "JaggedTensor") -> None:
    """Raises unless these are tensors that differ in their first extent alone."""
    if isinstance(rows, Tensor) or not all(isinstance(row, Tensor) for row in rows):
        kinds = type(rows).__name__ if isinstance(rows, Tensor) else [type(row).__name__ for row in rows]
        raise TypeError(f"{name}.from_tensors: expected a list of tensors, one for each row, got {kinds}")
    if not rows:
        raise ValueError(
            f"{name}.from_tensors: expected at least one row, for its dtype and shape; an empty batch is made from "
            f"its parts, {_EMPTY[name]}"
        )
    first = rows[0]
    for number, row in enumerate(rows):
        if row.dim() == 0:
            raise ValueError(
                f"{name}.from_tensors: a row has a length, so at least one dimension, and row {number} has none; "
                f"row.reshape(1) makes one of a number"
            )
        if row.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"{name}.from_tensors: rows may differ in their first extent only; row 0 has shape "
                f"{tuple(first.shape)} and row {number} {tuple(row.shape)}"
            )
        if row.dtype != first.dtype or row.device != first.device:
            raise ValueError(
                f"{name}.from_tensors: row 0 is {first.dtype} on {first.device} and row {number} {row.dtype} on "
                f"{row.device}; convert one of them"
            )


def check_lengths(values: Tensor, lengths: Tensor) -> None:
    """Raises unless lengths are those of rows that fill ``values``."""
    if lengths.dim() != 1:
        raise ValueError(
            f"JaggedTensor.from_lengths: expected lengths of shape [B], one for each row, got {tuple(lengths.shape)}"
        )
    if is_traced(lengths):
        return
    found = lengths.tolist()
    if any(n < 0 for n in found):
        raise ValueError(
            f"JaggedTensor.from_lengths: expected one length of at least 0 for each row, got {found}"
        )
    if sum(found) != values.shape[0]:
        raise ValueError(
            f"JaggedTensor.from_lengths: the lengths add up to {sum(found)}, and values have {values.shape[0]} entries"
        )


def check_padded(padded: Tensor, lengths: Tensor) -> None:
    """Raises unless lengths are those of rows of ``padded``."""
    if padded.dim() < 2 or lengths.shape != padded.shape[:1]:
        raise ValueError(
            f"JaggedTensor.from_padded: expected a padded tensor [B, T, ...] and lengths [B], got "
            f"{tuple(padded.shape)} and {tuple(lengths.shape)}"
        )
    if is_traced(lengths):
        return
    found = lengths.tolist()
    if any(not 0 <= n <= padded.shape[1] for n in found):
        raise ValueError(
            f"JaggedTensor.from_padded: expected lengths from 0 to {padded.shape[1]}, the padded extent, got {found}"
        )


def check_mask(padded: Any, mask: Any, name: str = "JaggedTensor") -> None:
    """Raises unless ``mask [B, T]`` says which entries of ``padded [B, T, ...]`` exist."""
    fits = isinstance(padded, Tensor) and isinstance(mask, Tensor) and mask.dim() == 2
    if not fits or mask.dtype != torch.bool or padded.shape[:2] != mask.shape:
        found = [f"{t.dtype} {tuple(t.shape)}" if isinstance(t, Tensor) else t for t in (padded, mask)]
        raise ValueError(
            f"{name}.from_mask: expected entries [B, T, ...] and a bool mask [B, T], True where one exists, "
            f"got {found[0]} and {found[1]}"
        )
    if name == "JaggedTensor" and is_traced(mask):
        raise ValueError(
            "JaggedTensor.from_mask: in a compiled function nobody knows how many entries exist; use "
            "from_padded(padded, lengths) for rows that begin at 0"
        )


def check_nested(nested: Any) -> None:
    """Raises unless ``nested`` is a nested tensor of jagged layout."""
    if not (isinstance(nested, Tensor) and nested.is_nested and nested.layout is torch.jagged):
        raise TypeError(
            f"JaggedTensor.from_nested: expected a torch.nested tensor with layout=torch.jagged, got a "
            f"{type(nested).__name__}"
        )


def check_has_rows(x: Any, method: str) -> None:
    """Raises for merged dimensions, where rows are no dimension of their own."""
    if x.ragged_dim == 0:
        raise DispatchError(
            f"JaggedTensor.{method} needs rows, and this one has its batch and ragged dimensions merged; unmerge them "
            f"by x.unflatten(0, (B, T))"
        )


def check_like(x: Any, dense: Any) -> None:
    """Raises unless ``dense`` has the outer size of a ragged tensor and is dense."""
    if isinstance(dense, type(x)) or tuple(dense.shape) != tuple(x.shape):
        raise ValueError(
            f"JaggedTensor.like_dense: expected a dense tensor of size {tuple(x.shape)}, got a {type(dense).__name__} "
            f"of size {tuple(dense.shape)}"
        )


def is_recorded(*tensors: Any) -> bool:
    """Whether autograd records what is done to these."""
    wanted = any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    return wanted and torch.is_grad_enabled() and not in_backward()


def check_not_recorded(op: Any, x: Any) -> None:
    """Raises where an op below autograd has a derivative that would count what does not exist.

    Rules above autograd never come here with a value that requires grad, and derivatives may.
    """
    if is_recorded(x):
        raise DispatchError(
            f"{op}: reached from inside another op, whose gradient would count entries that a {type(x).__name__} does "
            f"not have; use x.sum(...), or take the op apart into ones that have rules"
        )


# ---- data ------------------------------------------------------------------------------------------------------


def longest_row(values: Any, offsets: Any, lengths: Any, ragged_dim: int) -> int:
    """The length of the longest row; reads the data, and checks it on the way."""
    if not isinstance(values, Tensor) or not isinstance(offsets, Tensor) or offsets.is_floating_point():
        return 0  # refused by the constructor, which names the field
    if is_traced(offsets):
        raise ValueError(
            "JaggedTensor: in a compiled function the longest row is not known; give max_length, such as x.shape[1]"
        )
    starts, total = offsets.tolist(), values.shape[max(ragged_dim - 1, 0)]
    spans = [end - start for start, end in pairwise(starts)]
    if starts[0] < 0 or starts[-1] > total or min(spans, default=0) < 0:
        raise ValueError(
            f"JaggedTensor.offsets: expected increasing offsets from 0 to at most {total}, the number of entries in "
            f"values, got {starts}"
        )
    if lengths is None:
        if starts[0] != 0 or starts[-1] != total:
            raise ValueError(
                f"JaggedTensor.offsets: without lengths the rows fill values, so offsets go from 0 to {total}; got "
                f"{starts}. Give lengths if some entries belong to no row"
            )
        return max(spans, default=0)
    found = lengths.tolist()
    if any(not 0 <= n <= span for n, span in zip(found, spans, strict=True)):
        raise ValueError(
            f"JaggedTensor.lengths: expected from 0 up to what lies between the offsets, {spans}, got {found}"
        )
    return max(found, default=0)
