"""What PyTorch asks of the lookups beside their kernels: sizes, and which op gives the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.keyed.kernels import (
    blank_results,
    keyed_lookup,
    keyed_lookup_backward,
    keyed_pool,
    keyed_pool_backward,
    keyed_pool_weights_backward,
    keyed_sparse_backward,
    sparse_rows,
)

# ---- sizes -----------------------------------------------------------------------------------------------------


@keyed_pool.register_fake
def _(tables, values, offsets, lengths, weights, modes, *_):
    return blank_results(tables, offsets, modes)


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
def _(grad, rows, widths, values, *rest):
    # How many entries a key has is data; nothing looks at the number, and sums of sparse tensors want none unknown.
    ids = values.new_empty(0, dtype=torch.int64)
    return [
        sparse_rows(ids, grad.new_empty(0, widths[k]), rows[k], widths[k]) for k in dict.fromkeys(rest[-1])
    ]


# ---- pooled ----------------------------------------------------------------------------------------------------


def _save_pool(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tables, values, offsets, lengths, weights, *ctx.options = inputs
    _, counts, picked = output
    ctx.mark_non_differentiable(counts, picked)
    ctx.shapes = [tuple(t.shape) for t in tables]
    # The tables themselves are needed for the gradient of the weights alone.
    kept = tables if weights is not None and weights.requires_grad else ()
    ctx.save_for_backward(values, offsets, lengths, weights, counts, picked, *kept)


def _differentiate_pool(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    values, offsets, lengths, weights, counts, picked, *tables = ctx.saved_tensors
    modes, paddings, by_frequency, sparse, firsts = ctx.options
    rows, widths = [n for n, _ in ctx.shapes], [d for _, d in ctx.shapes]
    if sparse:
        parts = values, offsets, lengths, weights
        found = keyed_sparse_backward(grad, rows, widths, *parts, counts, modes, paddings, firsts)
        grads = _of_first_keys(found, firsts)
    else:
        grads = keyed_pool_backward(
            grad,
            rows,
            widths,
            values,
            offsets,
            lengths,
            weights,
            counts,
            picked,
            modes,
            paddings,
            by_frequency,
        )
    scaled = None
    if tables:
        scaled = keyed_pool_weights_backward(grad, tables, values, offsets, lengths, modes, paddings)
    return grads, None, None, None, scaled, None, None, None, None, None


def _of_first_keys(grads: list[Tensor], firsts: list[int]) -> list[Tensor | None]:
    """The gradient of a table at the first of its keys, None at the others."""
    found = iter(grads)
    return [next(found) if first == k else None for k, first in enumerate(firsts)]


keyed_pool.register_autograd(_differentiate_pool, setup_context=_save_pool)

# ---- entry by entry --------------------------------------------------------------------------------------------


def _save_lookup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tables, values, offsets, *ctx.options = inputs
    ctx.rows = [t.shape[0] for t in tables]
    ctx.save_for_backward(values, offsets)


def _differentiate_lookup(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    values, offsets = ctx.saved_tensors
    paddings, by_frequency, sparse, firsts = ctx.options
    if sparse:
        widths = [grad.shape[1]] * len(ctx.rows)
        parts = values, offsets, None, None
        found = keyed_sparse_backward(grad, ctx.rows, widths, *parts, None, [], paddings, firsts)
        grads = _of_first_keys(found, firsts)
    else:
        grads = keyed_lookup_backward(grad, ctx.rows, values, offsets, paddings, by_frequency)
    return grads, None, None, None, None, None, None


keyed_lookup.register_autograd(_differentiate_lookup, setup_context=_save_lookup)
