"""Prints ragged tensors row by row, with no more elements than PyTorch prints of a dense tensor.

Few short rows are printed in full. Beyond ``torch.set_printoptions(threshold=...)`` elements, only the first and last
``edgeitems`` rows are printed, and the beginning and end of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import disable_current_modes, print_options, printing_with
from subclasses.spec.construction import repr_tail

_MANY = 20  # rows; of more rows only the first and last are printed, for any number of elements


def emit_rows(x: Any, inner: Tensor, rows: Callable[[], Sequence[Tensor]]) -> str:
    """Returns the text of a ragged tensor.

    Args:
        x: the tensor.
        inner: its inner tensor with the data. In a trace, where the data is unknown, the inner tensors are printed
            instead of the rows.
        rows: returns the rows.
    """
    spec = type(x).__spec__
    if type(inner) is not Tensor or inner.is_meta:
        parts = ", ".join(f"{name}={getattr(x, name)!r}" for name in spec.names)
        return f"{type(x).__name__}({parts}{repr_tail(x)})"
    with (
        disable_current_modes(),
        torch.no_grad(),
    ):  # as PyTorch does, so that no mode intercepts the ops of printing
        body = _body(rows())
    words = [f"size={tuple(x.shape)}"]
    words += [f"{f.name}={getattr(x, f.name)}" for f in spec.statics if getattr(x, f.name) != f.default]
    if body == "[]" and inner.dtype != torch.get_default_dtype():
        words.append(f"dtype={inner.dtype}")
    return f"{type(x).__name__}({body}, {', '.join(words)}{repr_tail(x)})"


def _body(rows: Sequence[Tensor]) -> str:
    """Returns the rows between brackets, a line or more for each."""
    edge = print_options.edgeitems
    long = sum(row.numel() for row in rows) > print_options.threshold
    hidden = len(rows) - 2 * edge if long or len(rows) > _MANY else 0
    with printing_with(threshold=0 if long else print_options.threshold):
        texts = [str(row) for row in (rows if hidden <= 0 else [*rows[:edge], *rows[-edge:]])]
    if hidden > 0:
        texts.insert(edge, f"... ({hidden} rows)")
    lines = ["  " + text.replace("\n", "\n  ") + ("," if text[:3] != "..." else "") for text in texts]
    return "[\n" + "\n".join(lines) + "\n]" if lines else "[]"
