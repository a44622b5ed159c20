"""What stands beside a padded tensor in one op: another with the same rows, or a dense tensor that broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.padded.tensor import PaddedTensor, widen
from subclasses.ragged.rows import check_lengths_match, name_of

# ---- dimensions ------------------------------------------------------------------------------------------------


def outer_dims(func: Any, x: PaddedTensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """The dimensions that are meant, counted from the front; none given means all.

    Raises:
        IndexError: there is no such dimension, or it is named twice.
    """
    given = (
        [dim] if isinstance(dim, int) else list(range(x.dim())) if dim is None or not len(dim) else list(dim)
    )
    outer = tuple(d % x.dim() for d in given if -x.dim() <= d < x.dim())
    if len(set(outer)) < len(given):
        raise IndexError(f"{name_of(func)}: expected distinct dimensions of {shown(x)}, got {given}")
    return outer


def rows_stay(x: PaddedTensor, dims: Sequence[int]) -> bool:
    """Whether dimensions are those of an entry, so that a result without them is ragged as its argument."""
    return x.ragged_dim not in dims and x.batch_dim not in dims


def check_numbered(func: Any, x: PaddedTensor, dims: Sequence[int]) -> None:
    """Raises where a place would be numbered among the entries of several rows: their padding lies between them."""
    if x.merged and x.ragged_dim in dims and x.lengths.shape[0] != 1:
        raise DispatchError(
            f"{name_of(func)}: an order of merged rows has no place in {shown(x)}; unmerge them by "
            f"x.unflatten({x.ragged_dim}, (B, T)), or use x.to_jagged()"
        )


def without(x: PaddedTensor, padded: Tensor, gone: Sequence[int]) -> PaddedTensor:
    """A table from which dimensions of the entries are gone."""

    def place(dim: int) -> int:
        return dim - sum(d < dim for d in gone)

    return x.with_padded(padded, place(x.ragged_dim), place(x.batch_dim))


def entry_per_row(x: PaddedTensor, dims: Sequence[int], keepdim: bool, result: Any) -> Any:
    """What a reduction over ``dims`` gave; where only rows are left, those that the batch has not do not exist."""
    if x.ragged_dim not in dims or x.batch_dim in dims:
        return result
    place = x.batch_dim - (0 if keepdim else sum(d < x.batch_dim for d in dims))
    if isinstance(result, Tensor):
        return x.per_row(result, place)
    return type(result)(tuple(x.per_row(part, place) for part in result))


# ---- which rows match ------------------------------------------------------------------------------------------


def first_padded(values: Any) -> Any:
    """The first padded tensor among values, if there is one with rows; beside it another may have an entry per row."""
    found = [v for v in values if isinstance(v, PaddedTensor)]
    return next((v for v in found if not v.merged), found[0])


def as_padded(x: Any) -> PaddedTensor:
    """What a rule gave, for type checkers: a function of padded tensors is said to return a plain one."""
    return x


def check_rows_match(func: Any, x: PaddedTensor, y: PaddedTensor) -> None:
    """Raises unless each row of one is as long as that of the other; nothing waits for a GPU."""
    if x.lengths is not y.lengths or torch.compiler.is_dynamo_compiling():
        check_lengths_match(func, x.lengths, y.lengths)


def alongside(func: Any, x: PaddedTensor, y: PaddedTensor) -> PaddedTensor:
    """``y`` in a table as wide as that of ``x``, whose rows it has, whatever its other dimensions; differentiable."""
    check_rows_match(func, x, y)
    return as_wide(x, y)


def check_fits(func: Any, x: PaddedTensor, y: Tensor) -> None:
    """Raises unless ``y`` may stand beside ``x``: the same rows, or a dense tensor that broadcasts."""
    if isinstance(y, PaddedTensor):
        if (y.dim(), y.ragged_dim, y.batch_dim) != (x.dim(), x.ragged_dim, x.batch_dim):
            raise DispatchError(
                f"{name_of(func)}: padded tensors combine when they have as many dimensions and their rows at the "
                f"same ones, got {shown(x)} and {shown(y)}; add dimensions by unsqueeze, or swap them by transpose"
            )
        if 1 in (x.lengths.shape[0], y.lengths.shape[0]) and x.lengths.shape != y.lengths.shape:
            raise DispatchError(f"{name_of(func)}: a single row is not repeated: {shown(x)} and {shown(y)}")
        check_rows_match(func, x, y)
        return
    missing = x.dim() - y.dim()
    if missing < 0 or hasattr(type(y), "__spec__"):
        raise DispatchError(
            f"{name_of(func)}: {shown(y)} beside {shown(x)}; expected a dense tensor that broadcasts against it"
        )
    for dim in (x.ragged_dim, x.batch_dim):
        if dim >= missing and y.size(dim - missing) != 1 and y.size(dim - missing) != x.size(dim):
            raise ValueError(f"{name_of(func)}: {shown(y)} does not broadcast against {shown(x)}")


def aligned(func: Any, x: PaddedTensor, y: Tensor) -> Tensor:
    """An operand beside ``x`` such that a cotangent comes back to it as what it is; differentiable.

    A dense operand with a value for each entry would get a ragged cotangent, since nothing is summed: it is made a
    ragged one with the rows of ``x``. One that broadcasts gets a sum over what exists.
    """
    if has_entry_per_row(x, y):
        return y.to_dense()
    check_fits(func, x, y)
    if isinstance(y, PaddedTensor):
        return as_wide(x, y)
    missing = x.dim() - y.dim()
    if not y.requires_grad or min(x.ragged_dim, x.batch_dim) < missing:
        return y
    if any(y.size(d - missing) != x.size(d) for d in (x.ragged_dim, x.batch_dim)):
        return y
    return x.like_dense(y[(None,) * missing])


def has_entry_per_row(x: PaddedTensor, y: Tensor) -> bool:
    """Whether ``y`` has an entry for each row of ``x``: what a reduction gave, where the batch is padded."""
    return (
        isinstance(y, PaddedTensor)
        and y.merged
        and x.row_count is not None
        and (y.dim(), y.ragged_dim, y.size(y.ragged_dim)) == (x.dim(), x.batch_dim, x.size(x.batch_dim))
        and not x.merged
    )


def as_wide(x: PaddedTensor, y: PaddedTensor) -> PaddedTensor:
    """``y`` in a table as wide as that of ``x``, whose rows it has; differentiable."""
    if y.width == x.width:
        return y
    if y.merged:
        return as_wide(x.unmerged(), y.unmerged()).merge()
    return y.with_padded(widen(y.unwrap("padded"), y.ragged_dim, x.width))


def table_beside(func: Any, x: PaddedTensor, a: Any, fill: float | int = 0) -> Any:
    """What stands beside ``x`` as a plain tensor, with ``fill`` in the padding; for rules above autograd."""
    if not isinstance(a, Tensor):
        return a
    a = a if a is x else aligned(func, x, a)
    return a.to_dense(fill) if isinstance(a, PaddedTensor) else a


# ---- words -----------------------------------------------------------------------------------------------------


def shown(x: Any) -> str:
    """A tensor in the words of an error."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    rows = f", rows along {x.batch_dim}, ragged along {x.ragged_dim}" if isinstance(x, PaddedTensor) else ""
    return f"a {type(x).__name__} of size {tuple(x.shape)}{rows}"
