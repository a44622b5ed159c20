"""Tables, and lookups in them by PyTorch's own functions, outside of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses.keyed.kernels import Part, parts_of

# The reason that a lookup with max_norm is not part of a graph.
WRITES_TO_TABLES = (
    "each lookup writes to it, which a graph of jagged ids does not contain. Make it without max_norm and "
    "renormalise its rows after the optimizer's step, or call it outside of the compiled function"
)

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


# ---- lookups ---------------------------------------------------------------------------------------------------


def pool_parts(
    tables: Sequence[Table], values: Tensor, offsets: Tensor, lengths: Tensor | None, weights: Tensor | None
) -> list[Tensor]:
    """Looks up and pools by PyTorch's own function, key by key; reads the offsets."""
    parts = parts_of(offsets, lengths)
    return [_pool_part(*pair, values, weights) for pair in zip(tables, parts, strict=True)]


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


def look_up_parts(tables: Sequence[Table], values: Tensor, offsets: Tensor) -> Tensor:
    """Looks up by PyTorch's own function, key by key; reads the offsets."""
    weight, end, parts = tables[0].weight, 0, []
    ends = offsets[:, [0, -1]].tolist()
    for (start, stop), table in sorted(zip(ends, tables, strict=True), key=lambda pair: pair[0]):
        parts.append(weight.new_zeros(start - end, weight.shape[1]))
        parts.append(
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
    parts.append(weight.new_zeros(values.shape[0] - end, weight.shape[1]))
    return torch.cat(parts)
