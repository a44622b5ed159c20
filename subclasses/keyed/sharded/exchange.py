"""Communication between ranks: comparisons of their batches, and exchanges of a different number of rows for each rank.

A collective that one rank does not call blocks the others. So no rows are sent before all ranks have found their own
batches good. The backward of an exchange also runs on a rank whose own results need no gradient.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Ranks(NamedTuple):
    """The process group of a mesh, and this process in it."""

    group: Any
    rank: int
    count: int
    device: torch.device


# ---- agreement -------------------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """The facts of its batch that each rank sends to the others before anything else."""

    is_bad: int = 0
    tables: int = 0
    keys: int = 0
    weights: int = 0
    records_gradients: int = 0
    trains_tables: int = 0
    trains_weights: int = 0
    has_int64_ids: int = 0
    batch_size: int = 0


class Agreement(NamedTuple):
    """The facts of all batches, equal on all ranks."""

    batch_sizes: list[int]
    has_weights: bool
    needs_gradient: bool
    needs_weight_gradient: bool
    id_dtype: torch.dtype


# The facts that must be equal on all ranks, as an error names them.
_EQUAL = {
    "tables": "the same tables and plan",
    "keys": "the same keys in the same order",
    "weights": "weights of one dtype, or none",
    "records_gradients": "gradients enabled, or disabled",
}


def fingerprint(facts: Any) -> int:
    """Returns a hash of the text of facts, which is equal on ranks that agree."""
    return zlib.crc32(repr(facts).encode())


def describe(tables: int, ids: Any, weights: Tensor | None, parameters: Sequence[Tensor]) -> Facts:
    """Returns the facts of a batch that this rank found good.

    Args:
        tables: the fingerprint of all tables and of the placement of their rows.
        ids: the batch, a keyed tensor.
        weights: its weights, if the collection uses them.
        parameters: the parameters of the tables that the batch looks up.
    """
    records = torch.is_grad_enabled()
    return Facts(
        tables=tables,
        keys=fingerprint(ids.keys),
        weights=0 if weights is None else 1 + _DTYPES.index(weights.dtype),
        records_gradients=records,
        trains_tables=records and any(t.requires_grad for t in parameters),
        trains_weights=records and weights is not None and weights.requires_grad,
        has_int64_ids=ids._raw_values.dtype == torch.int64,
        batch_size=ids.batch_size,
    )


def report_bad_batch(ranks: Ranks) -> None:
    """Sends to the other ranks, which receive it in `agree`, that this rank raises an error."""
    _share(Facts(is_bad=1), ranks)


def agree(name: str, facts: Facts, ranks: Ranks) -> Agreement:
    """Compares the batches of all ranks; raises ValueError on every rank if they do not fit together."""
    all_facts = _share(facts, ranks)
    bad = [str(rank) for rank, other in enumerate(all_facts) if other.is_bad]
    if bad:
        raise ValueError(f"{name}: rank {', '.join(bad)} refused its batch; nothing was looked up")
    for field, expected in _EQUAL.items():
        values = [getattr(other, field) for other in all_facts]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            raise ValueError(f"{name}: expected {expected} on all ranks; ranks 0 and {other} differ")
    trains_weights = any(other.trains_weights for other in all_facts)
    return Agreement(
        [other.batch_size for other in all_facts],
        facts.weights > 0,
        trains_weights or any(other.trains_tables for other in all_facts),
        trains_weights,
        torch.int64 if any(other.has_int64_ids for other in all_facts) else torch.int32,
    )


def _share(facts: Facts, ranks: Ranks) -> list[Facts]:
    """Returns the facts of all ranks."""
    sent = torch.tensor(facts, dtype=torch.int64, device=ranks.device)
    gathered = [torch.empty_like(sent) for _ in range(ranks.count)]
    dist.all_gather(gathered, sent, group=ranks.group)
    return [Facts(*row) for row in torch.stack(gathered).tolist()]


# ---- rows for each rank ----------------------------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows, whose backward is the reverse all-to-all."""

    @staticmethod
    def forward(
        ctx: Any, t: Tensor, sent: list[int], received: list[int], group: Any, *anchors: Tensor
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        ctx.sizes = [anchor.shape for anchor in anchors]
        output = t.new_empty(sum(received), *t.shape[1:])
        dist.all_to_all_single(output, t.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        came = _Exchange.apply(grad, ctx.received, ctx.sent, ctx.group)
        return came, None, None, None, *(grad.new_zeros(size) for size in ctx.sizes)


def exchange(
    t: Tensor, sent: list[int], received: list[int], ranks: Ranks, anchors: Sequence[Tensor] = ()
) -> Tensor:
    """Sends the first ``sent[0]`` rows to rank 0, and so on; returns the rows of all ranks in order. Differentiable.

    Args:
        t: ``[sum of sent, ...]``.
        sent: the number of rows for each rank.
        received: the number of rows from each rank.
        ranks: the process group.
        anchors: get gradients of zeros. If one requires grad, the backward runs on this rank.
    """
    return _Exchange.apply(t, sent, received, ranks.group, *anchors)  # type: ignore[return-value]


class _Together(torch.autograd.Function):
    """Returns the same tensors; a gradient for one is a gradient for all, so that all their backwards run."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        return grads


def tie(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the same tensors, such that the backwards of all run together."""
    return [*_Together.apply(*tensors)] if len(tensors) > 1 else tensors  # type: ignore[misc]
