"""``cat`` and ``stack``: along features of the entries, along the ragged dimension, or along the batch dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import first_ragged, name_of, outer_dims, rows_stay, shown, unruled
from subclasses.ragged.indexing.views import dims_after_new, new_dim
from subclasses.ragged.registry import Rules

RULES = Rules()
aten = torch.ops.aten

# ---- above autograd: rows and entries --------------------------------------------------------------------------


@RULES.of(torch.cat)
def _cat(func: Any, tensors: Sequence[Any], dim: int = 0, *, out: None = None) -> Any:
    x = first_ragged(tensors)
    _check_no_out(func, x, out)
    (dim,) = outer_dims(func, x, dim)
    tensors = [t for t in tensors if not _is_nothing(t)]
    if rows_stay(x, [dim]) or (x.merged and x.rows_first):
        return unruled(func, [_joinable(func, x, t) for t in tensors], dim)
    parts = [t if isinstance(t, x.ragged_class) else x.as_rows(func, t) for t in tensors]
    for part in parts:
        _check_joins(func, x, part, dim)
    first = parts[0]
    return first.join_entries(parts) if dim == x.ragged_dim else first.join_rows(func, parts)


@RULES.of(torch.stack)
def _stack(func: Any, tensors: Sequence[Any], dim: int = 0, *, out: None = None) -> Any:
    x = first_ragged(tensors)
    _check_no_out(func, x, out)
    return unruled(func, [_joinable(func, x, t) for t in tensors], dim)


def _is_nothing(t: Any) -> bool:
    """Returns whether `torch.cat` skips an operand: `torch.tensor([])` joins tensors of any number of dimensions."""
    return not hasattr(type(t), "__spec__") and t.dim() == 1 and t.shape[0] == 0


def _check_no_out(func: Any, x: Any, out: Any) -> None:
    if out is not None:
        kind = "ragged" if x.rows_first else x.kind
        raise DispatchError(
            f"{name_of(func)}: {kind} tensors are joined into a new one, and not into an out=",
            code="argument-refused",
        )


def _check_joins(func: Any, x: Any, y: Any, dim: int) -> None:
    """Raises unless ``x`` and ``y`` join along ``dim``, the batch or the ragged dimension."""
    free = (x.ragged_dim,) if dim == x.ragged_dim else x.row_dims
    alike = (y.dim(), y.row_dims) == (x.dim(), x.row_dims) and not x.merged
    if not alike or any(
        m != n for d, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if d not in free
    ):
        raise DispatchError(
            f"{name_of(func)}: {shown(x)} and {shown(y)} do not join along dimension {dim}", code="rows-apart"
        )


@RULES.of(torch.dstack)
def _dstack(func: Any, tensors: Sequence[Any], *, out: None = None) -> Any:
    _check_no_out(func, first_ragged(tensors), out)
    return torch.cat(
        [torch.atleast_3d(t) if t.dim() < 2 else t[..., None] if t.dim() == 2 else t for t in tensors], 2
    )


def _joinable(func: Any, x: Any, t: Any) -> Any:
    """Returns an operand to join along a feature; a dense operand becomes ragged if its cotangent would be ragged."""
    if isinstance(t, x.ragged_class) or (x.rows_first and not t.requires_grad):
        return t
    _check_joined(func.__name__, x, t)
    if not x.rows_first:
        return x.like_dense(t)
    return x.from_table(t.expand([x.shape[d] if d in x.row_dims else n for d, n in enumerate(t.shape)]))


# ---- below autograd: along a feature ---------------------------------------------------------------------------


@RULES.of(aten.cat.default)
def _cat_features(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    x = first_ragged(tensors)
    dim = x.feature_dim(op, dim)
    return x.with_stored(op([_joined(op, x, t, x.stored_dim(dim)) for t in tensors], x.stored_dim(dim)))


@RULES.of(aten.stack.default)
def _stack_features(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    x = first_ragged(tensors)
    dim = new_dim(op, x, dim)
    stored = op([_joined(op, x, t, None) for t in tensors], x.stored_dim(dim))
    return x.with_stored(stored, *dims_after_new(x, dim))


def _joined(op: Any, x: Any, t: Any, dim: int | None) -> Tensor:
    """Returns the stored tensor of an operand, which may differ along ``dim``; a dense one is a zero derivative."""
    if isinstance(t, x.ragged_class):
        return x.beside(op, t) if x.rows_first else _check_joined(op, x, t)
    stored = _check_joined(op, x, t)
    return stored.expand([stored.shape[p] if p == dim else n for p, n in enumerate(x.stored.shape)])


def _check_joined(func: Any, x: Any, t: Any) -> Tensor:
    """Returns an operand that broadcasts against `stored`; raises for other dimensions, or tables of other widths."""
    if x.rows_first and t.dim() != x.dim():
        raise DispatchError(
            f"{name_of(func)}: expected ragged tensors or dense ones of as many dimensions as {shown(x)}, "
            f"got {shown(t)}",
            code="argument-refused",
        )
    stored = x.beside(func, t)
    if not x.rows_first and (t.dim() != x.dim() or any(t.shape[d] != x.shape[d] for d in x.row_dims)):
        raise DispatchError(
            f"{name_of(func)}: expected tables of the same rows and width as {shown(x)}, got {shown(t)}",
            code="rows-apart",
        )
    return stored
