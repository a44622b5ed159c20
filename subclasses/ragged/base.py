"""``RaggedTensor``: the interface of both layouts that rules call.

A layout keeps its entries in one inner tensor, called *stored* here: the ``values`` of a ``JaggedTensor``, the table
``padded`` of a ``PaddedTensor``. A *gap* is a stored element that belongs to no row: a hole, or padding. Rules
number the dimensions of the outer tensor, from the front; `stored_dim` returns the dimension of the stored tensor.

A rule in ``rules/`` or ``indexing/`` is one plain function on this interface. A rule for a Python-level function runs
above autograd and reads `clean` or `unwrap_stored`; a rule for an ``OpOverload`` runs below it and reads `stored`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from subclasses._torch import OpOverload, call_unruled
from subclasses.errors import one_of

# ---- the interface ---------------------------------------------------------------------------------------------


class RaggedTensor:
    """The interface of both layouts; a layout is declared as ``class JaggedTensor(JaggedInterface, TensorSubclass)``.

    The layout:
        ragged_class: the class of the layout; the class of a value may be a subclass of it.
        kind, index_hint, contraction_hint: words of its error messages.
        rows_first: whether the batch dimension is always dimension 0.
        has_gaps: whether there may be gaps.
        batch_dim, ragged_dim: the outer dimension that numbers the rows, and the outer dimension along which they
            differ.
        width: the outer extent of the ragged dimension where it is not merged, ``T``.
        counts: ``[B]``, how many entries of each row exist.

    Stored elements:
        stored: the inner tensor with the entries, raw.
        unwrap_stored(): the same, as a differentiable function of this tensor.
        clean(fill=0): the same with ``fill`` in gaps.
        kept(stored, fill=0): a tensor with the shape of `stored` and ``fill`` in gaps; a gap receives no cotangent.
        with_stored(stored, *rows): another stored tensor for the same rows; ``rows`` are the ragged and the batch
            dimension, if they change.
        with_kept(stored, *rows): the same with 0 in gaps, as `kept`.
        stored_dim(dim): the dimension of the stored tensor for an outer dimension; -1 if the stored tensor lacks it.

    Tables, plain tensors of the outer size:
        to_dense(fill=0): the table with ``fill`` where there is no entry.
        to_table(width): the same with 0, as wide as the table of another factor of a product.
        like_dense(table): the entries of a table; raises for another size.
        from_table(table, *rows): the same without a check.
        of_lengths(table, lengths): the first entries of each row of a table, ``lengths [B]`` of them.

    Operands:
        beside(op, other): an operand of a pointwise op that broadcasts against `stored`; below autograd.
        aligned(func, other): an operand, converted so that its cotangent has its own class; above autograd.
        operand(func, other): an operand as a plain tensor that broadcasts against `unwrap_stored`, with 1 in gaps;
            above autograd.
        alongside(func, other): a ragged operand with its entries stored at the positions of this tensor's entries; its
            other dimensions may differ.
        relaid(func, other): a ragged operand of the same dimensions with the offsets or lengths of this tensor.
        moved(stored): another stored tensor on another device, with the rows moved there.
        write(op, new, non_blocking): writes new elements to existing entries; below autograd.
        check_writable(func, *operands): raises if autograd could not record a write; above autograd.
        check_factors(func, a, b), check_same_rows(func, a, b): raise if two factors do not match.

    Reductions; ``dims`` has a dimension of the rows:
        sum_rows(stored, dims, keepdim, dtype): the sum over existing entries of a tensor shaped as `stored`.
        count_entries(dims, keepdim): how many entries each result has: an int, or a tensor that broadcasts.
        check_has_entries(func, dims): raises if a result would have no entry.
        batch_size(): the number of rows, or of the entries of merged dimensions.
        samples(fill): the entries with ``fill`` in gaps; dimension 0 numbers samples and dimension 1 stays.
        from_samples(table, *rows): the losses of the samples as a ragged tensor.

    Dimensions:
        feature_dim(func, dim): a dimension of the entries, counted from the front; raises for a dimension of the rows.

    Selection:
        select_row(row): one row, dense.
        take_rows(which): some rows, by a slice, a list, an index tensor or a mask ``[B]``.
        repeat_rows(repeats): each row ``repeats [B]`` times.
        slice_rows(part): the same slice of every row; negative bounds count from each row's own end.
        cut(first, lengths, width): the entries of each row from ``first [B]`` on, ``lengths [B]`` of them.
        select_position(position), take_places(positions): the entries at one position, or at several, of every row,
            dense.
        take_pairs(rows, positions, index): single entries by the numbers of rows and the positions in them, dense.
        gather_index(func, index): positions in the rows as an index of `stored`; asserts that the rows have them.
        pick(func, mask): the entries of each row that a ragged mask selects, ragged again.
        pick_together(index): elements by several index tensors for the features; only where rows come first.
        rearranged(source): the entries of each row in another order; ``source(position, length)`` returns the position
            to read an entry from.
        with_written(func, index, value), with_put(func, indices, values, accumulate): this tensor with other entries.

    Joining:
        as_rows(func, dense): a dense tensor as rows of equal length.
        join_rows(func, parts), join_entries(parts): the rows of all parts; each row with the entries of all parts.
    """

    _is_ragged = True

    @property
    def merged(self: Any) -> bool:
        """Whether the batch and the ragged dimension are merged."""
        return self.ragged_dim == self.batch_dim

    @property
    def rank(self: Any) -> int:
        """The number of outer dimensions, without the call of ``__torch_function__`` that ``x.dim()`` makes."""
        return self.stored.dim() - self.stored_dim(0)

    @property
    def row_dims(self: Any) -> tuple[int, int]:
        """The batch and the ragged dimension."""
        return self.batch_dim, self.ragged_dim

    def wrap_cotangent(self: Any, cotangent: Tensor) -> Any:
        """Returns a dense cotangent as a ragged one, with its values at existing entries."""
        return self.like_dense(cotangent.expand(self.shape))

    def leader(self, values: Sequence[Any]) -> Any:
        """Returns the operand whose rows the other operands match; this tensor is the first ragged operand."""
        return self

    def per_row(self, dense: Tensor, dim: int) -> Tensor:
        """Returns a result with one entry for each row along ``dim``; a padded batch may have additional rows."""
        return dense

    def check_first(self, op: Any) -> None:
        """Raises if no other dimension may become dimension 0."""

    def slice_below(self, op: Any, dim: int, start: Any, end: Any, step: int) -> Any:
        """Returns a slice of rows below autograd; None for a slice of features."""

    def check_numbered(self, func: Any, dims: Sequence[int]) -> None:
        """Raises if a result would number stored elements that have gaps between them."""


# ---- rows and dimensions ---------------------------------------------------------------------------------------


def is_ragged(x: Any) -> bool:
    """Whether a value is a ragged tensor of either layout."""
    return isinstance(x, RaggedTensor)


def first_ragged(values: Sequence[Any]) -> Any:
    """Returns the ragged operand whose rows the other operands match."""
    for v in values:
        if isinstance(v, RaggedTensor):
            return v.leader(values)
    raise TypeError("expected a ragged tensor among the operands")


def unruled(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function without its rule, after the rule has converted the arguments."""
    return call_unruled(func, (RaggedTensor,), args, kwargs)


