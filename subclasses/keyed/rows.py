"""The rows of each key: computing, joining and comparing offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import one_of
from subclasses.keyed import checks
from subclasses.ragged import JaggedTensor
from subclasses.ragged.checks import check_all_exist

# ---- offsets ---------------------------------------------------------------------------------------------------


def offsets_of(lengths: Tensor) -> Tensor:
    """Converts lengths ``[K, B]`` to offsets ``[K, B + 1]`` of adjacent rows."""
    ends = lengths.cumsum(1)
    totals = lengths.sum(1)
    starts = totals.cumsum(0) - totals
    return torch.cat([lengths.new_zeros(lengths.shape[0], 1), ends], 1) + starts.unsqueeze(1)


def start_indices(counts: list[Any]) -> list[Any]:
    """Returns the start of each of several adjacent parts, from their counts."""
    return [sum(counts[:i]) for i in range(len(counts))]


# ---- rows of a feature -----------------------------------------------------------------------------------------


def feature_rows(values: Tensor, offsets: Tensor, max_length: int) -> JaggedTensor:
    """Returns the rows of one key, ``[B, T, ...]``, which share the values of all keys."""
    return JaggedTensor(values, offsets, lengths=offsets.diff(), max_length=max_length)


def packed_rows(x: JaggedTensor) -> tuple[Tensor, Tensor]:
    """Returns the values and offsets of a feature whose rows have no gaps, without the entries around them.

    In a graph no data is read: all values are returned, and the graph asserts at run time that there are no gaps.

    Raises:
        ValueError: there are gaps between the rows.
    """
    check_all_exist(x, "KeyedJaggedTensor.from_jagged")
    values, offsets = x.unwrap("values"), x.offsets
    if x.lengths is None:
        return values, offsets
    if checks.is_traced(x._raw_values):
        _assert_in_graph(
            x.lengths == offsets.diff(), "from_jagged: expected rows back to back, got gaps between them"
        )
        return values, offsets
    if not x.lengths.equal(offsets.diff()):
        raise ValueError(
            "KeyedJaggedTensor.from_jagged: expected rows back to back, got some with gaps between them; give "
            "JaggedTensor.from_tensors(x.to_tensors())"
        )
    first, last = offsets[[0, -1]].tolist()
    return values[first:last], offsets - first


def packed_weights(
    features: Mapping[str, JaggedTensor], weights: Mapping[str, JaggedTensor]
) -> list[tuple[Tensor, Tensor]]:
    """Returns the weights of each key in the same way as its values."""
    checks.check_features(weights, "from_jagged(weights=)")
    if list(weights) != list(features):
        raise ValueError(
            f"KeyedJaggedTensor.from_jagged: expected weights for {list(features)}, got {list(weights)}"
        )
    return [packed_rows(check_weights(features[k], weights[k])) for k in features]


def check_weights(x: JaggedTensor, weights: Any) -> JaggedTensor:
    """Returns the weights of a feature's entries after checking them.

    Raises:
        ValueError: the weights do not have their rows at the offsets of the feature's rows.
    """
    if not isinstance(weights, JaggedTensor) or weights.dim() != 2 or weights.ragged_dim != 1:
        shown = f"{one_of(type(weights))} of size {tuple(weights.shape)}"
    elif weights._raw_values.shape[0] != x._raw_values.shape[0] or not _same_rows(x, weights):
        shown = "rows of other lengths, or that lie elsewhere"
    else:
        return weights
    raise ValueError(
        f"expected one weight for each entry as a JaggedTensor with the rows of the feature of size {tuple(x.shape)}, "
        f"got {shown}. Make it by feature.with_values(weights)"
    )


def _same_rows(x: JaggedTensor, y: JaggedTensor) -> bool:
    """Whether two tensors have rows at the same offsets; a graph asserts it at run time."""
    if y.offsets is x.offsets and y.lengths is x.lengths:
        return True
    if y.offsets.shape != x.offsets.shape:
        return False
    if checks.is_traced(x._raw_values):
        lengths = torch.cat([y.offsets[:-1] == x.offsets[:-1], y.row_lengths() == x.row_lengths()])
        _assert_in_graph(lengths, "weights: rows of other lengths than the feature's, or that lie elsewhere")
        return True
    return y.offsets.equal(x.offsets) and y.row_lengths().equal(x.row_lengths())


def _assert_in_graph(condition: Tensor, message: str) -> None:
    torch.ops.aten._assert_async.msg(condition.all(), f"KeyedJaggedTensor.{message}")
