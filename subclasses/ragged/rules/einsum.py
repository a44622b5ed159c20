"""``einsum`` with at most one ragged dimension in the result.

A ragged operand has a letter for its rows, and a letter for the positions in them. If the result has both, and no dense
operand has one of them, the stored tensors are multiplied. Otherwise the product runs on tables with 0 where there is
no entry, and dense operands are masked too. So a contraction sums existing entries only.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import first_ragged, shown
from subclasses.ragged.registry import Rules

RULES = Rules()

# ---- letters ---------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """The letters of each operand and of the result of an equation, without an ellipsis."""

    inputs: list[str]
    output: str
    equation: str


def parse(equation: str, operands: Sequence[Tensor]) -> Terms:
    """Returns the letters of an equation, with the ellipsis expanded and an omitted result filled in.

    Raises:
        ValueError: the equation has another number of operands or dimensions.
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
            raise ValueError(
                f"einsum: {term!r} in {equation!r} does not fit a tensor of size {tuple(t.shape)}"
            )
        dots = "".join(free[len(free) - more :])
        widest = max(widest, dots, key=len)
        inputs.append(term.replace("...", dots))
    if arrow:
        return Terms(inputs, right.replace("...", widest), equation)
    letters = "".join(inputs)
    once = "".join(c for c in sorted(set(letters) - set(widest)) if letters.count(c) == 1)
    return Terms(inputs, widest + once, equation)


class Rows(NamedTuple):
    """The letters of the rows and of the positions in them; one letter for merged dimensions."""

    batch: str
    ragged: str


# ---- the rule --------------------------------------------------------------------------------------------------


