"""Operands of ops on a ``JaggedTensor``: another one with the same rows, or a dense tensor that broadcasts.

Rows match if their lengths are equal; the padded extent ``T`` is not compared. The same offsets tensor proves it
without a comparison, in a graph too. Other lengths are compared: on the CPU at once, elsewhere by an asynchronous
assertion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses._torch_tracing import is_compiling_here
from subclasses.errors import DispatchError
from subclasses.ragged.base import name_of, shown

if TYPE_CHECKING:
    from subclasses.ragged.jagged import JaggedTensor

# ---- which rows match ------------------------------------------------------------------------------------------


def same_rows(x: JaggedTensor, y: JaggedTensor) -> bool:
    """Returns whether two tensors share offsets and lengths; False in Dynamo, which cannot compare identities."""
    same = x.offsets is y.offsets and x.lengths is y.lengths and x.count is y.count
    return same and not torch.compiler.is_dynamo_compiling()


def check_rows_match(func: Any, x: JaggedTensor, y: JaggedTensor) -> None:
    """Raises unless the rows of two tensors have the same lengths."""
    if same_rows(x, y):
        return
    check_counts_match(func, x, y)
    if x.lengths is not None or y.lengths is not None:
        check_lengths_match(func, x.counts, y.counts)
    elif x.offsets.shape != y.offsets.shape or _are_equal(func, x.offsets, y.offsets) is False:
        check_lengths_match(func, x.offsets.diff(), y.offsets.diff())  # which raises


def check_counts_match(func: Any, x: JaggedTensor, y: JaggedTensor) -> None:
    """Raises unless as many rows exist of two tensors."""
    if x.count is y.count:
        return
    if x.count is None or y.count is None:
        raise DispatchError(
            f"{name_of(func)}: expected a count of both ragged tensors or of none, got one for {shown(x)} or "
            f"{shown(y)} alone",
            code="rows-apart",
            hint="make both by JaggedTensor.pack with the same budget, or give both the same count",
        )
    if _are_equal(func, x.count, y.count) is False:
        raise ValueError(
            f"{name_of(func)}: ragged tensors combine when as many rows exist, got {int(x.count)} and {int(y.count)}"
        )


def check_lengths_match(func: Any, ours: Tensor, theirs: Tensor) -> None:
    """Raises unless two tensors ``[B]`` have the same lengths."""
    if ours.shape != theirs.shape:
        raise ValueError(
            f"{name_of(func)}: a ragged tensor of {ours.shape[0]} rows and one of {theirs.shape[0]} rows"
        )
    if _are_equal(func, ours, theirs) is False:
        raise ValueError(
            f"{name_of(func)}: ragged tensors combine when each row has the same length, got lengths "
            f"{ours.tolist()} and {theirs.tolist()}"
        )


def _are_equal(func: Any, ours: Tensor, theirs: Tensor) -> bool | None:
    """Returns whether rows match; None if the device asserts it later."""
    plain = type(ours) is Tensor and type(theirs) is Tensor and not is_compiling_here()
    if plain and not (ours.is_cuda or ours.is_meta):
        return torch.equal(ours, theirs)
    equal = (ours == theirs).all()
    torch.ops.aten._assert_async.msg(equal, f"{name_of(func)}: ragged tensors with rows of other lengths")
    return None


def check_shapes_match(func: Any, x: JaggedTensor, y: JaggedTensor) -> None:
    """Raises unless rows of two ragged tensors are at the same dimensions."""
    if x.ragged_dim != y.ragged_dim or x._raw_values.dim() != y._raw_values.dim():
        raise DispatchError(
            f"{name_of(func)}: ragged tensors combine when they have as many dimensions and are ragged along the same "
            f"one, got {shown(x)} and {shown(y)}",
            code="rows-apart",
            hint="add dimensions by unsqueeze, or swap them by transpose",
        )


# ---- ragged operands -------------------------------------------------------------------------------------------


def matched_values(func: Any, x: JaggedTensor, y: JaggedTensor) -> Tensor:
    """Returns the values of ``y`` at the stored positions of the entries of ``x``."""
    check_shapes_match(func, x, y)
    if same_rows(x, y):
        return y._raw_values
    check_rows_match(func, x, y)
    return _relaid_values(x, y, y._raw_values)


def relaid(x: JaggedTensor, func: Any, y: JaggedTensor) -> JaggedTensor:
    """Returns ``y`` with the rows and the outer extents of ``x``; differentiable."""
    check_shapes_match(func, x, y)
    if same_rows(x, y) and x.max_length == y.max_length:
        return y
    check_rows_match(func, x, y)
    return x.with_values(_relaid_values(x, y, y.unwrap("values")))


def alongside(x: JaggedTensor, func: Any, y: JaggedTensor) -> JaggedTensor:
    """Returns ``y`` with the rows of ``x``; its other dimensions may differ; differentiable."""
    if same_rows(x, y) and x.max_length == y.max_length:
        return y
    check_rows_match(func, x, y)
    if x.lengths is None and y.lengths is None:  # spare rows lie alike, too
        return x.with_values(y.unwrap("values"), y.ragged_dim)
    entries = y.entries().index_select(0, _positions_in(y, x))
    return x.with_entries(x.segments.keep(entries), y.ragged_dim)


def _relaid_values(x: JaggedTensor, y: JaggedTensor, values: Tensor) -> Tensor:
    """Moves values from the stored positions of the entries of ``y`` to the stored positions of ``x``."""
    if x.lengths is None and y.lengths is None:
        return values
    return x.kept(values.index_select(max(x.ragged_dim - 1, 0), _positions_in(y, x)))


def _positions_in(y: JaggedTensor, x: JaggedTensor) -> Tensor:
    """Returns ``[total]``: the index in ``y`` of each entry of ``x``; any index for a hole."""
    ours, theirs = x.segments, y.segments
    first = theirs.offsets.index_select(0, ours.rows.clamp(min=0, max=torch.sym_max(ours.count - 1, 0)))
    return (first + ours.positions).clamp(min=0, max=torch.sym_max(theirs.total - 1, 0))


# ---- a dense tensor that broadcasts ----------------------------------------------------------------------------


def spread(func: Any, x: JaggedTensor, y: Tensor) -> Tensor:
    """Returns the elements of a dense tensor at each entry of ``x``, ready to broadcast against the values."""
    if y.dim() == 0 or x.ragged_dim == 0:
        return y
    missing = x.rank - y.dim()
    if missing < 0:
        raise DispatchError(
            f"{name_of(func)}: a dense tensor of shape {tuple(y.shape)} has more dimensions than {shown(x)}",
            code="rows-apart",
        )
    ragged = x.ragged_dim - missing
    along_rows, along_ragged = _varies(y, -missing), _varies(y, ragged)
    if missing == 0 and not along_rows:
        y, ragged = y.squeeze(0), ragged - 1
    if not (along_rows or along_ragged):
        return y
    _check_extents(func, x, y, along_rows, ragged if along_ragged else None)
    if along_rows and along_ragged:
        return x.trailing(x.segments.unpad(y.movedim(ragged, 1)))
    if along_ragged:
        moved = y.movedim(ragged, 0)
        return x.segments.spread_positions(moved).movedim(0, ragged)
    return x.trailing(x.segments.spread_rows(y.squeeze(ragged)))


def _varies(y: Tensor, dim: int) -> bool:
    return dim >= 0 and y.size(dim) != 1


def _check_extents(func: Any, x: JaggedTensor, y: Tensor, along_rows: bool, ragged: int | None) -> None:
    wrong_rows = along_rows and y.size(0) != x.size(0)
    if wrong_rows or (ragged is not None and y.size(ragged) != x.max_length):
        raise ValueError(
            f"{name_of(func)}: a dense tensor of shape {tuple(y.shape)} does not broadcast against {shown(x)}, which "
            f"has {x.size(0)} rows and the ragged extent {x.max_length}"
        )


# ---- the interface ---------------------------------------------------------------------------------------------


def beside(x: JaggedTensor, op: Any, other: Any) -> Tensor:
    """Returns an operand that broadcasts against the values; below autograd."""
    other = _of_each_row(x, other)
    return matched_values(op, x, other) if isinstance(other, x.ragged_class) else spread(op, x, other)


def aligned(x: JaggedTensor, func: Any, other: Any) -> Tensor:
    """Converts an operand so that its cotangent has its own class; above autograd."""
    other = _of_each_row(x, other)
    if isinstance(other, x.ragged_class):
        lie_alike = (x.lengths is None and other.lengths is None) or same_rows(x, other)
        return other if lie_alike and other.max_length == x.max_length else relaid(x, func, other)
    return x.from_table(other) if other.requires_grad and _is_entrywise(x, other) else other


def _of_each_row(x: JaggedTensor, y: Any) -> Any:
    """Returns a ragged operand with an entry for each row of ``x``, as `per_row` makes it, as a plain tensor."""
    if x.count is None or not x.ragged_dim or not isinstance(y, x.ragged_class) or y.ragged_dim:
        return y
    return y.to_dense() if y.dim() == x.dim() and y.shape[0] == x.shape[0] else y


def _is_entrywise(x: JaggedTensor, y: Tensor) -> bool:
    """Returns whether autograd would pass the ragged cotangent to a dense operand, since it sums no dimension."""
    return y.dim() == x.rank and y.size(0) == x.size(0) and y.size(x.ragged_dim) == x.size(x.ragged_dim)


def operand(x: JaggedTensor, func: Any, other: Any) -> Any:
    """Returns an operand as a plain tensor that broadcasts against the values, with 1 in holes; above autograd.

    Ones are in the domain of every loss.
    """
    if other is x:
        return x.clean(1)
    other = _of_each_row(x, other)
    if isinstance(other, x.ragged_class):
        return x.kept(relaid(x, func, other).unwrap("values"), 1)
    if not isinstance(other, Tensor):
        return other
    beside = spread(func, x, other)
    whole = other.dim() == x.dim() and beside.dim() == x._raw_values.dim()
    return beside.expand_as(x._raw_values) if whole else beside


def moved(x: JaggedTensor, stored: Tensor) -> JaggedTensor:
    """Returns other values on another device, with the rows moved there."""
    device = stored.device
    lengths, count = (None if t is None else t.to(device) for t in (x.lengths, x.count))
    rows = {"lengths": lengths, "count": count, "ragged_dim": x.ragged_dim, "max_length": x.max_length}
    return type(x)(stored, x.offsets.to(device), **rows)


def check_factors(x: JaggedTensor, func: Any, a: Any, b: Any) -> None:
    """Raises unless two factors have as many dimensions, with the rows numbered before the last two."""
    n = max(a.dim(), b.dim())
    merged = any(isinstance(t, x.ragged_class) and t.ragged_dim == 0 for t in (a, b))
    if a.dim() != b.dim() or n < 3 or merged:
        raise DispatchError(
            f"{func.__name__}: {shown(a)} and {shown(b)}",
            code="rows-apart",
            hint="expected as many dimensions, with the rows numbered before the last two",
        )
