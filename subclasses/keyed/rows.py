"""Where the rows of each key lie: offsets made, joined and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import mark_dim_dynamic
from subclasses.keyed import checks
from subclasses.ragged import JaggedTensor

# ---- offsets ---------------------------------------------------------------------------------------------------


def offsets_of(lengths: Tensor) -> Tensor:
    """``[K, B]`` lengths to ``[K, B + 1]`` offsets of rows that lie back to back."""
    ends = lengths.cumsum(1)
    totals = lengths.sum(1)
    starts = totals.cumsum(0) - totals
    return torch.cat([lengths.new_zeros(lengths.shape[0], 1), ends], 1) + starts.unsqueeze(1)


def running(counts: list[Any]) -> list[Any]:
    """Where each of so many parts begins."""
    return [sum(counts[:i]) for i in range(len(counts))]


def mark_dynamic(x: Any) -> Any:
    """Tells compilers that the number of entries and of rows, and the longest row, will change."""
    if not checks.is_traced(x.values):
        mark_dim_dynamic(x.offsets, 1)
        for per_entry in (x.values, x.weights):
            if per_entry is not None:
                mark_dim_dynamic(per_entry)
        mark_dim_dynamic(x, 1)
        mark_dim_dynamic(x, 2)
    return x


# ---- rows of a feature -----------------------------------------------------------------------------------------


def window(values: Tensor, offsets: Tensor, max_length: int) -> JaggedTensor:
    """The rows of one key, ``[B, T, ...]``, which share the values of all."""
    return JaggedTensor(values, offsets, lengths=offsets.diff(), max_length=max_length)


def taken(x: JaggedTensor) -> tuple[Tensor, Tensor]:
    """Values and offsets of a feature with no gap between its rows; what lies around them is left out.

    While a graph is traced nothing is read: all values are taken, and that rows have no gaps is checked as it runs.
    """
    values, offsets = x.unwrap("values"), x.offsets
    if x.lengths is None:
        return values, offsets
    if checks.is_traced(x.values):
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


def taken_weights(
    features: Mapping[str, JaggedTensor], weights: Mapping[str, JaggedTensor]
) -> list[tuple[Tensor, Tensor]]:
    """The weights of each key, laid out as its values."""
    checks.check_features(weights, "from_jagged(weights=)")
    if list(weights) != list(features):
        raise ValueError(
            f"KeyedJaggedTensor.from_jagged: expected weights for {list(features)}, got {list(weights)}"
        )
    return [taken(beside(features[k], weights[k])) for k in features]


def beside(x: JaggedTensor, weights: Any) -> JaggedTensor:
    """Weights for the entries of a feature.

    Raises:
        ValueError: their rows do not lie as those of the feature do.
    """
    if not isinstance(weights, JaggedTensor) or weights.dim() != 2 or weights.ragged_dim != 1:
        shown = f"a {type(weights).__name__} of size {tuple(weights.shape)}"
    elif weights.values.shape[0] != x.values.shape[0] or not _lie_alike(x, weights):
        shown = "rows of other lengths, or that lie elsewhere"
    else:
        return weights
    raise ValueError(
        f"expected one weight for each entry as a JaggedTensor with the rows of the feature of size {tuple(x.shape)}, "
        f"got {shown}; make it by feature.with_values(weights)"
    )


def _lie_alike(x: JaggedTensor, y: JaggedTensor) -> bool:
    """Whether rows lie alike; a graph checks it as it runs."""
    if y.offsets is x.offsets and y.lengths is x.lengths:
        return True
    if y.offsets.shape != x.offsets.shape:
        return False
    if checks.is_traced(x.values):
        lengths = torch.cat([y.offsets[:-1] == x.offsets[:-1], y.row_lengths() == x.row_lengths()])
        _assert_in_graph(lengths, "weights: rows of other lengths than the feature's, or that lie elsewhere")
        return True
    return y.offsets.equal(x.offsets) and y.row_lengths().equal(x.row_lengths())


def _assert_in_graph(found: Tensor, message: str) -> None:
    torch.ops.aten._assert_async.msg(found.all(), f"KeyedJaggedTensor.{message}")
