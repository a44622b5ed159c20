"""Recurrent layers over rows: from the first entry of each row to its last, and back in reversed directions.

PyTorch's kernels take rows of uneven length as a *packed sequence*, with the number of rows that reach each position on
the host. The rule packs the rows, calls the kernel, and unpacks the result. An empty row keeps its initial states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from subclasses.errors import DispatchError
from subclasses.ragged.base import is_ragged, name_of, shown
from subclasses.ragged.checks import is_traced
from subclasses.ragged.modules.time_major import TimeMajor
from subclasses.ragged.registry import Rules

RULES = Rules()


@RULES.of(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _recur(func: Any, input: Any, hx: Any, params: Any, *options: Any) -> Any:
    *settings, batch_first = options
    x = _check(func, input, hx, batch_first)
    states = tuple(hx) if func is torch.lstm else (hx,)
    lengths = x.row_lengths().clamp(max=x.width).cpu()
    (full,) = lengths.nonzero(as_tuple=True)
    full = full.to(states[0].device)
    if not full.numel():
        return _without_entries(func, x, states, params, settings, batch_first)
    packed = pack_padded_sequence(
        x.to_dense().index_select(0, full), lengths[lengths > 0], batch_first=True, enforce_sorted=False
    )
    begin = tuple(h.index_select(1, full).index_select(1, packed.sorted_indices) for h in states)
    begin = begin if func is torch.lstm else begin[0]
    data, *ends = func(packed.data, packed.batch_sizes, begin, params, *settings)
    table, _ = pad_packed_sequence(
        PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices),
        batch_first=True,
        total_length=x.width,
    )
    table = table.new_zeros(x.shape[0], *table.shape[1:]).index_copy(0, full, table)
    ends = [
        h.index_copy(1, full, end.index_select(1, packed.unsorted_indices))
        for h, end in zip(states, ends, strict=True)
    ]
    result = x.from_table(table)
    return (result if batch_first else result.transpose(0, 1), *ends)


def _without_entries(
    func: Any, x: Any, states: tuple[Tensor, ...], params: Any, settings: list[Any], batch_first: bool
) -> Any:
    """Returns the results for rows that are all empty; computes one entry to find the width of the results."""
    one = x.to_dense().new_zeros(1, 1, x.shape[-1])
    begin = tuple(h.new_zeros(h.shape[0], 1, h.shape[2]) for h in states)
    out, *_ = func(one, begin if func is torch.lstm else begin[0], params, *settings, True)
    result = x.from_table(out.expand(x.shape[0], x.width, -1))
    return (result if batch_first else result.transpose(0, 1), *states)


def _check(func: Any, input: Any, hx: Any, batch_first: bool) -> Any:
    """Returns rows ``[B, T, C]``; raises in a trace, which cannot read the lengths, and for ragged states."""
    for h in hx if isinstance(hx, tuple | list) else (hx,):
        if is_ragged(h):
            raise DispatchError(
                f"{name_of(func)}: expected dense states hx [layers, B, H], got {shown(h)}",
                code="argument-refused",
            )
    if not batch_first and is_ragged(input) and input.row_dims == (0, 1):
        raise DispatchError(
            f"{name_of(func)}: a layer without batch_first takes [T, B, C], got {shown(input)}",
            code="argument-refused",
            hint="make the layer with batch_first=True",
        )
    if batch_first and (isinstance(input, TimeMajor) or (is_ragged(input) and input.row_dims == (1, 0))):
        raise DispatchError(
            f"{name_of(func)}: a layer with batch_first=True takes [B, T, C], got rows [T, B, C]",
            code="row-dims",
            hint="write x.transpose(0, 1)",
        )
    x = input if batch_first else input.transpose(0, 1)
    if not is_ragged(x) or x.dim() != 3 or x.row_dims != (0, 1):
        size = "[B, T, C], ragged along 1" if batch_first else "[T, B, C], ragged along 0"
        raise DispatchError(
            f"{name_of(func)}: expected rows of entries {size}, got {shown(input)}", code="argument-refused"
        )
    if is_traced(x.row_lengths()):
        raise DispatchError(
            f"{name_of(func)}: the kernel needs the lengths of the rows on the host, so it is not part of a graph",
            code="graph-refused",
            hint="call the layer outside of the compiled function, or leave torch._dynamo.config.allow_rnn False, with "
            "which Dynamo breaks the graph there",
        )
    return x
