"""What stands beside a ragged tensor in one op: another with the same rows, or a dense tensor that broadcasts.

Rows match when their lengths are equal, never by the padded extent ``T``. The same offsets prove it at once, in a graph
too; otherwise lengths are compared, on the CPU at once and elsewhere by an assertion that nothing waits for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload
from subclasses.errors import DispatchError
from subclasses.ragged.jagged import JaggedTensor

# ---- which rows match ------------------------------------------------------------------------------------------


def same_rows(x: JaggedTensor, y: JaggedTensor) -> bool:
    """Whether two share what says where their rows lie; Dynamo knows too little about its inputs to tell."""
    return x.offsets is y.offsets and x.lengths is y.lengths and not torch.compiler.is_dynamo_compiling()


def check_rows_match(func: Any, x: JaggedTensor, y: JaggedTensor) -> None:
    """Raises unless each row of one is as long as that of the other."""
    if same_rows(x, y):
        return
    if x.lengths is None and y.lengths is None:
        ours, theirs = x.offsets, y.offsets
    else:
        ours, theirs = x.row_lengths(), y.row_lengths()
    if ours.shape != theirs.shape:
        counts = x.offsets.shape[0] - 1, y.offsets.shape[0] - 1
        raise ValueError(f"{name_of(func)}: a ragged tensor of {counts[0]} rows and one of {counts[1]} rows")
    if _are_equal(func, ours, theirs) is False:
        raise _other_lengths(func, x.row_lengths(), y.row_lengths())


def check_lengths_match(func: Any, ours: Tensor, theirs: Tensor) -> None:
    """Raises unless two tensors ``[B]`` hold the same lengths."""
    if ours.shape != theirs.shape:
        raise ValueError(
            f"{name_of(func)}: a ragged tensor of {ours.shape[0]} rows and one of {theirs.shape[0]} rows"
        )
    if _are_equal(func, ours, theirs) is False:
        raise _other_lengths(func, ours, theirs)


def _are_equal(func: Any, ours: Tensor, theirs: Tensor) -> bool | None:
    """Whether rows match; None where only the device will know, and asserts it."""
    if (
        torch.compiler.is_compiling()
        or type(ours) is not Tensor
        or type(theirs) is not Tensor
        or ours.is_cuda
        or ours.is_meta
    ):
        equal = (ours == theirs).all()
        torch.ops.aten._assert_async.msg(equal, f"{name_of(func)}: ragged tensors with rows of other lengths")
        return None
    return torch.equal(ours, theirs)


def _other_lengths(func: Any, ours: Tensor, theirs: Tensor) -> ValueError:
    return ValueError(
        f"{name_of(func)}: ragged tensors combine when each row has the same length, got lengths "
        f"{ours.tolist()} and {theirs.tolist()}"
    )


def matched_values(func: Any, x: JaggedTensor, y: JaggedTensor) -> Tensor:
    """The values of ``y`` where ``x`` has its entries."""
    check_shapes_match(func, x, y)
    if same_rows(x, y):
        return y.values
    check_rows_match(func, x, y)
    return y.values if x.lengths is None and y.lengths is None else _moved(x, y, y.values)


def relaid(func: Any, x: JaggedTensor, y: JaggedTensor) -> JaggedTensor:
    """``y`` with its entries where ``x`` has them, and its outer extents; differentiable."""
    check_shapes_match(func, x, y)
    check_rows_match(func, x, y)
    values = y.unwrap("values")
    return x.with_values(values if x.lengths is None and y.lengths is None else _moved(x, y, values))


def alongside(func: Any, x: JaggedTensor, y: JaggedTensor) -> JaggedTensor:
    """``y`` with its entries where those of ``x`` are, whatever its other dimensions; differentiable."""
    if same_rows(x, y) and x.max_length == y.max_length:
        return y
    check_rows_match(func, x, y)
    if x.lengths is None and y.lengths is None:
        return x.with_values(y.unwrap("values"), y.ragged_dim)
    ours, theirs = x.segments, y.segments
    first = theirs.offsets.index_select(0, ours.rows.clamp(max=max(ours.count - 1, 0)))
    index = (first + ours.positions).clamp(min=0, max=max(theirs.total - 1, 0))
    return x.with_entries(ours.keep(y.entries().index_select(0, index)), y.ragged_dim)


def _moved(x: JaggedTensor, y: JaggedTensor, values: Tensor) -> Tensor:
    """Values that lie as those of ``y``, to where those of ``x`` lie."""
    ours, theirs = x.segments, y.segments
    index = (
        theirs.offsets.index_select(0, ours.rows.clamp(min=0, max=max(ours.count - 1, 0))) + ours.positions
    )
    place = max(x.ragged_dim - 1, 0)
    moved = values.index_select(place, index.clamp(min=0, max=max(theirs.total - 1, 0)))
    return x.trailing(ours.keep(x.leading(moved)))


def check_shapes_match(func: Any, x: JaggedTensor, y: JaggedTensor) -> None:
    """Raises unless rows of two ragged tensors are at the same dimensions."""
    if x.ragged_dim != y.ragged_dim or x.values.dim() != y.values.dim():
        raise DispatchError(
            f"{name_of(func)}: ragged tensors combine when they have as many dimensions and are ragged along the same "
            f"one, got {shown(x)} and {shown(y)}; add dimensions by unsqueeze, or swap them by transpose"
        )


# ---- a dense tensor that broadcasts ----------------------------------------------------------------------------


def spread(func: Any, x: JaggedTensor, y: Tensor) -> Tensor:
    """What a dense tensor that broadcasts against ``x`` holds at each entry, ready to broadcast against the values."""
    if y.dim() == 0 or x.ragged_dim == 0:
        return y
    missing = x.dim() - y.dim()
    if missing < 0:
        raise DispatchError(
            f"{name_of(func)}: a dense tensor of shape {tuple(y.shape)} has more dimensions than {shown(x)}"
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


def is_entrywise(x: JaggedTensor, y: Tensor) -> bool:
    """Whether autograd would hand a dense operand a cotangent as it is, and so a ragged one: nothing is summed."""
    return y.dim() == x.dim() and y.size(0) == x.size(0) and y.size(x.ragged_dim) == x.size(x.ragged_dim)


def entries_of(x: JaggedTensor, y: Tensor) -> JaggedTensor:
    """A dense operand with a value for each entry as a ragged one with the rows of ``x``; differentiable in it."""
    if x.ragged_dim == 0:
        return x.with_values(y)
    return x.with_values(x.trailing(x.segments.unpad(y.movedim(x.ragged_dim, 1))))


def first_ragged(values: Any) -> Any:
    """The first ragged tensor among values."""
    return next(v for v in values if isinstance(v, JaggedTensor))


def values_beside(func: Any, x: JaggedTensor, a: Any) -> Any:
    """What stands beside ``x``, as it stands beside its values; differentiable, for rules above autograd."""
    if a is x:
        return x.unwrap("values")
    if isinstance(a, JaggedTensor):
        return relaid(func, x, a).unwrap("values")
    if not isinstance(a, Tensor):
        return a
    beside = spread(func, x, a)
    return beside.expand_as(x.values) if a.dim() == x.dim() and beside.dim() == x.values.dim() else beside


# ---- words -----------------------------------------------------------------------------------------------------


def name_of(func: Any) -> str:
    """A function or op in the words of an error."""
    return str(func) if isinstance(func, OpOverload) else getattr(func, "__name__", str(func))


def shown(x: Tensor) -> str:
    """A tensor in the words of an error."""
    ragged = f", ragged along {x.ragged_dim}" if isinstance(x, JaggedTensor) else ""
    return f"a {type(x).__name__} of size {tuple(x.shape)}{ragged}"
