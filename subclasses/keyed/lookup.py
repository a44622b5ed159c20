"""Lookups of jagged ids in embedding tables: PyTorch's own functions outside of a graph, a custom op in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.keyed.checks import is_traced
from subclasses.keyed.kernels import NO_POOLING, Entries, Lookups, keyed_lookup, keyed_pool
from subclasses.keyed.rows import check_weights
from subclasses.keyed.tables import WRITES_TO_TABLES, Table, look_up_parts, pool_parts
from subclasses.ragged import JaggedTensor
from subclasses.ragged.base import shown
from subclasses.ragged.rules.normalization import kernels_of_bags

MODES = ("sum", "mean", "max")

# ---- in a graph ----------------------------------------------------------------------------------------------


def _has_max_norm(tables: Sequence[Table]) -> bool:
    return any(t.max_norm is not None for t in tables)


def _check_graph(tables: Sequence[Table]) -> None:
    """Raises DispatchError for lookups that a graph cannot perform; Dynamo breaks the graph at them instead."""
    for t in tables:
        if t.max_norm is not None:
            raise DispatchError(
                f"a table of shape {tuple(t.weight.shape)} with max_norm={t.max_norm}: {WRITES_TO_TABLES}",
                code="graph-refused",
            )


def _make_lookups(tables: Sequence[Table], sparse: bool) -> Lookups:
    """Returns the lookup options of tables as arguments of a custom op."""
    first: dict[int, int] = {}
    return Lookups(
        modes=[MODES.index(t.mode) for t in tables],
        paddings=[t.padding_index for t in tables],
        by_frequency=[t.by_frequency for t in tables],
        sparse=sparse,
        firsts=[first.setdefault(id(t.weight), k) for k, t in enumerate(tables)],
    )


def _is_for_cuda(values: Tensor, tables: Sequence[Table]) -> bool:
    """Whether the kernels that read offsets on the device compute a lookup; other CUDA kernels wait for the device.

    The number of rows of a sparse gradient, and the frequency of an id, depend on all entries of a key. And these
    kernels add up gradients in any order, which is not deterministic.
    """
    if (
        values.device.type != "cuda"
        or torch.version.cuda is None
        or torch.are_deterministic_algorithms_enabled()
    ):
        return False
    return not any(t.sparse or t.by_frequency for t in tables)


def _pool_op(values: Tensor, tables: Sequence[Table]) -> Any:
    """Returns the op that looks up and pools the entries of each key."""
    if not _is_for_cuda(values, tables):
        return keyed_pool
    from subclasses.keyed.cuda_ops import keyed_pool_cuda  # needs Triton

    return keyed_pool_cuda


def _lookup_op(values: Tensor, tables: Sequence[Table]) -> Any:
    """Returns the op that looks up each entry."""
    if not _is_for_cuda(values, tables):
        return keyed_lookup
    from subclasses.keyed.cuda_ops import keyed_lookup_cuda  # needs Triton

    return keyed_lookup_cuda


# ---- pooled ----------------------------------------------------------------------------------------------------


def pool(
    tables: Sequence[Table], values: Tensor, offsets: Tensor, lengths: Tensor | None, weights: Tensor | None
) -> list[Tensor]:
    """Looks up and pools the rows of each key; returns ``[B, D]`` for each, 0 for an empty row.

    Args:
        tables: one for each key.
        values: ``[total]``, ids.
        offsets: ``[K, B + 1]``, the start of each row and the end of the last one.
        lengths: ``[K, B]``, for rows with gaps between them.
        weights: ``[total]``, a factor for each looked-up entry; only for ``mode="sum"``.
    """
    if not is_traced(values):
        return pool_parts(tables, values, offsets, lengths, weights)
    if _has_max_norm(tables) and torch.compiler.is_dynamo_compiling():
        from subclasses.keyed.outside_graphs import pool_outside  # imports Dynamo

        return pool_outside(tables, values, offsets, lengths, weights)
    _check_graph(tables)
    results: list[Any] = [None] * len(tables)
    for sparse in (False, True):
        indices = [k for k, t in enumerate(tables) if t.sparse is sparse]
        if indices:
            chosen = [tables[k] for k in indices]
            entries = Entries(values, offsets, lengths, weights)
            if len(indices) < len(tables):
                entries = entries.select_keys(indices)
            op = _pool_op(values, chosen)
            pooled, _, _ = op([t.weight for t in chosen], *entries, *_make_lookups(chosen, sparse))
            for k, part in zip(indices, pooled.split([t.weight.shape[1] for t in chosen], 1), strict=True):
                # A copy: autograd of a view of the op's result would fill and add up all of it, once for each key.
                results[k] = part.clone()
    return results


# ---- without pooling -------------------------------------------------------------------------------------------


def look_up(tables: Sequence[Table], values: Tensor, offsets: Tensor) -> Tensor:
    """Looks up each entry in its key's table; returns ``[total, D]``, 0 for entries of no key. All widths are equal."""
    if not is_traced(values):
        return look_up_parts(tables, values, offsets)
    if _has_max_norm(tables) and torch.compiler.is_dynamo_compiling():
        from subclasses.keyed.outside_graphs import look_up_outside  # imports Dynamo

        return look_up_outside(tables, values, offsets)
    _check_graph(tables)
    lookups = _make_lookups(tables, tables[0].sparse)._replace(modes=[NO_POOLING] * len(tables))
    op = _lookup_op(values, tables)
    return op([t.weight for t in tables], *Entries(values, offsets), *lookups)


# ---- nn.EmbeddingBag of a feature ------------------------------------------------------------------------------


def _embedding_bag(  # noqa: PLR0913
    func: Any,
    input: Any,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Implements ``embedding_bag`` of ragged ids ``[B, T]``: returns ``[B, D]``, as a loop over the rows would."""
    if isinstance(weight, JaggedTensor):
        raise DispatchError(
            f"embedding_bag: weight: expected a dense table [V, D], got {shown(weight)}",
            code="argument-refused",
        )
    if not isinstance(input, JaggedTensor):
        raise DispatchError(
            f"embedding_bag: input: expected a JaggedTensor of ids beside {shown(per_sample_weights)} as "
            f"per_sample_weights, got {shown(input)}",
            code="rows-apart",
            hint="give both as JaggedTensors with the same rows, or both dense",
        )
    if input.dim() != 2 or input.ragged_dim != 1 or offsets is not None:
        raise DispatchError(
            "embedding_bag: expected indices [B, T], each row of which is a bag, and no offsets, got "
            f"{shown(input)}{'' if offsets is None else f' and offsets {shown(offsets)}'}",
            code="argument-refused",
        )
    if per_sample_weights is not None and mode != "sum":
        raise DispatchError(
            f"embedding_bag: per_sample_weights go with mode='sum', got mode={mode!r}",
            code="argument-refused",
        )
    factors = (
        None if per_sample_weights is None else check_weights(input, per_sample_weights).unwrap("values")
    )
    table = Table(weight, mode, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    lengths = None if input.lengths is None else input.lengths.unsqueeze(0)
    return pool([table], input._raw_values, input.offsets.unsqueeze(0), lengths, factors)[0]


kernels_of_bags[JaggedTensor] = _embedding_bag
