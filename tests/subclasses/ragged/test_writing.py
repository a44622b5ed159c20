"""Writing into rows, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch

from subclasses import DispatchError
from subclasses.ragged import PaddedTensor
from tests.subclasses.ragged.judge import (
    LAYOUTS,
    WAYS,
    alike,
    classes,
    desugared,
    judged,
    make,
    make_batch,
    pairs_of,
    refused,
)

LENGTHS = [3, 2, 5, 1]
ALL = slice(None)

NUMBER = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
ENTRY = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
EACH = torch.arange(16.0, dtype=torch.float64).view(4, 4).requires_grad_()

# An index, what is written, and what that is for each row: an index of it and a value, or None.
CASES = {
    "a row": ((0,), NUMBER, lambda i, v: (ALL, v) if i == 0 else None),
    "rows": ((slice(1, 3),), ENTRY, lambda i, v: (ALL, v) if i in (1, 2) else None),
    "listed rows": (([2, 0],), ENTRY, lambda i, v: (ALL, v) if i in (0, 2) else None),
    "the first entries": ((ALL, 0), EACH, lambda i, v: (0, v[i])),
    "the last entries": ((ALL, -1), EACH, lambda i, v: (-1, v[i])),
    "the same last entries": ((ALL, -1), ENTRY, lambda i, v: (-1, v)),
    "a row's last": ((1, -1), ENTRY, lambda i, v: (-1, v) if i == 1 else None),
    "from the second on": ((ALL, slice(1, None)), ENTRY, lambda i, v: (slice(1, None), v)),
    "between": ((ALL, slice(1, 3)), NUMBER, lambda i, v: (slice(1, 3), v)),
    "the last two": ((ALL, slice(-2, None)), NUMBER, lambda i, v: (slice(-2, None), v)),
    "listed places": ((ALL, [0, -1]), NUMBER, lambda i, v: ([0, -1], v)),
    "a feature": ((..., 1), NUMBER, lambda i, v: ((ALL, 1), v)),
    "features": ((..., slice(1, 3)), ENTRY, lambda i, v: ((ALL, slice(1, 3)), v[1:3])),
    "listed features": ((..., [0, 2]), NUMBER, lambda i, v: ((ALL, [0, 2]), v)),
    "all": ((ALL,), ENTRY, lambda i, v: (ALL, v)),
    "pairs": (
        (torch.tensor([0, 2]), torch.tensor([1, 4])),
        EACH,
        lambda i, v: {0: (1, v[0]), 2: (4, v[1])}.get(i),
    ),
    "the same pairs": (
        (torch.tensor([0, 1]), torch.tensor([2, -1])),
        ENTRY,
        lambda i, v: {0: (2, v), 1: (-1, v)}.get(i),
    ),
}
# What is read by an index, doubled, is written by it.
CASES |= {
    f"doubled, {name}": (
        index,
        None,
        lambda i, v, rows=rows, of_row=of_row: (of_row, v) if i in rows else None,
    )
    for name, (index, rows, of_row) in {
        "a row": ((1,), (1,), ALL),
        "the last row, after an ellipsis": ((-1, ...), (3,), ALL),
        "some features of a row": ((2, ALL, slice(1, 3)), (2,), (ALL, slice(1, 3))),
        "one feature of a row": ((0, ALL, 1), (0,), (ALL, 1)),
        "features of rows": (([0, 2], ALL, [1, 3]), (0, 2), (ALL, [1, 3])),
        "features of the last entries of rows": (([0, 2], -1, [1, 3]), (0, 2), (-1, [1, 3])),
        "features of the last entries": ((ALL, -1, [0, 1, 3]), range(4), (-1, [0, 1, 3])),
        "features of one row": ((2, ALL, [1, 3]), (2,), (ALL, [1, 3])),
    }.items()
}
CASES |= {
    "features of rows": (
        ([0, 2], ALL, [1, 3]),
        NUMBER,
        lambda i, v: ((ALL, [1, 3]), v) if i in (0, 2) else None,
    ),
    "features of last entries": ((ALL, -1, [0, 1, 3]), NUMBER, lambda i, v: ((-1, [0, 1, 3]), v)),
}
SHOWN = {"features": lambda v: v[1:3], "pairs": lambda v: v[:2]}
# A table refuses what is not at one place of all rows; the size of what is read may depend on the data.
REFUSED_BY_TABLES = ("the last two", "listed places")


def by_index(name):
    """A write by an index to a copy, and the same write to each row."""
    index, value, on_row = CASES[name]

    def write(x, *v):
        y = x * 1
        y[index] = SHOWN.get(name, lambda v: v)(*v) if v else y[index] * 2
        return y

    def write_row(row, i, v=None):
        y = row * 1
        if (where := on_row(i, v)) is not None:
            y[where[0]] = y[where[0]] * 2 if v is None else where[1]
        return y

    return (write, write_row) if value is None else (write, write_row, value)


BY_INDEX = {name: by_index(name) for name in CASES}
ON_TABLES = {name: case for name, case in BY_INDEX.items() if name not in REFUSED_BY_TABLES}
IN_GRAPHS = {name: case for name, case in ON_TABLES.items() if "row" not in name}
# In a graph, a row that an ellipsis follows is a view beside the table that is written to, which is refused.
ROWS_OF_TABLES = {
    name: case
    for name, case in ON_TABLES.items()
    if name.startswith("doubled, ") and "rows" not in name and "ellipsis" not in name
}

test_by_index = judged(BY_INDEX, pairs_of(LAYOUTS[:2]), sweep=9, lengths=LENGTHS)
test_by_index_on_tables = judged(ON_TABLES, pairs_of(["padded"]), sweep=9, lengths=LENGTHS)
test_by_index_in_graphs = judged(
    IN_GRAPHS, [*pairs_of(LAYOUTS, [desugared]), ("padded", WAYS[1])], sweep=30, lengths=LENGTHS
)

test_rows_of_tables_in_graphs = judged(ROWS_OF_TABLES, [("padded", desugared)], sweep=6, lengths=LENGTHS)


def by_mask(mask, written, value):
    """A write by a mask to a copy."""

    def write(t, *rest):
        y = t * 1
        y[mask(t.detach())] = written(t, rest[-1])
        return y

    return write, write, value


BY_MASK = {
    "elements": by_mask(lambda t: t > 0, lambda t, v: v, NUMBER),
    "entries": by_mask(lambda t: t.sum(-1) > 0, lambda t, v: v, NUMBER),
    "entries by what was picked": by_mask(lambda t: t.sum(-1) > 0, lambda t, v: t[t.sum(-1) > 0] * v, NUMBER),
    "entries by an entry": by_mask(lambda t: t.sum(-1) > 0, lambda t, v: v, ENTRY),
    "elements by what was picked": by_mask(lambda t: t > 0, lambda t, v: t[t > 0] * 2, NUMBER),
}
# A table takes a number, or the entries that the mask picks.
test_by_mask = judged(BY_MASK, pairs_of(LAYOUTS[:2]), sweep=3, lengths=LENGTHS)
test_by_mask_on_tables = judged(
    dict(list(BY_MASK.items())[:3]), pairs_of(["padded"], WAYS), sweep=3, lengths=LENGTHS
)


def clear(x):
    y = x * 1
    y[y > 0] = 0
    return y


test_a_number_by_mask_in_a_graph = judged({"0": alike(clear)}, pairs_of(["holes"], WAYS), sweep=3)


WRITES = {  # of a table and a value, and what it does to each row
    "rows like them": (lambda x, v: x.__setitem__(ALL, x.clone() * v), lambda r, i, v: r.copy_(r.clone() * v)),
    "a part of them": (lambda x, v: x.__setitem__((ALL, slice(1, None)), x.clone()[:, 1:] * v),
                       lambda r, i, v: r[1:].copy_(r.clone()[1:] * v)),
    "through a slice": (lambda x, v: x[:, 1:3].mul_(2), lambda r, i, v: r[1:3].mul_(2)),
    "through rows": (lambda x, v: x[1:].mul_(v), lambda r, i, v: r.mul_(v) if i else r),
    "through a feature": (lambda x, v: x[..., 1].mul_(2), lambda r, i, v: r[:, 1].mul_(2)),
    "through merged rows": (lambda x, v: x.view(-1, 4).mul_(v), lambda r, i, v: r.mul_(v)),
    "through parts": (lambda x, v: x.split(2)[1].mul_(v), lambda r, i, v: r.mul_(v) if i == 2 else r),
    "added to a slice": (lambda x, v: x[:, 1:].__iadd__(1), lambda r, i, v: r[1:].add_(1)),
    "index_put": (lambda x, v: x.index_put_((torch.tensor([0, 1]), torch.tensor([2, -1])), v),
                  lambda r, i, v: r[2 if i == 0 else -1].copy_(v) if i < 2 else r),
    "added": (lambda x, v: x.index_put_((torch.tensor([1, 1]), torch.tensor([2, 2])), v, accumulate=True),
              lambda r, i, v: r[2].add_(2 * v) if i == 1 else r),
}  # fmt: skip


def on_a_copy(write):
    """A write to a copy, which is returned."""

    def run(t, *rest):
        t = t * 1
        write(t, *rest)
        return t

    return run


test_writes = judged(
    {name: (on_a_copy(f), on_a_copy(on_row), (4,)) for name, (f, on_row) in WRITES.items()},
    pairs_of(["padded"], WAYS),
    sweep=10,
    lengths=[3, 7, 1],
)


test_writes_by_index_tensors = judged(
    {name: (on_a_copy(f), on_a_copy(on_row), (4,)) for name, (f, on_row) in list(WRITES.items())[-2:]},
    pairs_of(LAYOUTS[:2]),
    lengths=[3, 7, 1],
)


def test_values_elsewhere_stay():
    x = make_batch("holes", LENGTHS).x.detach()
    x[:, :] = 0
    assert x.values.isnan().any() and not any(row.any() for row in x.to_tensors())


# ---- refused ---------------------------------------------------------------------------------------------------

PLAIN = torch.zeros(4, 5, 4, dtype=torch.float64)
OUT_OF_RANGE = torch.tensor([1]), torch.tensor([2])

test_what_jagged_rows_refuse = refused(
    {
        "rows of others": (
            lambda x: x.__setitem__(slice(1, None), x[:3]),
            ValueError,
            r"got lengths \[2, 5, 1\] and \[3, 2, 5\]",
        ),
        "rows at a place": (
            lambda x: x.__setitem__((ALL, 0), x.clone()),
            DispatchError,
            "expected a dense value for this index",
        ),
        "a place too far": (
            lambda x: x.__setitem__((ALL, 2), 0),
            IndexError,
            r"out of bounds for rows \[1, 3\]",
        ),
        "rows into a plain tensor": (
            lambda x: PLAIN.__setitem__(ALL, x),
            DispatchError,
            "cannot write a JaggedTensor",
        ),
        "an entry too far": (lambda x: x.__setitem__(OUT_OF_RANGE, 0), RuntimeError, "too short"),
    },
    ["back to back"],
    lengths=LENGTHS,
)
test_what_tables_refuse = refused(
    {
        name: (f, (DispatchError, ValueError, IndexError), r"[Pp]added|lengths|x\[mask\]")
        for name, f in {
            "the last two": lambda x: x.__setitem__((ALL, slice(-2, None)), 1.0),
            "listed places": lambda x: x.__setitem__((ALL, [0, 1]), 1.0),
            "a value of another size": lambda x: x.__setitem__(x > 0, torch.ones(3)),
            "a mask of other rows": lambda x: x.__setitem__(x[:, :2] > 0, 1.0),
            "a part by all": lambda x: x.__setitem__((ALL, slice(None, 2)), x),
            "merged entries": lambda x: x.flatten(0, 1).__setitem__(slice(1, 2), 1.0),
            "a table into a plain tensor": lambda x: PLAIN.__setitem__(ALL, x),
            "a mask of a plain tensor": lambda x: PLAIN[x > 0],
            "a plain mask": lambda x: x[PLAIN > 0],
            "a dimension too many": lambda x: x[:, :, :, 1],
            "a merged entry": lambda x: x.flatten(0, 1)[2],
            "backwards": lambda x: x[:, ::-1],
            "splits of other sizes": lambda x: x.split([2, 3], 1),
            "a row of another length": lambda x: x.__setitem__(0, torch.zeros(4, 4)),
        }.items()
    },
    ["padded"],
    lengths=LENGTHS,
    width=5,
)


def test_a_plain_tensor_stays_as_it_is():
    for layout in LAYOUTS:
        with pytest.raises(DispatchError):
            PLAIN[ALL] = make(layout, LENGTHS, width=5).x
    assert not PLAIN.any()


# ---- numbers as tensors, beside index tensors ------------------------------------------------------------------

SHORT = (3, 1, 2)
PICKED = {
    "a row and a place": (torch.tensor(2), torch.tensor(-1)),
    "a row and places": (torch.tensor(2), torch.tensor([0, -1])),
    "rows and a place": (torch.tensor([0, 2]), torch.tensor(-1)),
    "one row and a place": (torch.tensor([1]), torch.tensor(-1)),
    "rows, a place and features": (torch.tensor([0, 2]), torch.tensor(-1), torch.tensor([3, 1])),
    "rows and places": (torch.tensor([1, 2]), torch.tensor([-1, 1])),
}


def written_by_put(x, index, value):
    return x.index_put(index, value)


def written_in_place(x, index, value):
    return x.detach().clone().index_put_(index, value)


def added(x, index, value):
    return x.index_put(index, value, accumulate=True)


def written_by_index(x, index, value):
    x = x.detach().clone()
    x[index] = value
    return x


def short_rows():
    return [torch.randn(n, 4, dtype=torch.float64) for n in SHORT]


@classes
@pytest.mark.parametrize("write", [written_by_put, written_in_place, added, written_by_index])
@pytest.mark.parametrize("name", PICKED)
def test_numbers_that_are_tensors(name, write, cls):
    """They go together with index tensors, as in a loop over what is picked."""
    index, rows = PICKED[name], short_rows()
    x = cls.from_tensors(rows)
    if write is written_by_index and len(index) == 3:
        pytest.skip("x[rows, place, features] has features of each row")
    together = torch.broadcast_tensors(*index)
    value = torch.randn(*together[0].shape, *([] if len(index) == 3 else [4]), dtype=torch.float64)
    expected = [row.clone() for row in rows]
    for (row, *where), new in zip(
        zip(*(i.flatten().tolist() for i in together), strict=True),
        value.view(together[0].numel(), -1),
        strict=True,
    ):
        old = expected[row][tuple(where)] if write is added else 0
        expected[row][tuple(where)] = old + new.view(new.shape[0] if len(index) == 2 else ())
    torch.testing.assert_close(write(x, index, value).to_tensors(), expected)


@classes
@pytest.mark.parametrize("write", [written_by_put, written_in_place, added, written_by_index])
@pytest.mark.parametrize("row", [torch.tensor(1), torch.tensor([1])], ids=["number", "index tensor"])
@pytest.mark.parametrize("place", [1, 2, -2])
def test_a_number_beyond_a_row(place, row, write, cls):
    with pytest.raises((IndexError, RuntimeError), match=r"too short|out of bounds"):
        write(cls.from_tensors(short_rows()), (row, torch.tensor(place)), torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("write", [written_by_put, written_in_place, added])
def test_a_row_is_put_at_its_own_places(write):
    rows, value = short_rows(), torch.randn(2, 4, dtype=torch.float64)
    found = write(PaddedTensor.from_tensors(rows), (torch.tensor(2),), value)
    rows[2] = rows[2] + value if write is added else value
    torch.testing.assert_close(found.to_tensors(), rows)


def test_a_row_along_the_second_dimension_is_written_too():
    x = PaddedTensor.from_tensors([torch.ones(2, 3), torch.ones(1, 3)]).transpose(0, 1)
    x[:, 0] = x[:, 0] * 5
    assert [row.unique().tolist() for row in x.to_tensors()] == [[5], [1]]
    text = "expected the 2 entries of the row, or the 2 places of the table, got 3"
    with pytest.raises(ValueError, match=text):
        x[:, 0] = torch.zeros(3, 3)
