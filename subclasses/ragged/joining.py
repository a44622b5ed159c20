"""``cat`` and ``stack``: along a feature of the entries, along the rows, or of the rows one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import first_ragged, matched_values, shown, spread
from subclasses.ragged.views import feature_place, place_of

aten = torch.ops.aten

# ---- above autograd: rows and entries --------------------------------------------------------------------------


@JaggedTensor.implements(torch.cat)
def _(func: Any, tensors: Sequence[Any], dim: int = 0, *, out: None = None) -> Any:
    x = first_ragged(tensors)
    outer = dim % x.dim()
    if out is not None or x.ragged_dim == 0 or outer not in (0, x.ragged_dim):
        return JaggedTensor.unruled(func, tensors, dim) if out is None else _refuse_out(func)
    parts = [t if isinstance(t, JaggedTensor) else _as_rows(func, x, t) for t in tensors]
    for part in parts:
        _check_joins(func, x, part, outer)
    return _join_rows(parts) if outer == 0 else _join_entries(parts)


@JaggedTensor.implements(torch.stack)
def _(func: Any, tensors: Sequence[Any], dim: int = 0, *, out: None = None) -> Any:
    return JaggedTensor.unruled(func, tensors, dim) if out is None else _refuse_out(func)


def _refuse_out(func: Any) -> Any:
    raise DispatchError(f"{func.__name__}: ragged tensors are joined into a new one, and not into an out=")


def _as_rows(func: Any, x: JaggedTensor, dense: Tensor) -> JaggedTensor:
    """A dense tensor as rows that all have its extent, beside those of ``x``."""
    if hasattr(type(dense), "__spec__") or dense.dim() != x.dim():
        raise DispatchError(
            f"{func.__name__}: {shown(x)} and {shown(dense)} do not join; expected ragged tensors, or dense ones of as "
            f"many dimensions"
        )
    rows, width = dense.shape[0], dense.shape[x.ragged_dim]
    starts = torch.arange(rows + 1, device=x.offsets.device) * width
    entries = dense.movedim(x.ragged_dim, 1).flatten(0, 1)
    return type(x)(x.trailing(entries), starts, ragged_dim=x.ragged_dim, max_length=width)


def _check_joins(func: Any, x: JaggedTensor, y: JaggedTensor, dim: int) -> None:
    """Raises unless entries or rows of ``y`` may follow those of ``x``."""
    alike = (y.dim(), y.ragged_dim) == (x.dim(), x.ragged_dim)
    free = (0, x.ragged_dim) if dim == 0 else (x.ragged_dim,)
    if not alike or any(
        m != n for d, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if d not in free
    ):
        raise DispatchError(f"{func.__name__}: {shown(x)} and {shown(y)} do not join along dimension {dim}")


def _join_rows(parts: Sequence[JaggedTensor]) -> JaggedTensor:
    """The rows of all, one after the other."""
    x = parts[0]
    place = x.ragged_dim - 1
    ends = list(accumulate((t.values.shape[place] for t in parts), initial=0))
    offsets = [t.offsets[:-1] + end for t, end in zip(parts, ends, strict=False)]
    offsets = torch.cat([*offsets, parts[-1].offsets[-1:] + ends[-2]])
    holes = any(t.lengths is not None for t in parts)
    return type(x)(
        torch.cat([t.unwrap("values") for t in parts], place),
        offsets,
        lengths=torch.cat([t.row_lengths() for t in parts]) if holes else None,
        ragged_dim=x.ragged_dim,
        max_length=reduce(torch.sym_max, [t.max_length for t in parts]),  # type: ignore[arg-type]
    )


def _join_entries(parts: Sequence[JaggedTensor]) -> JaggedTensor:
    """Each row with the entries of all, in their order."""
    x, rows = parts[0], [t.segments for t in parts]
    lengths = reduce(torch.add, (r.row_lengths for r in rows))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    total = sum(r.total for r in rows)
    like, first = x.leading(x.unwrap("values")), offsets[:-1]
    table = like.new_zeros(total + 1, *like.shape[1:])
    for t, r in zip(parts, rows, strict=True):
        entries = t.leading(t.unwrap("values"))
        # What belongs to no row is put behind all, and cut off.
        where = first.index_select(0, r.rows.clamp(max=max(r.count - 1, 0))) + r.positions
        where = where if r.exists is None else torch.where(r.exists, where, total)
        table, first = table.index_copy(0, where, entries), first + r.row_lengths
    holes = any(t.lengths is not None for t in parts)
    place = x.ragged_dim - 1
    return type(x)(
        table[:-1].movedim(0, place),
        offsets,
        lengths=lengths if holes else None,
        ragged_dim=x.ragged_dim,
        max_length=sum(t.max_length for t in parts),
    )


# ---- below autograd: along a feature ---------------------------------------------------------------------------


@JaggedTensor.implements(aten.cat.default)
def _(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    x = next(t for t in tensors if isinstance(t, JaggedTensor))
    place = feature_place(op, x, dim)
    return x.with_values(op([_values_beside(op, x, t, place) for t in tensors], place))


@JaggedTensor.implements(aten.stack.default)
def _(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    x = next(t for t in tensors if isinstance(t, JaggedTensor))
    place = place_of(op, x, dim, extra=1)
    if x.ragged_dim == 0 and place == 0:
        raise DispatchError(f"{op}: merged dimensions stay first; unmerge them by x.unflatten(0, (B, T))")
    values = op([_values_beside(op, x, t, None) for t in tensors], place)
    return x.with_values(values, x.ragged_dim + (place < x.ragged_dim))


def _values_beside(func: Any, x: JaggedTensor, t: Tensor, place: int | None) -> Tensor:
    """The values of one operand; a dense one (zeros, where a derivative is missing) is brought to the entries."""
    if isinstance(t, JaggedTensor):
        return matched_values(func, x, t)
    if t.dim() != x.dim():
        raise DispatchError(
            f"{func}: expected ragged tensors or dense ones of as many dimensions, got {shown(t)}"
        )
    values = spread(func, x, t)
    size = [values.shape[p] if p == place else n for p, n in enumerate(x.values.shape)]
    return values.expand(size)
