"""``einsum``: what a loop over the rows gives, where the result has one ragged dimension at most.

A ragged operand has a letter for its rows and one for the places in them. Where both stay, and no dense operand has one
of them, the entries are multiplied as they lie. Else all is done on tables with zeros where there is no entry, dense
operands masked alike, so that what a contraction adds up is what exists.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subclasses.errors import DispatchError

# ---- letters ---------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """An equation written out: the letters of each operand, and of the result."""

    inputs: list[str]
    output: str


def parse(equation: str, operands: Sequence[Tensor]) -> Terms:
    """The letters of an equation, with an ellipsis written out and an omitted result filled in.

    Raises:
        ValueError: it names another number of operands or dimensions.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise ValueError(f"einsum: {equation!r} names {len(terms)} operands, got {len(operands)}")
    free = [c for c in string.ascii_letters if c not in equation]
    inputs, widest = [], ""
    for term, t in zip(terms, operands, strict=True):
        more = t.dim() - len(term.replace("...", ""))
        if more < 0 or (more and "..." not in term):
            raise ValueError(f"einsum: {term!r} in {equation!r} stands for a tensor of size {tuple(t.shape)}")
        dots = "".join(free[len(free) - more :])
        widest = max(widest, dots, key=len)
        inputs.append(term.replace("...", dots))
    if arrow:
        return Terms(inputs, right.replace("...", widest))
    found = "".join(inputs)
    return Terms(inputs, widest + "".join(c for c in sorted(set(found) - set(widest)) if found.count(c) == 1))


class Rows(NamedTuple):
    """The letters of the rows and of the places in them; one letter for merged dimensions."""

    batch: str
    ragged: str


class Parts(NamedTuple):
    """What a layout does for a product.

    Attributes:
        places: ``(x)``: its batch and its ragged dimension, the same for merged ones.
        align: ``(x, y)``: ``y`` with its entries where those of ``x`` are, at dimensions of its own.
        entries: ``(x)``: the stored entries as a plain tensor, and the dimensions of the outer size that it lacks.
        with_entries: ``(x, values, place)``: what such entries make, rows at ``place``: batch and ragged dimension.
        table: ``(x)``: the outer tensor, with 0 where there is no entry.
        from_table: ``(x, table, place)``: the entries of a table with the rows of ``x``.
        per_row: ``(x, table, dim)``: a result with one entry for each row.
    """

    places: Callable[[Any], tuple[int, int]]
    align: Callable[[Any, Any], Any]
    entries: Callable[[Any], tuple[Tensor, Sequence[int]]]
    with_entries: Callable[[Any, Tensor, tuple[int, int]], Any]
    table: Callable[[Any], Tensor]
    from_table: Callable[[Any, Tensor, tuple[int, int]], Any]
    per_row: Callable[[Any, Tensor, int], Any]
    shown: Callable[[Any], str]


# ---- the rule --------------------------------------------------------------------------------------------------


def implement_einsum(cls: Any, parts: Parts) -> None:
    """The rule of ``torch.einsum`` for a layout."""

    @cls.implements(torch.einsum)
    def _(func: Any, equation: str, *operands: Any) -> Any:
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = tuple(operands[0])
        terms = parse(equation, operands)
        found = [_rows_of(cls, parts, x, letters) for x, letters in zip(operands, terms.inputs, strict=True)]
        _check(cls, parts, equation, terms, operands, found)
        aligned = _aligned(parts, operands, found)
        product = _on_entries if _stays_entrywise(terms, found) else _on_tables
        return product(parts, terms, aligned, found)


def _rows_of(cls: Any, parts: Parts, x: Any, letters: str) -> Rows | None:
    if not isinstance(x, cls):
        return None
    batch, ragged = parts.places(x)
    return Rows(letters[batch], letters[ragged])


