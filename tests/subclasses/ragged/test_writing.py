"""Writing into jagged rows, and what index tensors pick from them, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import check_rows, desugared, eager, make_batch, stock

LENGTHS = [3, 2, 5, 1]
layouts = pytest.mark.parametrize("layout", ["back to back", "holes"])
ways = pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)
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
    "from the second on": ((ALL, slice(1, None)), ENTRY, lambda i, v: (slice(1, None), v)),
    "the last two": ((ALL, slice(-2, None)), NUMBER, lambda i, v: (slice(-2, None), v)),
    "listed places": ((ALL, [0, -1]), NUMBER, lambda i, v: ([0, -1], v)),
    "a feature": ((..., 1), NUMBER, lambda i, v: ((ALL, 1), v)),
    "features": ((..., slice(1, 3)), ENTRY, lambda i, v: ((ALL, slice(1, 3)), v[1:3])),
    "listed features": ((..., [0, 2]), NUMBER, lambda i, v: ((ALL, [0, 2]), v)),
    "all": ((ALL,), ENTRY, lambda i, v: (ALL, v)),
    "pairs": ((torch.tensor([0, 2]), torch.tensor([1, 4])), EACH, None),
}


@pytest.mark.sweep(42)
@ways
@layouts
@pytest.mark.parametrize("name", CASES)
def test_by_index(name, layout, way):
    index, value, on_row = CASES[name]
    if way is desugared and name in ("a row", "listed rows"):
        pytest.skip("the size of what is read depends on the data")
    shown = {"features": lambda v: v[1:3], "pairs": lambda v: v[:2]}.get(name, lambda v: v)

    def write(x, v):
        y = x * 1
        y[index] = shown(v)
        return y

    def write_row(row, i, v):
        y = row * 1
        where = {0: (1, v[0]), 2: (4, v[1])}.get(i) if name == "pairs" else on_row(i, v)
        if where is not None:
            y[where[0]] = where[1]
        return y

    check_rows(make_batch(layout, LENGTHS), way(write), write_row, [value])


MASKS = {
    "elements": (lambda t: t > 0, NUMBER),
    "entries": (lambda t: t.sum(-1) > 0, NUMBER),
    "entries by an entry": (lambda t: t.sum(-1) > 0, ENTRY),
}


@layouts
@pytest.mark.parametrize("name", MASKS)
def test_by_mask(name, layout):
    mask, value = MASKS[name]

    def write(t, *rest):
        y = t * 1
        y[mask(t.detach())] = rest[-1]
        return y

    check_rows(make_batch(layout, LENGTHS), write, write, [value])


@layouts
def test_what_a_mask_picked_is_put_back(layout):
    def double(t, *_):
        y = t * 1
        y[t > 0] = t[t > 0] * 2
        return y

    check_rows(make_batch(layout, LENGTHS), double, double)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", [eager, desugared, stock], ids=lambda w: w.__name__)
def test_a_number_by_mask_in_a_graph(way):
    def clear(x):
        y = x * 1
        y[y > 0] = 0
        return y

    check_rows(make_batch("holes", LENGTHS), way(clear), lambda row, _: torch.where(row > 0, 0, row))


@layouts
def test_index_put(layout):
    rows, places = torch.tensor([0, 2, 2]), torch.tensor([1, 4, 4])
    for accumulate in (False, True):
        batch = make_batch(layout, LENGTHS)
        got = torch.index_put(batch.x, (rows, places), NUMBER, accumulate)
        expected = [row.clone() for row in batch.rows]
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            with torch.no_grad():
                expected[row][place] = NUMBER + (expected[row][place] if accumulate else 0)
        torch.testing.assert_close([t.detach() for t in got.to_tensors()], [t.detach() for t in expected])
        leaf = batch.x.detach()
        assert leaf.index_put_((rows, places), NUMBER.detach(), accumulate) is leaf
        torch.testing.assert_close(leaf.to_tensors(), [t.detach() for t in expected])


def test_values_elsewhere_stay():
    batch = make_batch("holes", LENGTHS)
    x = batch.x.detach()
    x[:, :] = 0
    assert x.values.isnan().any() and not any(row.any() for row in x.to_tensors())


def test_what_does_not_fit_changes_nothing():
    x = make_batch(lengths=LENGTHS).x.detach()
    before, rows = x.values.clone(), x.clone()
    with pytest.raises(ValueError, match=r"got lengths \[2, 5, 1\] and \[3, 2, 5\]"):
        x[1:] = rows[:3]
    with pytest.raises(NotImplementedError, match="expected a dense value for this index"):
        x[:, 0] = rows
    with pytest.raises(IndexError, match=r"out of bounds for rows \[1, 3\]"):
        x[:, 2] = 0
    with pytest.raises(NotImplementedError, match="cannot write a JaggedTensor"):
        torch.zeros(4, 5, 4, dtype=torch.float64)[:] = x
    with pytest.raises(RuntimeError, match="too short"):
        x[torch.tensor([1]), torch.tensor([2])] = 0
    assert torch.equal(x.values, before)


def test_an_optimizer_that_writes_by_mask():
    x = make_batch(lengths=LENGTHS).x.detach().requires_grad_()
    optimizer = torch.optim.Rprop([x])
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        x.square().sum().backward()
        optimizer.step()
    assert type(x.grad) is JaggedTensor


# ---- picking ---------------------------------------------------------------------------------------------------

PICKS = {
    "topk": (lambda x: x.topk(2, 1).values, lambda row: row.topk(min(2, len(row)), 0).values),
    "topk of features": (lambda x: x.topk(2).values, lambda row: row.topk(2).values),
    "smallest": (
        lambda x: x.topk(3, 1, False).values,
        lambda row: row.topk(min(3, len(row)), 0, False).values,
    ),
    "gather": (lambda x: x.gather(1, x.argsort(1)), lambda row: row.sort(0).values),
    "gather features": (lambda x: x.gather(2, x.argsort(-1)), lambda row: row.sort(-1).values),
    "take_along_dim": (lambda x: torch.take_along_dim(x, x.argsort(1), 1), lambda row: row.sort(0).values),
    "index_select": (
        lambda x: x.index_select(-1, torch.tensor([2, 0])),
        lambda row: row.index_select(-1, torch.tensor([2, 0])),
    ),
    "features": (lambda x: x[..., [0, -1]], lambda row: row[:, [0, -1]]),
    "places": (lambda x: x[:, [0, -1]], lambda row: row[[0, -1]]),
}


def test_take_along_dim_needs_a_dim():
    x = JaggedTensor.from_tensors([torch.randn(2, 3), torch.randn(4, 3)])
    torch.testing.assert_close(
        torch.take_along_dim(x, indices=x.argsort(1), dim=1).values, x.sort(1).values.values
    )
    with pytest.raises(
        DispatchError, match="take_along_dim: without dim= it takes entries of the flattened tensor"
    ):
        torch.take_along_dim(x, x.argsort(1))


@pytest.mark.sweep(40)
@ways
@layouts
@pytest.mark.parametrize("name", PICKS)
def test_picking(name, layout, way):
    on_ragged, on_row = PICKS[name]
    check_rows(make_batch(layout, LENGTHS), way(on_ragged), lambda row, _: on_row(row))


@layouts
def test_ragged_dim_2(layout):
    batch = make_batch("ragged dim 2", LENGTHS)
    check_rows(batch, lambda x: x.gather(2, x.argsort(2)), lambda row, _: row.sort(1).values)
    check_rows(batch, lambda x: x.topk(2, 2).values, lambda row, _: row.topk(min(2, row.shape[1]), 1).values)


def test_pairs_and_numbers():
    batch = make_batch("holes", LENGTHS)
    found = batch.x[torch.tensor([0, 2]), torch.tensor([-1, 4])]
    torch.testing.assert_close(found, torch.stack([batch.rows[0][-1], batch.rows[2][4]]))
    torch.testing.assert_close(batch.x[:, torch.tensor(-1)], torch.stack([row[-1] for row in batch.rows]))
    for refused in (
        lambda: batch.x[:, torch.tensor([True, False])],
        lambda: batch.x[..., [[0, 1]]],
        lambda: batch.x[None],
        lambda: batch.x.topk(1, 0),
        lambda: batch.x.gather(0, batch.x.argsort(1)),
        lambda: batch.x.gather(1, torch.zeros(4, 1, 4, dtype=torch.int64)),
    ):
        with pytest.raises(NotImplementedError):
            refused()
    with pytest.raises(RuntimeError, match="lies beyond its row"):
        batch.x.gather(1, batch.x.argsort(1) + 1)


def test_several_index_tensors():
    batch = make_batch("holes", LENGTHS, entry=(4, 3))
    some, more = torch.tensor([0, 3]), torch.tensor([2, 1])
    check_rows(batch, lambda x: x[:, :, some, more], lambda row, _: row[:, some, more])
    found = batch.x[some, torch.tensor([-1, 0]), more]
    torch.testing.assert_close(found, torch.stack([batch.rows[0][-1][2], batch.rows[3][0][1]]))
    turned = make_batch("ragged dim 2", LENGTHS, entry=(4, 3))
    check_rows(turned, lambda x: x[:, [0, 1]].index_select(3, more), lambda row, _: row[[0, 1]][..., more])
    wanted = torch.stack([turned.rows[0][2, 0, 2], turned.rows[3][1, 0, 1]])
    torch.testing.assert_close(turned.x[some, more, torch.tensor([0, -1]), more], wanted)
    with pytest.raises(NotImplementedError, match="follow each other"):
        turned.x[some, :, torch.tensor([0, -1])]
    with pytest.raises(NotImplementedError, match="features that follow each other"):
        turned.x[:, some, :, more]


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


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
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


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
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


# Features of each row: an index of the batch, and that of a row, for rows that are picked.
CROSSED = {
    "of rows": (([0, 2], ALL, [1, 3]), (ALL, [1, 3])),
    "of the last entries of rows": (([0, 2], -1, [1, 3]), (-1, [1, 3])),
    "of the last entries": ((ALL, -1, [0, 1, 3]), (-1, [0, 1, 3])),
    "of a row": ((2, ALL, [1, 3]), (ALL, [1, 3])),
}


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
@pytest.mark.parametrize("name", CROSSED)
def test_features_of_each_row(name, cls):
    """What is written is what the same index reads."""
    index, of_row = CROSSED[name]
    rows, x = short_rows(), cls.from_tensors(short_rows())
    x = cls.from_tensors(rows)
    value = torch.randn((), dtype=torch.float64, requires_grad=True)
    y = x.clone()
    y[index] = value
    picked = range(3) if index[0] == ALL else [index[0]] if index[0] == 2 else index[0]
    expected = [row.clone() for row in rows]
    for i in picked:
        expected[i][of_row] = value.detach()
    torch.testing.assert_close([row.detach() for row in y.to_tensors()], expected)
    y.sum().backward()
    assert value.grad == sum(expected[i][of_row].numel() for i in picked)
    z = x.clone()
    z[index] = x[index] * 2
    doubled = [row.clone() for row in rows]
    for i in picked:
        doubled[i][of_row] *= 2
    torch.testing.assert_close(z.to_tensors(), doubled)