def outer_dims(func: Any, x: Any, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns dimensions counted from the front; None or an empty list means all.

    Raises:
        IndexError: there is no such dimension, or a dimension is repeated.
    """
    n = x.rank
    if isinstance(dim, int) and -n <= dim < n:
        return (dim % n,)
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(n))
    given = [dim] if isinstance(dim, int) else list(dim)
    outer = tuple(d % n for d in given if -n <= d < n)
    if len(set(outer)) < len(given):
        raise IndexError(f"{name_of(func)}: expected distinct dimensions of {shown(x)}, got {given}")
    return outer


def rows_stay(x: Any, dims: Sequence[int]) -> bool:
    """Returns whether all ``dims`` are dimensions of an entry, so that a result without them has the rows of ``x``."""
    return x.ragged_dim not in dims and x.batch_dim not in dims


def without(x: Any, stored: Tensor, gone: Sequence[int]) -> Any:
    """Returns stored elements that lack the outer dimensions ``gone`` of the entries, with the rows of ``x``."""
    if not gone:
        return x.with_stored(stored)
    ragged, batch = (d - sum(g < d for g in gone) for d in (x.ragged_dim, x.batch_dim))
    return x.with_stored(stored, ragged, batch)


# ---- texts of errors -------------------------------------------------------------------------------------------


def name_of(func: Any) -> str:
    """Returns the name of a function or op for an error."""
    return str(func) if isinstance(func, OpOverload) else getattr(func, "__name__", str(func))


def shown(x: Any) -> str:
    """Returns the description of a value for an error."""
    text = f"{one_of(type(x))}"
    if is_ragged(x):
        rows = "" if x.rows_first else f", rows along {x.batch_dim}"
        return f"{text} of size {tuple(x.shape)}{rows}, ragged along {x.ragged_dim}"
    return f"{text} of size {tuple(x.shape)}" if isinstance(x, Tensor) else text
