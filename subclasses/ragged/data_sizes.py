"""Sizes that only data determines: the total number of entries, or the number of entries that a mask selects.

Eager mode reads such a size on the host. A trace has no data. There the op ``numbers_below`` returns as many numbers as
a tensor specifies, and their count is a new symbolic size of the graph. So the graph does not break. The host waits for
a GPU when the graph runs, as in eager mode. ``Tensor.item`` and ``torch.nonzero`` trace in this way only with options
of Dynamo that are off by default.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses._torch import check_in_graph
from subclasses.ragged.checks import is_traced

_NAME = "subclasses::numbers_below"

torch.library.define(
    _NAME,
    "(Tensor count) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe),
)


@torch.library.impl(_NAME, "default")
def _numbers_below(count: Tensor) -> Tensor:
    """Returns the numbers from 0 up to ``count``, a tensor of one int; int64."""
    return torch.arange(int(count), device=count.device)


@torch.library.register_fake(_NAME)
def _fake_numbers(count: Any) -> Tensor:
    symbols = count.fake_mode.shape_env
    if symbols is None:  # new_dynamic_size() raises PyTorch's error for a size that is not symbolic
        size: Any = torch.library.get_ctx().new_dynamic_size()
    else:
        size = symbols.create_unbacked_symint()
    check_in_graph(size >= 0)
    return count.new_empty([size], dtype=torch.int64)


def size_of(count: Tensor) -> int:
    """Returns a tensor of one int as a size, which is symbolic in a trace."""
    return torch.ops.subclasses.numbers_below(count).shape[0] if is_traced(count) else int(count)


def longest_of(lengths: Tensor, bound: int) -> int:
    """Returns the length of the longest row; in a trace, which does not read lengths, an upper bound."""
    if is_traced(lengths):
        return bound
    return int(lengths.max()) if lengths.numel() else 0


def true_positions(mask: Tensor) -> Tensor:
    """Returns the indices ``[n]`` at which a mask of one dimension is True, in ascending order."""
    if not is_traced(mask):
        return mask.nonzero().squeeze(1)
    upto = mask.cumsum(0)
    numbers = torch.ops.subclasses.numbers_below(mask.sum())
    return torch.searchsorted(upto, numbers, right=True)
