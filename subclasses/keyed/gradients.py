"""Fake kernels and derivatives of the lookup ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.keyed.kernels import (
    Entries,
    Lookups,
    allocate_results,
    keyed_lookup,
    keyed_lookup_backward,
    keyed_pool,
    keyed_pool_backward,
    keyed_pool_weights_backward,
    keyed_sparse_backward,
    sparse_rows,
    unflatten_arguments,
)

# ---- fake kernels ----------------------------------------------------------------------------------------------


@keyed_pool.register_fake
def _(tables, *flat_args):
    return allocate_results(tables, *unflatten_arguments(flat_args))


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
def _(grad, rows, widths, counts, *flat_args):
    # The number of entries of a key is data. Nothing uses it here, and sums of sparse tensors reject an unknown size.
    entries, lookups = unflatten_arguments(flat_args)
    ids = entries.values.new_empty(0, dtype=torch.int64)
    return [
        sparse_rows(ids, grad.new_empty(0, widths[k]), rows[k], widths[k])
        for k in dict.fromkeys(lookups.firsts)
    ]


# ---- derivatives -----------------------------------------------------------------------------------------------


def _pack_gradients(tables: list[Tensor | None], weights: Tensor | None = None) -> tuple[Any, ...]:
    """Returns a gradient for each op argument: gradients for the tables and the weights, None for the others."""
    of_entries = [weights if name == "weights" else None for name in Entries._fields]
    return tables, *of_entries, *(None for _ in Lookups._fields)


def _save(ctx: Any, tables: list[Tensor], flat_args: tuple[Any, ...], *more: Tensor) -> None:
    """Saves the tensors and options that both backward functions need."""
    entries, ctx.lookups = unflatten_arguments(flat_args)
    ctx.rows, ctx.widths = [t.shape[0] for t in tables], [t.shape[1] for t in tables]
    ctx.save_for_backward(*entries, *more)


def _sparse_gradients(
    ctx: Any, grad: Tensor, counts: Tensor | None, entries: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradient of each table at the first key that uses it, None at its other keys."""
    table_grads = iter(keyed_sparse_backward(grad, ctx.rows, ctx.widths, counts, *entries, *ctx.lookups))
    return [next(table_grads) if first == k else None for k, first in enumerate(ctx.lookups.firsts)]


def save_pool(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Saves the tensors and options that the derivative of `keyed_pool` needs."""
    tables, *flat_args = inputs
    _, counts, picked = output
    ctx.mark_non_differentiable(counts, picked)
    weights = unflatten_arguments(tuple(flat_args))[0].weights
    # Only the gradient of the weights needs the tables themselves.
    saved_tables = tables if weights is not None and weights.requires_grad else ()
    _save(ctx, tables, tuple(flat_args), counts, picked, *saved_tables)


def pool_derivative(of_tables: Any, of_weights: Any) -> Any:
    """Returns the derivative of `keyed_pool`, from the ops for dense gradients of the tables and for the weights."""

    def differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        *entries, counts, picked = ctx.saved_tensors[:6]
        tables = ctx.saved_tensors[6:]
        if ctx.lookups.sparse:
            grads = _sparse_gradients(ctx, grad, counts, entries)
        else:
            grads = of_tables(grad, ctx.rows, ctx.widths, counts, picked, *entries, *ctx.lookups)
        scaled = of_weights(grad, list(tables), *entries, *ctx.lookups) if tables else None
        return _pack_gradients(grads, scaled)

    return differentiate


keyed_pool.register_autograd(
    pool_derivative(keyed_pool_backward, keyed_pool_weights_backward), setup_context=save_pool
)


def save_lookup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves the tensors and options that the derivative of `keyed_lookup` needs."""
    _save(ctx, inputs[0], inputs[1:])


def lookup_derivative(of_tables: Any) -> Any:
    """Returns the derivative of `keyed_lookup`, from the op for dense gradients of the tables."""

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        entries = ctx.saved_tensors
        if ctx.lookups.sparse:
            grads = _sparse_gradients(ctx, grad, None, entries)
        else:
            grads = of_tables(grad, ctx.rows, *entries, *ctx.lookups)
        return _pack_gradients(grads)

    return differentiate


keyed_lookup.register_autograd(lookup_derivative(keyed_lookup_backward), setup_context=save_lookup)
