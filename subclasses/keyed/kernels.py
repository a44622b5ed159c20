"""Lookups in the tables of several keys, as one op for all keys.

The offsets of a key's rows are data. Outside of a graph, each key's part is sliced out and passed to PyTorch's own
kernel. In a graph, a slice would have a size that depends on data. There one op looks up all keys and reads the offsets
inside, so the sizes of its results are known: other lengths need no other graph and no synchronization outside the op.

The backward of an op is one op for dense gradients and another op for sparse gradients. All ops take the same `Entries`
and `Lookups`, flattened to arguments, because a custom op does not accept named tuples.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subclasses.op_schemas.custom import custom_op

aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2  # PyTorch's numbers of the modes
NO_POOLING = -1  # entries are not pooled

# ---- the part of a key -----------------------------------------------------------------------------------------


class Part(NamedTuple):
    """The entries of a key: their indices in the values (a range or one index each), and the starts of the rows."""

    positions: slice | Tensor
    starts: Tensor

    def take(self, t: Tensor) -> Tensor:
        """Returns the entries of the part from a tensor with one row for each entry; differentiable."""
        return t[self.positions] if isinstance(self.positions, slice) else t.index_select(0, self.positions)

    def ids(self, values: Tensor) -> Tensor:
        """Returns the ids of the part, in the dtype of the row starts: PyTorch's kernels require equal dtypes."""
        return self.take(values).to(self.starts.dtype)


def parts_of(offsets: Tensor, lengths: Tensor | None) -> list[Part]:
    """Returns the parts of all keys; reads the offsets.

    Args:
        offsets: ``[K, B + 1]``, the start of each row and the end of the last one.
        lengths: ``[K, B]``, for rows with gaps between them.
    """
    if lengths is not None and not lengths.equal(offsets.diff(dim=1)):
        return [_part_with_gaps(*rows) for rows in zip(offsets, lengths, strict=True)]
    ends = offsets[:, [0, -1]].tolist()
    return [
        Part(slice(first, last), row[:-1] - first) for row, (first, last) in zip(offsets, ends, strict=True)
    ]


def _part_with_gaps(offsets: Tensor, lengths: Tensor) -> Part:
    starts = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(offsets[:-1] - starts, lengths)
    return Part(shift + torch.arange(shift.shape[0], device=shift.device), starts)


# ---- arguments of all ops --------------------------------------------------------------------------------------


class Entries(NamedTuple):
    """The entries to look up: ids, and the rows of each key among them."""

    values: Tensor
    """``[total]``, ids."""
    offsets: Tensor
    """``[K, B + 1]``, the start of each row and the end of the last one."""
    lengths: Tensor | None = None
    """``[K, B]``, for rows with gaps between them."""
    weights: Tensor | None = None
    """``[total]``, a factor for each looked-up entry."""

    def select_keys(self, indices: list[int]) -> Entries:
        """Returns the entries of some keys only."""
        offsets, lengths = (
            None if t is None else torch.stack([t[k] for k in indices]) for t in (self.offsets, self.lengths)
        )
        return self._replace(offsets=offsets, lengths=lengths)

    def by_key(self) -> Iterator[tuple[Part, Tensor, Tensor | None]]:
        """Yields the part, the ids and the weights of each key; reads the offsets."""
        for part in parts_of(self.offsets, self.lengths):
            yield part, part.ids(self.values), None if self.weights is None else part.take(self.weights)


class Lookups(NamedTuple):
    """The lookup options of each key."""

    modes: list[int]
    """`SUM`, `MEAN`, `MAX` (of each column), or `NO_POOLING`."""
    paddings: list[int]
    """Padding ids, which count as absent; -1 for none."""
    by_frequency: list[bool]
    """Whether gradients are divided by the frequency of each id."""
    sparse: bool
    """Whether the gradients of the tables are sparse."""
    firsts: list[int]
    """For each key, the index of the first key with the same table."""


ENTRIES = "Tensor values, Tensor offsets, Tensor? lengths, Tensor? weights"
LOOKUPS = "int[] modes, int[] paddings, bool[] by_frequency, bool sparse, int[] firsts"


def unflatten_arguments(flat_args: tuple[Any, ...]) -> tuple[Entries, Lookups]:
    """Returns the records from the flat arguments of an op."""
    return Entries(*flat_args[:4]), Lookups(*flat_args[4:])


