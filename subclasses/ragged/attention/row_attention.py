"""Attention over ragged rows on the CPU, as one op.

Every row attends to itself alone. A loop over the rows is slow, and one padded table costs ``B * T * T`` scores, of
which few exist. Here rows of about the same length form a *group*, and each group is one small batched attention. The
op is a single node in a graph, so no loop reaches a compiler.

* Under a causal mask no entry attends to the padding at the end of its row, so a group needs no mask for it. Rows
  within a fifth of each other's length share a group, at the cost of the padding alone.
* The backward recomputes the probabilities from the saved log-sum-exp, as in FlashAttention
  (https://arxiv.org/abs/2205.14135). For short rows it uses batched matrix products, which take two thirds of the time
  of PyTorch's fused CPU kernel. From ``_LONG`` entries on the fused kernel is faster, and needs no table of scores.
* Groups depend on the offsets only (see grouping.py), so the layers of a model and their backwards share them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from subclasses._torch import flash_attention_cpu, flash_attention_cpu_backward
from subclasses.op_schemas.custom import add_derivative, custom_op, run
from subclasses.ragged.attention.grouping import Group, Rows, Sizes, plan_for
from subclasses.slow_paths import say_once

_LONG = 160  # entries per row from which PyTorch's fused backward is faster

# ---- the op ----------------------------------------------------------------------------------------------------


@custom_op("ragged_attention")
def ragged_attention(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    q_lengths: Tensor | None,
    k_lengths: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Computes the attention of each row of ``q`` to the row of ``k`` and ``v`` with the same number.

    Args:
        q: ``[H, total, D]``.
        k: ``[H, total_k, D]``.
        v: ``[H, total_k, D]``.
        q_offsets: ``[B + 1]``, where each row of ``q`` begins.
        k_offsets: the same for ``k`` and ``v``.
        q_lengths: ``[B]``, for rows with gaps between them.
        k_lengths: the same for ``k`` and ``v``.
        causal: query i of a row attends to the row's keys up to i.
        scale: factor of the scores.

    Returns:
        The output ``[H, total, D]`` (0 for a row without keys), and the log-sum-exp ``[H, total]``.
    """
    sizes = Sizes(q.shape[1], k.shape[1], q.shape[0])
    plan = plan_for(Rows(q_offsets, q_lengths), Rows(k_offsets, k_lengths), sizes, causal)
    if plan.is_full:
        say_once(
            "attention of a JaggedTensor whose rows nearly fill a padded table moves them to groups and back",
            "use x.to_padded() for query, key and value, and compile the function",
        )
    out, lse = blank(q, q.shape[2], plan.complete), blank(q, 1, plan.complete, _lse_dtype(q.dtype))
    q, k, v = (entry_major(x) for x in (q, k, v))
    tables = out.flatten(0, 1), lse.flatten(0, 1)
    for group in plan.groups:
        mask, flag = _mask(group, causal, q.dtype)
        parts = group.queries.take(q), group.keys.take(k), group.keys.take(v)
        results = flash_attention_cpu(*parts, 0.0, flag, attn_mask=mask, scale=scale)
        for table, part in zip(tables, results, strict=True):
            group.queries.put(table, part)
    return head_major(out), head_major(lse).squeeze(-1)


