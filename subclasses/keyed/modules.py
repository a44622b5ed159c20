"""Modules that look up each key of a batch in its own embedding table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from subclasses.keyed.lookup import look_up, pool
from subclasses.keyed.rows import feature_rows
from subclasses.keyed.tables import Table
from subclasses.keyed.tensor import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor


class Tables(nn.ModuleDict):
    """A module dict that accepts any key, also attribute names of a module such as ``items`` and ``type``."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds a table under any name."""
        self._modules[name] = module  # type: ignore[assignment]


class _Collection(nn.Module):
    """Base of collections of tables by key; several keys may use one module."""

    kind: type

    def __init__(self, tables: Mapping[str, Any]) -> None:
        super().__init__()
        name = type(self).__name__
        for key, table in tables.items():
            if not isinstance(key, str) or not key or "." in key or key in vars(self):
                raise ValueError(
                    f"{name}: expected keys that can name a module, such as 'films', got {key!r}"
                )
            if not isinstance(table, self.kind):
                raise TypeError(
                    f"{name}: expected an nn.{self.kind.__name__} for {key!r}, got {type(table).__name__}"
                )
        if not tables:
            raise ValueError(f"{name}: expected a table for at least one key, got none")
        self.tables = Tables(tables)

    def _find_tables(self, ids: KeyedJaggedTensor) -> list[Table]:
        """Returns the tables in the order of the keys of a batch; raises if one is missing or the batch has no ids."""
        check_ids(type(self).__name__, ids, self.tables)
        return [Table.of(self.tables[key]) for key in ids.keys]  # type: ignore[arg-type]


def check_ids(name: str, ids: Any, tables: nn.ModuleDict) -> None:
    """Raises unless a batch holds ids by key, and there is a table for each key."""
    if not isinstance(ids, KeyedJaggedTensor):
        raise TypeError(f"{name}: expected a KeyedJaggedTensor, got {type(ids).__name__}")
    if ids.dim() != 3 or ids._raw_values.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{name}: expected ids, integers [total], got {ids._raw_values.dtype}{list(ids._raw_values.shape)}"
        )
    missing = [key for key in ids.keys if key not in tables]
    if missing:
        raise KeyError(f"{name} has no table for {', '.join(missing)}; it has {', '.join(tables)}")


def check_modes(name: str, ids: KeyedJaggedTensor, modes: Iterable[str]) -> None:
    """Raises ValueError if a batch has weights and a key's table does not pool by sums."""
    averaging = [key for key, mode in zip(ids.keys, modes, strict=True) if mode != "sum"]
    if ids._raw_weights is not None and averaging:
        raise ValueError(f"{name}: weights go with mode='sum', and {', '.join(averaging)} pool otherwise")


def _make_graph_input(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the same batch as the result of an op if Dynamo is tracing.

    Otherwise, Dynamo would make only the inner tensors inputs of its graph. Their sizes would be expressions of the
    outer size, which would not be an input. Inductor fails on such a graph.
    """
    return ids.permute(ids.keys) if torch.compiler.is_dynamo_compiling() else ids


class EmbeddingBagCollection(_Collection):
    """Pooled embeddings: ``nn.EmbeddingBag`` tables by key, looked up together.

    Args:
        tables: the tables. They stay ordinary modules (``collection.tables[key]``), and several keys may use one.
    """

    kind = nn.EmbeddingBag

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        """Looks up and pools the rows of each key; returns ``[B, D]`` by key, 0 for an empty row.

        If the batch has weights, they are factors of the looked-up entries, for tables of ``mode="sum"`` only.

        Raises:
            KeyError: a key has no table.
            ValueError: the batch has weights, and a table is not of ``mode="sum"``.
        """
        tables = self._find_tables(ids)
        ids = _make_graph_input(ids)
        check_modes("EmbeddingBagCollection", ids, [t.mode for t in tables])
        weights = None if ids._raw_weights is None else ids.unwrap("weights")
        return dict(zip(ids.keys, pool(tables, ids._raw_values, ids.offsets, None, weights), strict=True))


class EmbeddingCollection(_Collection):
    """Embeddings of every entry: ``nn.Embedding`` tables by key, looked up together.

    Args:
        tables: the tables. They stay ordinary modules (``collection.tables[key]``), and several keys may use one.
    """

    kind = nn.Embedding

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up the rows of each key; returns ``[B, T, D]`` by key.

        Raises:
            KeyError: a key has no table.
        """
        tables = self._find_tables(ids)
        ids = _make_graph_input(ids)
        kinds = [(t.weight.shape[1], t.weight.dtype, t.sparse) for t in tables]
        rows_by_key: dict[str, JaggedTensor] = {}
        for kind in dict.fromkeys(kinds):
            indices = [k for k, other in enumerate(kinds) if other == kind]
            offsets = (
                ids.offsets if len(indices) == len(tables) else torch.stack([ids.offsets[k] for k in indices])
            )
            entries = look_up([tables[k] for k in indices], ids._raw_values, offsets)
            rows_by_key |= {
                ids.keys[k]: feature_rows(entries, ids.offsets[k], ids.max_length) for k in indices
            }
        return {key: rows_by_key[key] for key in ids.keys}