def _check(cls: Any, parts: Parts, equation: str, terms: Terms, operands: Any, found: list[Any]) -> None:
    """Raises where a product has no meaning for rows, or two ragged dimensions."""
    rows = [r for r in found if r is not None]
    shown = ", ".join(parts.shown(x) for x in operands)
    doubled = any(
        r and (t.count(r.batch) > 1 or t.count(r.ragged) > 1)
        for t, r in zip(terms.inputs, found, strict=True)
    )
    others = any(r is None and hasattr(type(x), "__spec__") for x, r in zip(operands, found, strict=True))
    places = {r.ragged for r in rows}
    if (
        others
        or doubled
        or len({r.batch for r in rows}) > 1
        or any(r.batch in places for r in rows if r.batch != r.ragged)
    ):
        raise DispatchError(
            f"einsum: {equation!r} of {shown}: expected one letter for the rows of all ragged operands, and another "
            f"for the places in them; x.to_dense() gives a tensor without this limit"
        )
    ragged = [c for c in terms.output if c in places]
    if len(ragged) > 1:
        raise DispatchError(
            f"einsum: {equation!r} of {shown} would have two ragged dimensions; use F.scaled_dot_product_attention, "
            f"or x.to_dense() with x.mask()"
        )


def _aligned(parts: Parts, operands: Any, found: list[Any]) -> list[Any]:
    """Operands whose rows are named alike, with their entries at the same places."""
    first: dict[Rows, Any] = {}
    done = []
    for x, rows in zip(operands, found, strict=True):
        done.append(x if rows is None or rows not in first else parts.align(first[rows], x))
        if rows is not None:
            first.setdefault(rows, x)
    return done


def _stays_entrywise(terms: Terms, found: list[Any]) -> bool:
    """Whether rows and places stay, and are those of all ragged operands and of no dense one."""
    rows = {r for r in found if r is not None}
    (first, *more) = rows
    dense = "".join(t for t, r in zip(terms.inputs, found, strict=True) if r is None)
    return not more and all(c in terms.output and c not in dense for c in first)


def _place(terms: Terms, rows: Rows) -> tuple[int, int]:
    return terms.output.index(rows.batch), terms.output.index(rows.ragged)


def _on_entries(parts: Parts, terms: Terms, operands: list[Any], found: list[Any]) -> Any:
    x, rows = next((x, r) for x, r in zip(operands, found, strict=True) if r is not None)
    inputs, plain, gone = [], [], ""
    for t, letters, r in zip(operands, terms.inputs, found, strict=True):
        if r is not None:
            t, lacking = parts.entries(t)
            gone = "".join(letters[d] for d in lacking)
            letters = "".join(c for c in letters if c not in gone)
        inputs.append(letters)
        plain.append(t)
    output = "".join(c for c in terms.output if c not in gone)
    return parts.with_entries(x, torch.einsum(f"{','.join(inputs)}->{output}", *plain), _place(terms, rows))


def _on_tables(parts: Parts, terms: Terms, operands: list[Any], found: list[Any]) -> Any:
    of = {r: x for x, r in zip(operands, found, strict=True) if r is not None}
    inputs, plain = [], []
    for t, letters, r in zip(operands, terms.inputs, found, strict=True):
        if r is not None:
            t = parts.table(t)
        else:
            for rows, x in of.items():
                if rows.ragged in letters:
                    t, letters = _masked(t, letters, rows, x.mask())
        inputs.append(letters)
        plain.append(t)
    table = torch.einsum(f"{','.join(inputs)}->{terms.output}", *plain)
    stays = next((r for r in of if r.ragged in terms.output), None)
    if stays is not None and stays.batch in terms.output:
        return parts.from_table(of[stays], table, _place(terms, stays))
    (batch, *_) = of
    if stays is None and batch.batch in terms.output:
        return parts.per_row(of[batch], table, terms.output.index(batch.batch))
    return table


def _masked(t: Tensor, letters: str, rows: Rows, mask: Tensor) -> tuple[Tensor, str]:
    """A dense operand with 0 where a row has no entry, and a dimension for the rows if it had none."""
    if rows.batch not in letters:
        t, letters = t.unsqueeze(0), rows.batch + letters
    wanted = dict(zip(dict.fromkeys(rows), mask.shape, strict=True))
    if any(t.shape[letters.index(c)] not in (1, n) for c, n in wanted.items()):
        raise ValueError(
            f"einsum: a dense operand of size {tuple(t.shape)} beside rows of extents {tuple(wanted.values())}"
        )
    order = sorted(wanted, key=letters.index)
    mask = mask if order == list(wanted) else mask.mT
    mask = mask.reshape([wanted.get(c, 1) for c in letters])
    return torch.where(mask, t, 0), letters
