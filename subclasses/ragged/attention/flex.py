"""``flex_attention`` of ragged tensors: positions count from the beginning of each row.

The rule runs PyTorch's op on padded tables. It adds a term for existing keys to the mask function of the call. It also
removes blocks without an entry from the block mask, so that a kernel skips them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses._torch import math_attention
from subclasses.ragged.attention.rule import attention_rows
from subclasses.ragged.base import is_ragged
from subclasses.ragged.registry import Rules
from subclasses.slow_paths import say_once

RULES = Rules()

_BLOCK = 128  # entries of a block, as PyTorch's default
_LARGEST = 1 << 30  # entries of the block of a call without a block mask


@RULES.of(torch.ops.higher_order.flex_attention)
def _attend(  # noqa: PLR0913
    op: Any,
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> tuple[Any, Any, Any]:
    rows, key, value = attention_rows(op, query, key, value)
    exists, mask_mod = key.row_lengths(), block_mask[-1]

    def mask_of_rows(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *buffers: Tensor) -> Tensor:
        return mask_mod(b, h, i, j, *buffers[:-1]) & (j < buffers[-1][b])

    attend = op
    if rows.device.type == "cpu":
        attend = math_attention
        say_once(
            "flex_attention of ragged tensors on the CPU computes every score of a padded table",
            "call scaled_dot_product_attention where there is neither a score_mod nor a mask but a causal one",
        )
    outputs = attend(
        rows.to_dense(),
        key.to_dense(),
        value.to_dense(),
        score_mod,
        (*_blocks_of_rows(block_mask, rows, key), mask_of_rows),
        scale,
        kernel_options,
        score_buffers,
        (*mask_buffers, exists),
    )
    results = [rows.from_table(x) for x in (outputs[0], *(x.unsqueeze(-1) for x in outputs[1:]))]
    if not is_ragged(query):
        results = [x.to_dense() for x in results]
    return (results[0], *(x.squeeze(-1) for x in results[1:]))


def _blocks_of_rows(block_mask: tuple[Any, ...], query: Any, key: Any) -> list[Any]:
    """Returns a block mask without its mask function, with the blocks of ``block_mask`` that have entries of a row.

    No block is marked as full, since the last block of a row has padding.

    Args:
        block_mask: the sizes of queries and keys; the number and the indices of partial blocks for each block of
            queries. The number and the indices of full blocks follow, then the same four for each block of keys. The
            block sizes and the mask function are last. A call without a block mask has one block that is larger than
            any table.
        query: rows of queries.
        key: rows of keys.
    """
    sizes, given, block_sizes = (query.shape[-2], key.shape[-2]), block_mask[2:6], block_mask[-3:-1]
    widths = [size if size < _LARGEST else _BLOCK for size in block_sizes]
    counts = [-(-size // width) for size, width in zip(sizes, widths, strict=True)]
    of_queries, of_keys = (
        torch.arange(count, device=n.device) * width < n.unsqueeze(1)
        for n, count, width in zip((query.row_lengths(), key.row_lengths()), counts, widths, strict=True)
    )
    used = of_queries[:, None, :, None] & of_keys[:, None, None, :]
    if widths == [*block_sizes]:
        used = used & _as_dense(given, counts)
    rest = [None] * (len(block_mask) - 11)
    return [*sizes, *_as_indices(used), None, None, *_as_indices(used.mT), *rest, *widths]


def _as_dense(given: tuple[Any, ...], counts: list[int]) -> Tensor:
    """Returns a mask ``[B, H, blocks of queries, blocks of keys]`` of partial and full blocks."""
    mask: Any = False
    for number, indices in (given[:2], given[2:]):
        if number is not None:
            is_one = torch.arange(indices.shape[-1], device=indices.device) < number.unsqueeze(-1)
            columns = torch.where(is_one, indices, counts[1]).to(torch.int64)
            dense = is_one.new_zeros((*number.shape, counts[1] + 1)).scatter(-1, columns, value=True)
            mask = mask | dense[..., : counts[1]]
    return mask


def _as_indices(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of used blocks, and the indices of all blocks, used blocks first."""
    order = dense.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32), order.to(torch.int32)
