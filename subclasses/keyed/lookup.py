"""Lookups of jagged ids in embedding tables: outside of a graph by PyTorch's own functions, in one by one op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses.errors import DispatchError
from subclasses.keyed.checks import is_traced
from subclasses.keyed.kernels import EACH, Entries, Lookups, Part, keyed_lookup, keyed_pool, parts_of
from subclasses.keyed.rows import beside
from subclasses.ragged import JaggedTensor
from subclasses.ragged.norms import kernels_of_bags

MODES = ("sum", "mean", "max")

# ---- a table ---------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """A table ``[V, D]`` and how it is looked up, as ``nn.Embedding`` and ``nn.EmbeddingBag`` have it."""

    weight: Tensor
    mode: str = "sum"
    padding: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    by_frequency: bool = False
    sparse: bool = False

    @classmethod
    def of(cls, module: nn.Embedding | nn.EmbeddingBag) -> Table:
        """The table of a module."""
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
    def place_of_padding(self) -> int:
        """The padding id counted from 0; -1 for none."""
        if self.padding is None:
            return -1
        return self.padding % self.weight.shape[0]


def _check_graph(tables: Sequence[Table]) -> None:
    """Raises for what a graph cannot do."""
    if any(t.max_norm is not None for t in tables):
        raise DispatchError(
            "embeddings with max_norm write to their table at each lookup, which a compiled function does not do for "
            "jagged ids; renormalise the table after the optimizer's step"
        )


def _lookups(tables: Sequence[Table], sparse: bool) -> Lookups:
    """What an op is told of the tables."""
    first: dict[int, int] = {}
    return Lookups(
        modes=[MODES.index(t.mode) for t in tables],
        paddings=[t.place_of_padding for t in tables],
        by_frequency=[t.by_frequency for t in tables],
        sparse=sparse,
        firsts=[first.setdefault(id(t.weight), k) for k, t in enumerate(tables)],
    )


# ---- pooled ----------------------------------------------------------------------------------------------------


def pool(
    tables: Sequence[Table], values: Tensor, offsets: Tensor, lengths: Tensor | None, weights: Tensor | None
) -> list[Tensor]:
    """The rows of each key looked up and pooled, ``[B, D]`` each; 0 for an empty row.

    Args:
        tables: one for each key.
        values: ``[total]``, ids.
        offsets: ``[K, B + 1]``, where each row begins.
        lengths: ``[K, B]``, for rows with gaps between them.
        weights: ``[total]``, factors of what is looked up (``mode="sum"`` alone).
    """
    if not is_traced(values):
        parts = parts_of(offsets, lengths)
        return [_pool_part(*pair, values, weights) for pair in zip(tables, parts, strict=True)]
    _check_graph(tables)
    found: list[Any] = [None] * len(tables)
    for sparse in (False, True):
        places = [k for k, t in enumerate(tables) if t.sparse is sparse]
        if places:
            chosen = [tables[k] for k in places]
            entries = Entries(values, offsets, lengths, weights)
            if len(places) < len(tables):
                entries = entries.of_keys(places)
            pooled, _, _ = keyed_pool([t.weight for t in chosen], *entries, *_lookups(chosen, sparse))
            for k, part in zip(places, pooled.split([t.weight.shape[1] for t in chosen], 1), strict=True):
                found[k] = part
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


# ---- entry by entry --------------------------------------------------------------------------------------------


def look_up(tables: Sequence[Table], values: Tensor, offsets: Tensor) -> Tensor:
    """``[total, D]``: each entry looked up in its key's table, all of one width; 0 for an entry of no key."""
    if is_traced(values):
        _check_graph(tables)
        how = _lookups(tables, tables[0].sparse)._replace(modes=[EACH] * len(tables))
        return keyed_lookup([t.weight for t in tables], *Entries(values, offsets), *how)
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


def _bag(  # noqa: PLR0913
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
    """``[B, T]`` ragged ids to ``[B, D]``, as a loop over the rows would give."""
    if not isinstance(input, JaggedTensor) or isinstance(weight, JaggedTensor):
        raise DispatchError("embedding_bag: expected ragged ids and a dense table")
    if input.dim() != 2 or input.ragged_dim != 1 or offsets is not None:
        raise DispatchError(
            f"embedding_bag: expected indices [B, T], each row of which is a bag, and no offsets, got a JaggedTensor "
            f"of size {tuple(input.shape)}"
        )
    if per_sample_weights is not None and mode != "sum":
        raise DispatchError(f"embedding_bag: per_sample_weights go with mode='sum', got mode={mode!r}")
    factors = None if per_sample_weights is None else beside(input, per_sample_weights).unwrap("values")
    table = Table(weight, mode, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    lengths = None if input.lengths is None else input.lengths.unsqueeze(0)
    return pool([table], input.values, input.offsets.unsqueeze(0), lengths, factors)[0]


kernels_of_bags[JaggedTensor] = _bag