@RULES.of(torch.einsum)
def _einsum(func: Any, equation: str, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    terms, layout = parse(equation, operands), first_ragged(operands).ragged_class
    row_letters = [_rows_of(layout, x, letters) for x, letters in zip(operands, terms.inputs, strict=True)]
    _check(equation, terms, operands, row_letters)
    aligned = _aligned(operands, row_letters)
    product = _on_entries if _stays_entrywise(terms, row_letters) else _on_tables
    return product(terms, aligned, row_letters)


def _rows_of(layout: Any, x: Any, letters: str) -> Rows | None:
    if not isinstance(x, layout):
        return None
    batch, ragged = x.row_dims
    return Rows(letters[batch], letters[ragged])


def _check(equation: str, terms: Terms, operands: Any, row_letters: list[Any]) -> None:
    """Raises if a product is undefined for rows, or has two ragged dimensions."""
    rows = [r for r in row_letters if r is not None]
    names = ", ".join(shown(x) for x in operands)
    doubled = any(
        r and (t.count(r.batch) > 1 or t.count(r.ragged) > 1)
        for t, r in zip(terms.inputs, row_letters, strict=True)
    )
    others = any(
        r is None and hasattr(type(x), "__spec__") for x, r in zip(operands, row_letters, strict=True)
    )
    ragged_letters = {r.ragged for r in rows}
    if (
        others
        or doubled
        or len({r.batch for r in rows}) > 1
        or any(r.batch in ragged_letters for r in rows if r.batch != r.ragged)
    ):
        raise DispatchError(
            f"einsum: {equation!r} of {names}: expected one letter for the rows of all ragged operands, and another "
            "for the places in them",
            code="argument-refused",
            hint="x.to_dense() gives a tensor without this limit",
        )
    ragged = [c for c in terms.output if c in ragged_letters]
    if len(ragged) > 1:
        raise DispatchError(
            f"einsum: {equation!r} of {names} would have two ragged dimensions",
            code="ragged-dims",
            hint="use F.scaled_dot_product_attention, or x.to_dense() with x.mask()",
        )


def _aligned(operands: Any, row_letters: list[Any]) -> list[Any]:
    """Returns operands with their entries at the same stored positions if their rows have the same letters."""
    first: dict[Rows, Any] = {}
    done = []
    for x, rows in zip(operands, row_letters, strict=True):
        done.append(x if rows is None or rows not in first else first[rows].alongside("einsum", x))
        if rows is not None:
            first.setdefault(rows, x)
    return done


def _stays_entrywise(terms: Terms, row_letters: list[Any]) -> bool:
    """Returns whether all ragged operands share their letters of rows, which are in the result and no dense operand."""
    rows = {r for r in row_letters if r is not None}
    (first, *more) = rows
    dense = "".join(t for t, r in zip(terms.inputs, row_letters, strict=True) if r is None)
    return not more and all(c in terms.output and c not in dense for c in first)


def _row_dims(x: Any, terms: Terms, rows: Rows) -> tuple[int, int]:
    """Returns the batch and the ragged dimension of the result."""
    batch, ragged = terms.output.index(rows.batch), terms.output.index(rows.ragged)
    if x.rows_first and batch != 0:
        raise DispatchError(
            f"einsum: the rows of {shown(x)} come first in the result as well",
            code="row-dims",
            hint="put their letter first there",
        )
    return batch, ragged


def _on_entries(terms: Terms, operands: list[Any], row_letters: list[Any]) -> Any:
    x, rows = next((x, r) for x, r in zip(operands, row_letters, strict=True) if r is not None)
    inputs, plain, gone = [], [], ""
    for t, letters, r in zip(operands, terms.inputs, row_letters, strict=True):
        if r is not None:
            stored = t.clean()
            gone, t = letters[: t.dim() - stored.dim()], stored
            letters = "".join(c for c in letters if c not in gone)
        inputs.append(letters)
        plain.append(t)
    output = "".join(c for c in terms.output if c not in gone)
    batch, ragged = _row_dims(x, terms, rows)
    return x.with_kept(torch.einsum(f"{','.join(inputs)}->{output}", *plain), ragged, batch)


def _on_tables(terms: Terms, operands: list[Any], row_letters: list[Any]) -> Any:
    of = {r: x for x, r in zip(operands, row_letters, strict=True) if r is not None}
    inputs, plain = [], []
    for t, letters, r in zip(operands, terms.inputs, row_letters, strict=True):
        if r is not None:
            t = t.to_dense()
        else:
            for rows, x in of.items():
                if rows.ragged in letters:
                    t, letters = _masked(terms, t, letters, rows, x.mask())
        inputs.append(letters)
        plain.append(t)
    table = torch.einsum(f"{','.join(inputs)}->{terms.output}", *plain)
    stays = next((r for r in of if r.ragged in terms.output), None)
    if stays is not None and stays.batch in terms.output:
        batch, ragged = _row_dims(of[stays], terms, stays)
        return of[stays].from_table(table, ragged, batch)
    (rows, *_) = of
    if stays is None and rows.batch in terms.output:
        return of[rows].per_row(table, terms.output.index(rows.batch))
    return table


def _masked(terms: Terms, t: Tensor, letters: str, rows: Rows, mask: Tensor) -> tuple[Tensor, str]:
    """Returns a dense operand with 0 where a row has no entry, and adds a dimension for the rows if it had none."""
    wanted = dict(zip(dict.fromkeys(rows), mask.shape, strict=True))
    for c, n in wanted.items():
        if c in letters and t.shape[letters.index(c)] not in (1, n):
            raise ValueError(
                f"einsum: {terms.equation!r}: expected the extent {n}, as of the ragged operand, or 1 for {c!r} of the "
                f"dense operand {letters!r}, got {shown(t)}"
            )
    if rows.batch not in letters:
        t, letters = t.unsqueeze(0), rows.batch + letters
    order = sorted(wanted, key=letters.index)
    mask = mask if order == list(wanted) else mask.mT
    mask = mask.reshape([wanted.get(c, 1) for c in letters])
    return torch.where(mask, t, 0), letters
