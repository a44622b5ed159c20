"""Lookups of jagged ids in embedding tables: PyTorch's own functions outside of a graph, a custom op in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses.errors import DispatchError
from subclasses.keyed.checks import is_traced
from subclasses.keyed.kernels import NO_POOLING, Entries, Lookups, Part, keyed_lookup, keyed_pool, parts_of
from subclasses.keyed.rows import check_weights
from subclasses.ragged import JaggedTensor
from subclasses.ragged.rules.normalization import kernels_of_bags

MODES = ("sum", "mean", "max")

# ---- a table ---------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """A table ``[V, D]`` and its lookup options, as in ``nn.Embedding`` and ``nn.EmbeddingBag``."""

    weight: Tensor
    mode: str = "sum"
    padding: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    by_frequency: bool = False
    sparse: bool = False

    @classmethod
    def of(cls, module: nn.Embedding | nn.EmbeddingBag) -> Table:
        """Returns the table of a module."""
        return cls(
            module.weight,
            getattr(module, "mode", "sum"),
            module.padding_idx,
            module.max_norm,
            module.norm_type,
            module.scale_grad_by_freq,
            module.sparse,
        )

    @property
    def padding_index(self) -> int:
        """The non-negative padding id; -1 for none."""
        if self.padding is None:
            return -1
        return self.padding % self.weight.shape[0]


def _check_graph(tables: Sequence[Table]) -> None:
    """Raises DispatchError for lookups that a graph cannot perform."""
    if any(t.max_norm is not None for t in tables):
        raise DispatchError(
            "embeddings with max_norm write to their table at each lookup, which a compiled function does not do for "
            "jagged ids; renormalise the table after the optimizer's step"
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
    """Whether the kernels that read offsets on the device take a lookup; others of CUDA wait for the device.

    A sparse gradient has as many rows as its key has entries, a frequency is a property of all of them, and these
    kernels add up gradients in any order.
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
        parts = parts_of(offsets, lengths)
        return [_pool_part(*pair, values, weights) for pair in zip(tables, parts, strict=True)]
    _check_graph(tables)
    found: list[Any] = [None] * len(tables)
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
                found[k] = part.clone()
    return found


def _pool_part(table: Table, part: Part, values: Tensor, weights: Tensor | None) -> Tensor:
    return F.embedding_bag(
        part.take(values),
        table.weight,
        part.starts,
        table.max_norm,
        table.norm_type,
        table.by_frequency,
        table.mode,
        table.sparse,
        None if weights is None else part.take(weights),
        False,
        table.padding,
    )


# ---- without pooling -------------------------------------------------------------------------------------------


def look_up(tables: Sequence[Table], values: Tensor, offsets: Tensor) -> Tensor:
    """Looks up each entry in its key's table; returns ``[total, D]``, 0 for entries of no key. All widths are equal."""
    if is_traced(values):
        _check_graph(tables)
        lookups = _make_lookups(tables, tables[0].sparse)._replace(modes=[NO_POOLING] * len(tables))
        op = _lookup_op(values, tables)
        return op([t.weight for t in tables], *Entries(values, offsets), *lookups)
    weight, end, found = tables[0].weight, 0, []
    ends = offsets[:, [0, -1]].tolist()
    for (start, stop), table in sorted(zip(ends, tables, strict=True), key=lambda pair: pair[0]):
        found.append(weight.new_zeros(start - end, weight.shape[1]))
        found.append(
            F.embedding(
                values[start:stop],
                table.weight,
                table.padding,
                table.max_norm,
                table.norm_type,
                table.by_frequency,
                table.sparse,
            )
        )
        end = stop
    found.append(weight.new_zeros(values.shape[0] - end, weight.shape[1]))
    return torch.cat(found)


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
    if not isinstance(input, JaggedTensor) or isinstance(weight, JaggedTensor):
        raise DispatchError("embedding_bag: expected ragged ids and a dense table")
    if input.dim() != 2 or input.ragged_dim != 1 or offsets is not None:
        raise DispatchError(
            f"embedding_bag: expected indices [B, T], each row of which is a bag, and no offsets, got a JaggedTensor "
            f"of size {tuple(input.shape)}"
        )
    if per_sample_weights is not None and mode != "sum":
        raise DispatchError(f"embedding_bag: per_sample_weights go with mode='sum', got mode={mode!r}")
    factors = (
        None if per_sample_weights is None else check_weights(input, per_sample_weights).unwrap("values")
    )
    table = Table(weight, mode, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    lengths = None if input.lengths is None else input.lengths.unsqueeze(0)
    return pool([table], input._raw_values, input.offsets.unsqueeze(0), lengths, factors)[0]


kernels_of_bags[JaggedTensor] = _embedding_bag
