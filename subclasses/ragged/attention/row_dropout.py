"""Attention over ragged rows on the CPU with dropout of its probabilities, as one op.

PyTorch's fused kernel for the CPU has no dropout. So the op computes each group of rows (see grouping.py) by matrix
products, a block of queries at a time. The random numbers come from a seed, a tensor that the rule draws from PyTorch's
generator. The op is a function of its arguments: the backward draws the same numbers again instead of saving them. A
compiler or a checkpoint that saves the seed reproduces the dropout.

A probability is kept if a random number of 16 bits reaches a threshold. Kept probabilities are scaled by the exact
inverse of the share that passes. So the expected value equals the attention without dropout for every p.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from subclasses.op_schemas.custom import add_derivative, custom_op, run
from subclasses.ragged.attention.grouping import Group, Rows, Side, Sizes, plan_for
from subclasses.ragged.attention.row_attention import blank, entry_major, head_major

_BLOCK = 1 << 19  # scores of a block, of all heads and rows of a group
_QUERIES = 64  # minimum number of queries of a row in a block
_LEVELS = 1 << 16  # values of a random number

# ---- the op ----------------------------------------------------------------------------------------------------


@custom_op("ragged_attention_dropout")
def ragged_attention_dropout(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    q_lengths: Tensor | None,
    k_lengths: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Computes `ragged_attention` with dropout of the probabilities.

    Args:
        q: ``[H, total, D]``.
        k: ``[H, total_k, D]``.
        v: ``[H, total_k, D]``.
        seed: an int64 number that determines which probabilities become 0.
        q_offsets: ``[B + 1]``, where each row of ``q`` begins.
        k_offsets: the same for ``k`` and ``v``.
        q_lengths: ``[B]``, for rows with gaps between them.
        k_lengths: the same for ``k`` and ``v``.
        causal: query i of a row attends to the row's keys up to i.
        scale: factor of the scores.
        dropout_p: the share of probabilities that become 0.

    Returns:
        ``[H, total, D]``.
    """
    sizes = Sizes(q.shape[1], k.shape[1], q.shape[0])
    plan = plan_for(Rows(q_offsets, q_lengths), Rows(k_offsets, k_lengths), sizes, causal)
    out = blank(q, v.shape[2], plan.complete)
    tables = [entry_major(x) for x in (q, k, v)]
    draw = Draw.of(seed, dropout_p)
    for group in plan.groups:
        queries, keys, values = (_take(s, t) for s, t in zip(_sides(group), tables, strict=True))
        result, keys_t = queries.new_empty(*queries.shape[:2], values.shape[2]), keys.mT.contiguous()
        values.mul_(draw.scale)
        space = [queries.new_empty(_block_size(group, causal, queries.shape[0])) for _ in range(2)]
        for block in _blocks(group, causal, queries.shape[0]):
            weights = _weights(group, block, queries, keys_t, scale, causal, space[0])
            weights.mul_(draw.keep(weights, space[1]))
            torch.bmm(weights, values[:, : block.keys], out=result[:, block.first : block.last])
        _put(group.queries, out.flatten(0, 1), result)
    return head_major(out)


