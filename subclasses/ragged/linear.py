"""Layers and matrix products of a ``JaggedTensor``: the rules of both layouts, on its values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.layers import Entrywise, implement_entrywise
from subclasses.ragged.rows import check_rows_match, shown

# ---- matrix products by row ------------------------------------------------------------------------------------


def _multiply_padded(func: Any, a: Any, b: Any) -> Any:
    """A product for each row, by padded tables: the ragged dimension is contracted, or stays where it is."""
    n = max(a.dim(), b.dim())
    ragged_a = a.ragged_dim if isinstance(a, JaggedTensor) else None
    ragged_b = b.ragged_dim if isinstance(b, JaggedTensor) else None
    if a.dim() != b.dim() or n < 3 or 0 in (ragged_a, ragged_b):
        raise DispatchError(
            f"{func.__name__}: {shown(a)} and {shown(b)}; expected as many dimensions, with the rows numbered before "
            f"the last two"
        )
    stay = [
        t for t, r, contracted in ((a, ragged_a, n - 1), (b, ragged_b, n - 2)) if r not in (None, contracted)
    ]
    if ragged_a is not None and ragged_b is not None:
        if (ragged_a, ragged_b) not in ((n - 1, n - 2), *((d, d) for d in range(1, n - 2))):
            raise DispatchError(
                f"{func.__name__}: the product of {shown(a)} and {shown(b)} would have two ragged dimensions; use "
                f"F.scaled_dot_product_attention, or x.to_dense() with x.mask()"
            )
        check_rows_match(func, a, b)
    elif not stay:
        raise DispatchError(
            f"{func.__name__}: {shown(a)} and {shown(b)} are contracted along rows of other lengths; select the "
            f"entries first"
        )
    width = max(t.max_length for t in (a, b) if isinstance(t, JaggedTensor))
    product = torch.matmul(_padded(a, width), _padded(b, width))
    if not stay:
        return product
    x = stay[0]
    return x.with_values(x.trailing(x.segments.unpad(product.movedim(x.ragged_dim, 1))))


def _padded(t: Tensor, width: Any) -> Tensor:
    """A ragged operand as a padded table of this width."""
    if not isinstance(t, JaggedTensor):
        return t
    missing = width - t.max_length
    return F.pad(t.to_dense(), [0, 0] * (t.dim() - 1 - t.ragged_dim) + [0, missing])


# ---- entries ---------------------------------------------------------------------------------------------------


def _clean(x: JaggedTensor) -> Tensor:
    differentiable = x.values.is_floating_point() or x.values.is_complex()
    return x.clean_values() if differentiable else x.kept(x.values)


# ---- the rules -------------------------------------------------------------------------------------------------

ENTRYWISE = Entrywise(
    rows=lambda x: (0, x.ragged_dim),
    gaps=lambda x: x.lengths is not None,
    clean=_clean,
    cut=lambda x, values: x.with_values(x.kept(values)),
    stored=lambda x: x.unwrap("values"),
    wrap=JaggedTensor.with_values,
    shown=shown,
)
implement_entrywise(JaggedTensor, ENTRYWISE, _multiply_padded)