@custom_op("ragged_attention_backward")
def ragged_attention_backward(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    q_lengths: Tensor | None,
    k_lengths: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of ``q``, ``k`` and ``v`` of `ragged_attention`, from its arguments and results."""
    sizes = Sizes(q.shape[1], k.shape[1], q.shape[0])
    plan = plan_for(Rows(q_offsets, q_lengths), Rows(k_offsets, k_lengths), sizes, causal)
    grads = tuple(blank(x, x.shape[2], plan.complete) for x in (q, k, v))
    grad, q, k, v, out, lse = (entry_major(x) for x in (grad, q, k, v, out, lse.unsqueeze(-1)))
    shift, tables = (grad * out).sum(-1, keepdim=True), [x.flatten(0, 1) for x in grads]
    for group in plan.groups:
        queries, keys, _ = group
        mask, flag = _mask(group, causal, q.dtype)
        # A padded query has no cotangent, so keys and values get none from it.
        g = queries.clear(queries.take(grad))
        inputs = queries.take(q), keys.take(k), keys.take(v)
        if _short(group, mask, q.dtype):
            rest = queries.take(lse), queries.clear(queries.take(shift))
            parts = _differentiate_short(g, *inputs, *rest, flag, scale)
        else:
            saved = queries.take(out), queries.take(lse).squeeze(-1)
            parts = flash_attention_cpu_backward(g, *inputs, *saved, 0.0, flag, attn_mask=mask, scale=scale)
        for table, part, side in zip(tables, parts, (queries, keys, keys), strict=True):
            side.put(table, part)
    grad_q, grad_k, grad_v = (head_major(x) for x in grads)
    return grad_q, grad_k, grad_v


def entry_major(values: Tensor) -> Tensor:
    """Permutes ``[H, total, D]`` to items ``[total * H, D]``; copies nothing for `linear` with split heads."""
    return values.transpose(0, 1).contiguous().flatten(0, 1)


def blank(like: Tensor, width: int, complete: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a table ``[total + 1, H, width]`` for results; padded positions write to its last entry."""
    make = like.new_empty if complete else like.new_zeros
    return make(like.shape[1] + 1, like.shape[0], width, dtype=dtype)


def head_major(table: Tensor) -> Tensor:
    """Permutes ``[total + 1, H, D]`` to ``[H, total, D]``, a view."""
    return table.narrow(0, 0, table.shape[0] - 1).transpose(0, 1)


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- one group -------------------------------------------------------------------------------------------------


def _mask(group: Group, causal: bool, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """Returns the mask that is added to the scores of a group, and whether the kernel applies the causal mask."""
    if group.key_mask is None:
        return None, causal
    mask = torch.zeros(group.key_mask.shape, dtype=dtype).masked_fill_(~group.key_mask, -math.inf)
    mask = mask[None, :, None, :].expand(-1, -1, group.queries.width, -1)
    if causal:
        mask = mask + _future(group.queries.width, group.keys.width, dtype)
    return mask, False


@lru_cache(maxsize=512)
def _future(queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """Returns ``[queries, keys]`` with minus infinity where a key comes after the query."""
    return torch.full((queries, keys), -math.inf, dtype=dtype).triu_(1)


def _short(group: Group, mask: Tensor | None, dtype: torch.dtype) -> bool:
    """Returns whether the backward by matrix products is faster."""
    wide = dtype in (torch.float32, torch.float64)
    return wide and mask is None and max(group.queries.width, group.keys.width) < _LONG


def _differentiate_short(g, q, k, v, lse, shift, causal: bool, scale: float):  # noqa: PLR0913
    """Returns the gradients ``[H * n, L, D]`` of ``q``, ``k``, ``v [H, n, L, D]``; changes two tables in place.

    ``shift`` is the sum of cotangent times output over D, which the softmax's derivative subtracts.

    The argument of ``exp`` is clamped to [-60, 0], since probabilities are at most 1. If a result is denormal or
    infinite, a vectorized ``exp`` and the products after it are forty times slower. So a probability below 1e-26
    becomes 1e-26.
    """
    g, q, k, v, lse, shift = (x.flatten(0, 1) for x in (g, q, k, v, lse, shift))
    q.mul_(scale)  # a copy made for this group
    weights = torch.bmm(q, k.mT.contiguous())  # products of contiguous operands take half the time
    weights.sub_(lse).clamp_(-60.0, 0.0).exp_()
    if causal:
        weights.tril_()
    grad_v = torch.bmm(weights.mT, g)
    scores = torch.bmm(g, v.mT.contiguous())
    scores.sub_(shift).mul_(weights)
    return torch.bmm(scores, k).mul_(scale), torch.bmm(scores.mT, q), grad_v


# ---- fake kernels and autograd ---------------------------------------------------------------------------------


def _fake_result(x: Tensor) -> Tensor:
    return head_major(blank(x, x.shape[2], complete=True))


@ragged_attention.register_fake
def _(q, k, v, q_offsets, k_offsets, q_lengths, k_lengths, causal, scale):  # noqa: PLR0913
    lse = blank(q, 1, complete=True, dtype=_lse_dtype(q.dtype))
    return _fake_result(q), head_major(lse).squeeze(-1)


@ragged_attention_backward.register_fake
def _(grad, q, k, v, *_):
    return _fake_result(q), _fake_result(k), _fake_result(v)


def _save(ctx, inputs, output) -> None:
    q, k, v, *rows, causal, scale = inputs
    ctx.save_for_backward(q, k, v, *output, *rows)
    ctx.causal, ctx.scale = causal, scale
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad, _):
    grads = run(ragged_attention_backward, grad, *ctx.saved_tensors, ctx.causal, ctx.scale)
    return *grads, None, None, None, None, None, None


add_derivative(ragged_attention, _save, _differentiate)
