"""Causal attention over rows back to back, by hand, without a tensor class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLASH, CUDNN = "flash attention", "cuDNN attention"
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def _flash(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    op = torch.ops.aten._flash_attention_forward
    return op(q, k, v, offsets, offsets, longest, longest, 0.0, True, False)[0]


# PyTorch has no shapes of results for its cuDNN op, so that a compiler cannot trace it; these two ops have.


@torch.library.custom_op("bench::cudnn_rows", mutates_args=())
def _cudnn(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    op = torch.ops.aten._cudnn_attention_forward
    out, sums, *_, seed, _, _ = op(q, k, v, None, offsets, offsets, longest, longest, True, 0.0, True, False)
    return out, sums.reshape(-1), seed.reshape(-1)[:1].clone()


@_cudnn.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    sums = q.new_empty(q.shape[0] * q.shape[1], dtype=torch.float32)
    return torch.empty_like(q), sums, q.new_empty(1, dtype=torch.int64)


@torch.library.custom_op("bench::cudnn_rows_backward", mutates_args=())
def _cudnn_backward(  # noqa: PLR0913
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    offsets: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    op, sums = torch.ops.aten._cudnn_attention_backward, sums.view(*q.shape[:2], 1)
    ends = offsets, offsets, longest, longest
    return op(gradient.contiguous(), q, k, v, out, sums, seed, seed, None, *ends, 0.0, True)


@_cudnn_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.longest = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradient: Tensor, *unused: Any) -> tuple[Any, ...]:
    q, k, v, offsets, out, sums, seed = ctx.saved_tensors
    return *_cudnn_backward(gradient, q, k, v, out, sums, seed, offsets, ctx.longest), None, None


_cudnn.register_autograd(_differentiate, setup_context=_keep)


def row_by_row(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Attends row by row, for a CPU, which has no kernel for rows of any lengths."""
    sizes: Any = offsets.diff().tolist()
    rows = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*row, is_causal=True) for row in rows], 1).transpose(
        0, 1
    )


VARLEN: dict[str, Attend] = {FLASH: _flash, CUDNN: lambda *args: _cudnn(*args)[0]}


def attend_flat(name: str, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Attends within each row.

    Args:
        name: A kernel of `VARLEN`; the CPU has neither.
        q: The queries of all rows, `[total, heads, width]`.
        k: The keys.
        v: The values.
        offsets: Where each row starts, `[B + 1]`, int32.
        longest: The length of the longest row.
    """
    return (VARLEN[name] if q.is_cuda else row_by_row)(q, k, v, offsets, longest)