_TYPES: dict[str, Any] = {
    "Tensor": Tensor,
    "Tensor?": Tensor | None,
    "Tensor[]": list[Tensor],
    "int[]": list[int],
    "bool[]": list[bool],
    "bool": bool,
}


def signature_of(schema: str) -> inspect.Signature:
    """Returns the signature of a function with a schema, such as ``(Tensor x, int[] rows) -> Tensor``.

    PyTorch 2.13 infers the schema of a Triton op from the signature, and ignores the schema that it is passed.
    """
    arguments, _, result = schema.partition(") -> ")
    kinds = [argument.split(" ") for argument in arguments.removeprefix("(").split(", ")]
    results = [_TYPES[kind] for kind in result.removeprefix("(").removesuffix(")").split(", ")]
    return inspect.Signature(
        [
            inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_TYPES[k])
            for k, n in kinds
        ],
        return_annotation=results[0] if len(results) == 1 else tuple.__class_getitem__(tuple(results)),
    )


# ---- pooled ----------------------------------------------------------------------------------------------------


@custom_op("keyed_pool", f"(Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> (Tensor, Tensor, Tensor)")
def keyed_pool(tables: list[Tensor], *flat_args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Looks up the entries of each key in its table ``[V, D]`` and pools each row.

    Returns:
        The pooled rows, ``[B, sum of D]``; the number of pooled entries, ``[K, B]``; the id of the maximum,
        ``[B, sum of D]``. The last two are only as large as the gradients of the modes require.
    """
    entries, lookups = unflatten_arguments(flat_args)
    pooled, counts, picked = allocate_results(tables, entries, lookups)
    pooled_by_key, left = [], 0
    for k, (part, ids, scale) in enumerate(entries.by_key()):
        table, right = tables[k], left + tables[k].shape[1]
        if not ids.shape[0] or not part.starts.shape[0]:
            pooled_by_key.append(table.new_zeros(part.starts.shape[0], table.shape[1]))
        else:
            out, _, count, best = aten._embedding_bag_forward_only(
                table, ids, part.starts, False, lookups.modes[k], False, scale, False, lookups.paddings[k]
            )
            pooled_by_key.append(out)
            if lookups.modes[k] != SUM:
                counts[k] = count
            if lookups.modes[k] == MAX:
                picked[:, left:right] = best
        left = right
    return torch.cat(pooled_by_key, 1, out=pooled), counts, picked


def allocate_results(
    tables: list[Tensor], entries: Entries, lookups: Lookups
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the results of `keyed_pool`; counts and picked ids are empty if no mode needs them."""
    offsets, width = entries.offsets, sum(t.shape[1] for t in tables)
    batch = offsets.shape[1] - 1
    counted, chosen = any(mode != SUM for mode in lookups.modes), any(mode == MAX for mode in lookups.modes)
    return (
        tables[0].new_empty(batch, width),
        offsets.new_zeros(len(tables), batch if counted else 0),
        offsets.new_zeros(batch, width if chosen else 0),
    )


@custom_op(
    "keyed_pool_backward",
    f"(Tensor grad, int[] rows, int[] widths, Tensor counts, Tensor picked, {ENTRIES}, {LOOKUPS}) -> Tensor[]",
)
def keyed_pool_backward(
    grad: Tensor, rows: list[int], widths: list[int], counts: Tensor, picked: Tensor, *flat_args: Any
) -> list[Tensor]:
    """Returns the gradients of the tables of `keyed_pool`, each ``[rows[k], widths[k]]``."""
    entries, lookups = unflatten_arguments(flat_args)
    grads = []
    shares = grad.split(widths, 1)
    chosen = picked.split(widths, 1) if picked.shape[1] else [picked] * len(rows)
    for k, (part, ids, scale) in enumerate(entries.by_key()):
        if not ids.shape[0]:
            grads.append(grad.new_zeros(rows[k], widths[k]))
            continue
        grads.append(
            aten._embedding_bag_dense_backward(
                shares[k].contiguous(),
                ids,
                _row_indices(part, ids),
                counts[k],
                chosen[k].contiguous(),
                rows[k],
                lookups.by_frequency[k],
                lookups.modes[k],
                scale,
                lookups.paddings[k],
            )
        )
    return grads


@custom_op("keyed_pool_weights_backward", f"(Tensor grad, Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> Tensor")
def keyed_pool_weights_backward(grad: Tensor, tables: list[Tensor], *flat_args: Any) -> Tensor:
    """Returns the gradient of the weights of `keyed_pool`; 0 for an entry that belongs to no row."""
    entries, lookups = unflatten_arguments(flat_args)
    weights_grad, left = grad.new_zeros(entries.values.shape[0]), 0
    for k, (part, ids, _) in enumerate(entries.by_key()):
        right = left + tables[k].shape[1]
        if ids.shape[0]:
            weights_grad[part.positions] = aten._embedding_bag_per_sample_weights_backward(
                grad[:, left:right].contiguous(),
                tables[k],
                ids,
                part.starts,
                _row_indices(part, ids),
                lookups.modes[k],
                lookups.paddings[k],
            )
        left = right
    return weights_grad


def _row_indices(part: Part, ids: Tensor) -> Tensor:
    """Returns the row of each entry of a part."""
    later = part.starts[1:]
    begun = later.new_zeros(ids.shape[0] + 1).index_add_(0, later, torch.ones_like(later))
    return begun[:-1].cumsum(0)


# ---- without pooling -------------------------------------------------------------------------------------------


@custom_op("keyed_lookup", f"(Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> Tensor")
def keyed_lookup(tables: list[Tensor], *flat_args: Any) -> Tensor:
    """Looks up each entry in its key's table ``[V, D]``; returns ``[total, D]``, 0 for an entry of no key."""
    entries, _ = unflatten_arguments(flat_args)
    rows = tables[0].new_zeros(entries.values.shape[0], tables[0].shape[1])
    for table, (part, ids, _) in zip(tables, entries.by_key(), strict=True):
        rows[part.positions] = table.index_select(0, ids)
    return rows


@custom_op("keyed_lookup_backward", f"(Tensor grad, int[] rows, {ENTRIES}, {LOOKUPS}) -> Tensor[]")
def keyed_lookup_backward(grad: Tensor, rows: list[int], *flat_args: Any) -> list[Tensor]:
    """Returns the gradient of each table of `keyed_lookup`."""
    entries, lookups = unflatten_arguments(flat_args)
    return [
        aten.embedding_dense_backward(
            part.take(grad), ids, rows[k], lookups.paddings[k], lookups.by_frequency[k]
        )
        for k, (part, ids, _) in enumerate(entries.by_key())
    ]


# ---- sparse gradients ------------------------------------------------------------------------------------------


@custom_op(
    "keyed_sparse_backward",
    f"(Tensor grad, int[] rows, int[] widths, Tensor? counts, {ENTRIES}, {LOOKUPS}) -> Tensor[]",
)
def keyed_sparse_backward(
    grad: Tensor, rows: list[int], widths: list[int], counts: Tensor | None, *flat_args: Any
) -> list[Tensor]:
    """Returns the sparse gradients of the tables of `keyed_pool` or of `keyed_lookup`, one for each distinct table.

    A single op computes the gradients from the cotangent. Inductor can neither hold a sparse tensor between ops that it
    compiles nor add two of them.
    """
    entries, lookups = unflatten_arguments(flat_args)
    pooled = NO_POOLING not in lookups.modes
    shares = grad.split(widths, 1) if pooled else [grad] * len(rows)
    grads_by_table: dict[int, list[tuple[Tensor, Tensor]]] = {k: [] for k in dict.fromkeys(lookups.firsts)}
    for k, (part, ids, scale) in enumerate(entries.by_key()):
        share = shares[k].contiguous()
        if lookups.modes[k] == MEAN and counts is not None:
            share = share / counts[k].clamp(min=1).unsqueeze(1).to(share.dtype)
        grads = share.index_select(0, _row_indices(part, ids)) if pooled else part.take(share)
        if scale is not None:
            grads = grads * scale.unsqueeze(1)
        if lookups.paddings[k] >= 0:
            is_counted = ids != lookups.paddings[k]
            ids, grads = ids[is_counted], grads[is_counted]
        grads_by_table[lookups.firsts[k]].append((ids, grads))
    return [
        sparse_rows(
            _joined([ids for ids, _ in pairs]), _joined([grads for _, grads in pairs]), rows[k], widths[k]
        )
        for k, pairs in grads_by_table.items()
    ]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sparse_rows(ids: Tensor, grads: Tensor, rows: int, width: int) -> Tensor:
    """Returns a sparse tensor ``[rows, width]`` with ``grads`` added at the rows ``ids``."""
    return torch.sparse_coo_tensor(ids.unsqueeze(0), grads, (rows, width), check_invariants=False)
