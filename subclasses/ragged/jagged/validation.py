"""Checks of the parts of a ``JaggedTensor``; each error has the expected value, the given value and a remedy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import one_of
from subclasses.ragged.checks import check_bound, is_traced
from subclasses.spec.load_checks import check_unwrapped, has_data

# ---- shapes ----------------------------------------------------------------------------------------------------


def check_parts(values: Any, offsets: Any, lengths: Any, count: Any, ragged_dim: Any) -> None:
    """Raises unless the shapes of the parts of a jagged tensor match; the constructor checks types and dtypes later."""
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
    if isinstance(count, Tensor) and count.dim():
        raise ValueError(
            f"JaggedTensor.count: expected one number of shape [], how many rows exist, got {tuple(count.shape)}"
        )


def check_given_bound(values: Any, max_length: int, ragged_dim: int) -> None:
    """Raises unless rows of these values can have the outer extent that a caller passes."""
    if isinstance(values, Tensor) and not is_traced(values):
        check_bound("JaggedTensor", max_length, 0, values.shape[max(ragged_dim - 1, 0)])


def check_lengths(values: Tensor, lengths: Tensor) -> None:
    """Raises unless ``lengths`` are lengths of rows that fill ``values``."""
    if lengths.dim() != 1:
        raise ValueError(
            f"JaggedTensor.from_lengths: expected lengths of shape [B], one for each row, got {tuple(lengths.shape)}"
        )
    if is_traced(lengths):
        return
    row_lengths = lengths.tolist()
    if any(n < 0 for n in row_lengths):
        raise ValueError(
            f"JaggedTensor.from_lengths: expected one length of at least 0 for each row, got {row_lengths}"
        )
    if sum(row_lengths) != values.shape[0]:
        raise ValueError(
            f"JaggedTensor.from_lengths: the lengths add up to {sum(row_lengths)}, and values have {values.shape[0]} "
            "entries"
        )


def check_padded(padded: Tensor, lengths: Tensor) -> None:
    """Raises unless ``lengths`` are lengths of rows of ``padded``."""
    if padded.dim() < 2 or lengths.shape != padded.shape[:1]:
        raise ValueError(
            f"JaggedTensor.from_padded: expected a padded tensor [B, T, ...] and lengths [B], got "
            f"{tuple(padded.shape)} and {tuple(lengths.shape)}"
        )
    if is_traced(lengths):
        fits = ((lengths >= 0) & (lengths <= padded.shape[1])).all()
        torch.ops.aten._assert_async.msg(
            fits, "JaggedTensor.from_padded: a length is negative, or beyond the extent"
        )
        return
    row_lengths = lengths.tolist()
    if any(not 0 <= n <= padded.shape[1] for n in row_lengths):
        raise ValueError(
            f"JaggedTensor.from_padded: expected lengths from 0 to {padded.shape[1]}, the padded extent, got "
            f"{row_lengths}"
        )


def check_nested(nested: Any) -> None:
    """Raises unless ``nested`` is a nested tensor of jagged layout."""
    if not (isinstance(nested, Tensor) and nested.is_nested and nested.layout is torch.jagged):
        raise TypeError(
            f"JaggedTensor.from_nested: expected a torch.nested tensor with layout=torch.jagged, got a "
            f"{type(nested).__name__}"
        )


def check_like(x: Any, dense: Any) -> None:
    """Raises unless ``dense`` has the outer size of a ragged tensor and is dense."""
    if isinstance(dense, type(x)) or tuple(dense.shape) != tuple(x.shape):
        raise ValueError(
            f"JaggedTensor.like_dense: expected a dense tensor of size {tuple(x.shape)}, got {one_of(type(dense))} "
            f"of size {tuple(dense.shape)}"
        )


# ---- data ------------------------------------------------------------------------------------------------------


def longest_row(values: Any, offsets: Any, lengths: Any, count: Any, ragged_dim: int) -> int:
    """Returns the length of the longest row; reads the data, and checks it."""
    if not isinstance(values, Tensor) or not isinstance(offsets, Tensor) or offsets.is_floating_point():
        return 0  # the constructor raises, and names the field
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
    if isinstance(count, Tensor) and not 0 <= int(count) <= len(spans):
        raise ValueError(f"JaggedTensor.count: expected from 0 to {len(spans)} rows, got {int(count)}")
    if lengths is None:
        if starts[0] != 0 or starts[-1] != total:
            raise ValueError(
                f"JaggedTensor.offsets: without lengths the rows fill values, so offsets go from 0 to {total}; got "
                f"{starts}. Give lengths if some entries belong to no row"
            )
        return max(spans, default=0)
    row_lengths = lengths.tolist()
    if any(not 0 <= n <= span for n, span in zip(row_lengths, spans, strict=True)):
        raise ValueError(
            f"JaggedTensor.lengths: expected from 0 up to the differences of the offsets, {spans}, got {row_lengths}"
        )
    return max(row_lengths, default=0)


# ---- files -----------------------------------------------------------------------------------------------------


def check_loaded(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    count: Tensor | None,
    ragged_dim: Any,
    max_length: Any,
) -> None:
    """Raises unless the parts of a jagged tensor describe rows, and the outer extent fits the longest row.

    The constructor raises for wrong dtypes, and for an outer extent that is not an int, and names the field.
    """
    check_parts(values, offsets, lengths, count, ragged_dim)
    parts = [("offsets", offsets), ("lengths", lengths), ("count", count)]
    given = [(field, t) for field, t in parts if t is not None]
    for field, t in given:
        check_unwrapped("JaggedTensor", field, t)
    if type(max_length) is not int or not all(t.dtype is torch.int64 and has_data(t) for _, t in given):
        return
    longest = longest_row(values, offsets, lengths, count, ragged_dim)
    check_bound("JaggedTensor", max_length, longest, values.shape[max(ragged_dim - 1, 0)])