@custom_op("ragged_attention_dropout_backward")
def ragged_attention_dropout_backward(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    seed: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    q_lengths: Tensor | None,
    k_lengths: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of ``q``, ``k`` and ``v`` of `ragged_attention_dropout`, from its arguments and result."""
    sizes = Sizes(q.shape[1], k.shape[1], q.shape[0])
    plan = plan_for(Rows(q_offsets, q_lengths), Rows(k_offsets, k_lengths), sizes, causal)
    grads = tuple(blank(x, x.shape[2], plan.complete) for x in (q, k, v))
    tables = [entry_major(x) for x in (q, k, v, grad, out)]
    draw = Draw.of(seed, dropout_p)
    for group in plan.groups:
        sides = *_sides(group), group.queries, group.queries
        queries, keys, values, g, result = (_take(s, t) for s, t in zip(sides, tables, strict=True))
        # A padded query has no cotangent, so keys and values get none from it.
        group.queries.clear(g.view(-1, group.queries.count, *g.shape[1:]))
        shift = result.mul_(g).sum(-1, keepdim=True)
        keys_t, values_t = keys.mT.contiguous(), values.mul_(draw.scale).mT.contiguous()
        parts = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        space = [queries.new_empty(_block_size(group, causal, queries.shape[0])) for _ in range(3)]
        for block in _blocks(group, causal, queries.shape[0]):
            query_slice, key_slice = slice(block.first, block.last), slice(0, block.keys)
            weights = _weights(group, block, queries, keys_t, scale, causal, space[0])
            keep = draw.keep(weights, space[1])
            scores = torch.mul(weights, keep, out=_view(space[2], *weights.shape))
            parts[2][:, key_slice].baddbmm_(scores.mT, g[:, query_slice])
            torch.bmm(g[:, query_slice], values_t[..., key_slice], out=scores)
            scores.mul_(keep).sub_(shift[:, query_slice]).mul_(weights)
            torch.bmm(scores, keys[:, key_slice], out=parts[0][:, query_slice])
            parts[1][:, key_slice].baddbmm_(scores.mT, queries[:, query_slice])
        factors = scale, scale, draw.scale
        for table, part, side, factor in zip(grads, parts, _sides(group), factors, strict=True):
            _put(side, table.flatten(0, 1), part.mul_(factor))
    grad_q, grad_k, grad_v = (head_major(x) for x in grads)
    return grad_q, grad_k, grad_v


# ---- random numbers --------------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """A generator, the least random number that keeps a probability, and the factor of kept probabilities."""

    generator: torch.Generator
    threshold: int
    scale: float

    @classmethod
    def of(cls, seed: Tensor, dropout_p: float) -> Draw:
        """Returns the draw of a seed; only a p of 1 drops everything."""
        dropped = _LEVELS if dropout_p == 1 else min(round(dropout_p * _LEVELS), _LEVELS - 1)
        scale = 0.0 if dropped == _LEVELS else _LEVELS / (_LEVELS - dropped)
        return cls(torch.Generator().manual_seed(int(seed)), dropped - _LEVELS // 2, scale)

    def keep(self, like: Tensor, space: Tensor) -> Tensor:
        """Returns 1 for each probability that is kept and 0 for the others, in the memory of ``space``."""
        words = torch.empty((like.numel() + 3) // 4, dtype=torch.int64)
        words.random_(-(1 << 63), None, generator=self.generator)  # all 64 bits: four numbers of 16
        numbers = words.view(torch.int16)[: like.numel()].view(like.shape)
        return torch.ge(numbers, self.threshold, out=_view(space, *like.shape))


# ---- one group -------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Queries ``first`` to ``last`` of each row of a group, and the number of keys that they attend to."""

    first: int
    last: int
    keys: int


def _blocks(group: Group, causal: bool, items: int) -> Iterator[Block]:
    """Yields the blocks of a group; ``items`` is its number of rows times the number of heads."""
    queries, keys = group.queries.width, group.keys.width
    step = max(_QUERIES, _BLOCK // (items * keys))
    for first in range(0, queries, step):
        last = min(first + step, queries)
        yield Block(first, last, min(last, keys) if causal else keys)


def _block_size(group: Group, causal: bool, items: int) -> int:
    """Returns the number of scores of the largest block."""
    return items * max((b.last - b.first) * b.keys for b in _blocks(group, causal, items))


def _weights(  # noqa: PLR0913
    group: Group, block: Block, queries: Tensor, keys_t: Tensor, scale: float, causal: bool, space: Tensor
) -> Tensor:
    """Returns the probabilities ``[items, queries, keys]`` of a block, in the memory of ``space``."""
    first, last, seen = block
    block_queries = queries[:, first:last]
    weights = _view(space, block_queries.shape[0], last - first, seen)
    torch.baddbmm(weights, block_queries, keys_t[..., :seen], beta=0, alpha=scale, out=weights)
    if causal and first < seen:
        weights[..., first:].add_(_future(last - first, weights.dtype)[:, : seen - first])
    if group.key_mask is not None:
        hidden = torch.zeros(group.key_mask.shape, dtype=weights.dtype)
        hidden.masked_fill_(~group.key_mask, -math.inf)
        rows = weights.view(-1, group.keys.count, last - first, seen)
        rows.add_(hidden[:, None, :seen])
    return torch.softmax(weights, -1, out=weights)


@lru_cache(maxsize=64)
def _future(count: int, dtype: torch.dtype) -> Tensor:
    """Returns ``[queries, keys]`` with minus infinity where a key comes after the query."""
    return torch.full((count, count), -math.inf, dtype=dtype).triu_(1)


def _view(space: Tensor, *size: int) -> Tensor:
    """Returns a view of a given size of the first elements of ``space``."""
    return space[: math.prod(size)].view(size)


def _sides(group: Group) -> tuple[Side, Side, Side]:
    return group.queries, group.keys, group.keys


def _take(side: Side, table: Tensor) -> Tensor:
    """Gathers ``[total * H, D]`` into a new ``[H * rows, width, D]``, in single precision at least."""
    part = side.take(table).flatten(0, 1)
    return part if part.dtype in (torch.float32, torch.float64) else part.float()


def _put(side: Side, table: Tensor, part: Tensor) -> None:
    side.put(table, part.to(table.dtype))


# ---- fake kernels and autograd ---------------------------------------------------------------------------------


def _fake(x: Tensor, width: int) -> Tensor:
    return head_major(blank(x, width, complete=True))


@ragged_attention_dropout.register_fake
def _(q, k, v, *_):
    return _fake(q, v.shape[2])


@ragged_attention_dropout_backward.register_fake
def _(grad, q, k, v, *_):
    return tuple(_fake(x, x.shape[2]) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:
    q, k, v, seed, *rows, causal, scale, dropout_p = inputs
    ctx.save_for_backward(q, k, v, output, seed, *rows)
    ctx.options = causal, scale, dropout_p


def _differentiate(ctx, grad):
    grads = run(ragged_attention_dropout_backward, grad, *ctx.saved_tensors, *ctx.options)
    return *grads, *[None] * 8


add_derivative(ragged_attention_dropout, _save, _differentiate)
