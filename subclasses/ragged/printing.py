"""How ragged tensors print: their rows, and no more of them than PyTorch would print of a dense tensor.

Few short rows are shown whole. Of more elements than ``torch.set_printoptions(threshold=...)`` only the first and last
rows are shown, and the beginning and end of each; ``edgeitems`` says how many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import disable_current_modes, print_options, printing_with
from subclasses.spec.construction import repr_tail

_MANY = 20  # rows: beyond them only the first and last are shown, however few elements they have


def emit_rows(x: Any, inner: Tensor, rows: Callable[[], Sequence[Tensor]]) -> str:
    """The text of a ragged tensor.

    Args:
        x: the tensor.
        inner: its inner tensor with the data. While a graph is traced, where nothing is known of that, the parts are
            shown instead of the rows.
        rows: gives the rows.
    """
    spec = type(x).__spec__
    if type(inner) is not Tensor or inner.is_meta:
        parts = ", ".join(f"{name}={getattr(x, name)!r}" for name in spec.names)
        return f"{type(x).__name__}({parts}{repr_tail(x)})"
    with (
        disable_current_modes(),
        torch.no_grad(),
    ):  # as PyTorch does, whose modes are not to see what is printed
        body = _body(rows())
    words = [f"size={tuple(x.shape)}"]
    words += [f"{f.name}={getattr(x, f.name)}" for f in spec.statics if getattr(x, f.name) != f.default]
    if body == "[]" and inner.dtype != torch.get_default_dtype():
        words.append(f"dtype={inner.dtype}")
    return f"{type(x).__name__}({body}, {', '.join(words)}{repr_tail(x)})"


def _body(rows: Sequence[Tensor]) -> str:
    """The rows between brackets, a line or more for each."""
    edge = print_options.edgeitems
    long = sum(row.numel() for row in rows) > print_options.threshold
    hidden = len(rows) - 2 * edge if long or len(rows) > _MANY else 0
    with printing_with(threshold=0 if long else print_options.threshold):
        texts = [str(row) for row in (rows if hidden <= 0 else [*rows[:edge], *rows[-edge:]])]
    if hidden > 0:
        texts.insert(edge, f"... ({hidden} rows)")
    lines = ["  " + text.replace("\n", "\n  ") + ("," if text[:3] != "..." else "") for text in texts]
    return "[\n" + "\n".join(lines) + "\n]" if lines else "[]"
