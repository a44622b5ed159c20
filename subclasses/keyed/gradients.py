"""What PyTorch asks of the lookups beside their kernels: sizes, and which op gives the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.keyed.kernels import (
    Entries,
    Lookups,
    blank_results,
    keyed_lookup,
    keyed_lookup_backward,
    keyed_pool,
    keyed_pool_backward,
    keyed_pool_weights_backward,
    keyed_sparse_backward,
    sparse_rows,
    split_arguments,
)

# ---- sizes -----------------------------------------------------------------------------------------------------


@keyed_pool.register_fake
def _(tables, *spread):
    return blank_results(tables, *split_arguments(spread))


@keyed_pool_backward.register_fake
def _(grad, rows, widths, *_):
    return [grad.new_empty(n, width) for n, width in zip(rows, widths, strict=True)]


@keyed_pool_weights_backward.register_fake
def _(grad, tables, values, *_):
    return grad.new_empty(values.shape[0])


@keyed_lookup.register_fake
def _(tables, values, *_):
    return tables[0].new_empty(values.shape[0], tables[0].shape[1])


@keyed_lookup_backward.register_fake
def _(grad, rows, *_):
    return [grad.new_empty(n, grad.shape[1]) for n in rows]


@keyed_sparse_backward.register_fake
def _(grad, rows, widths, counts, *spread):
    # How many entries a key has is data; nothing looks at the number, and sums of sparse tensors want none unknown.
    entries, how = split_arguments(spread)
    ids = entries.values.new_empty(0, dtype=torch.int64)
    return [
        sparse_rows(ids, grad.new_empty(0, widths[k]), rows[k], widths[k]) for k in dict.fromkeys(how.firsts)
    ]


# ---- gradients -------------------------------------------------------------------------------------------------


def _gradients(tables: list[Tensor | None], weights: Tensor | None = None) -> tuple[Any, ...]:
    """One for each argument: of the tables, and of the weights among the entries."""
    of_entries = [weights if name == "weights" else None for name in Entries._fields]
    return tables, *of_entries, *(None for _ in Lookups._fields)


def _keep(ctx: Any, tables: list[Tensor], spread: tuple[Any, ...], *more: Tensor) -> None:
    """Keeps what both backwards need."""
    entries, ctx.how = split_arguments(spread)
    ctx.rows, ctx.widths = [t.shape[0] for t in tables], [t.shape[1] for t in tables]
    ctx.save_for_backward(*entries, *more)


def _sparse_gradients(
    ctx: Any, grad: Tensor, counts: Tensor | None, entries: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradient of a table at the first of its keys, None at the others."""
    found = iter(keyed_sparse_backward(grad, ctx.rows, ctx.widths, counts, *entries, *ctx.how))
    return [next(found) if first == k else None for k, first in enumerate(ctx.how.firsts)]


def _save_pool(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tables, *spread = inputs
    _, counts, picked = output
    ctx.mark_non_differentiable(counts, picked)
    weights = split_arguments(tuple(spread))[0].weights
    # The tables themselves are needed for the gradient of the weights alone.
    kept = tables if weights is not None and weights.requires_grad else ()
    _keep(ctx, tables, tuple(spread), counts, picked, *kept)


def _differentiate_pool(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    *entries, counts, picked = ctx.saved_tensors[:6]
    tables = ctx.saved_tensors[6:]
    if ctx.how.sparse:
        grads = _sparse_gradients(ctx, grad, counts, entries)
    else:
        grads = keyed_pool_backward(grad, ctx.rows, ctx.widths, counts, picked, *entries, *ctx.how)
    scaled = keyed_pool_weights_backward(grad, list(tables), *entries, *ctx.how) if tables else None
    return _gradients(grads, scaled)


keyed_pool.register_autograd(_differentiate_pool, setup_context=_save_pool)


def _save_lookup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _keep(ctx, inputs[0], inputs[1:])


def _differentiate_lookup(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    entries = ctx.saved_tensors
    if ctx.how.sparse:
        grads = _sparse_gradients(ctx, grad, None, entries)
    else:
        grads = keyed_lookup_backward(grad, ctx.rows, *entries, *ctx.how)
    return _gradients(grads)


keyed_lookup.register_autograd(_differentiate_lookup, setup_context=_save_lookup)
