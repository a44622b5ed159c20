"""Cutting, picking from and writing into padded rows, with poisoned padding and a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

import desugar
from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import stock
from tests.subclasses.ragged.padded_judge import PLACES, WAYS, check_padded, check_parts, make_table

ways = pytest.mark.parametrize("way", [*WAYS, stock], ids=lambda w: w.__name__)
FULL = [3, 7, 1]  # no empty row


def part_of(table, numbers):
    """The rows of these numbers, as a table of their own that shares the leaf."""
    return [table.rows[n] for n in numbers]


# ---- the same of every row -------------------------------------------------------------------------------------

OF_ROWS = {  # of [B, T, 4] and [T, 4], which an index of every row gives
    "slice": lambda t, at: t[(*at, slice(1, 3))],
    "from the end": lambda t, at: t[(*at, slice(-2, None))],
    "to the end": lambda t, at: t[(*at, slice(None, -1))],
    "both": lambda t, at: t[(*at, slice(1, -1))],
    "between": lambda t, at: t[(*at, slice(-3, -1))],
    "crossed": lambda t, at: t[(*at, slice(-2, 2))],
    "step": lambda t, at: t[(*at, slice(1, None, 2))],
    "step from the end": lambda t, at: t[(*at, slice(-3, None, 2))],
    "beyond": lambda t, at: t[(*at, slice(50, 60))],
    "features too": lambda t, at: t[(*at, slice(1, None), slice(None, None, 2))],
    "a feature": lambda t, at: t[(*at, slice(None, 2), 1)],
    "features by number": lambda t, at: t[(*at, slice(None), [0, -1])],
    "a new one": lambda t, at: t[(*at, slice(None, 2), None)],
    "ellipsis": lambda t, at: t[(..., slice(1, 3))],
    "narrow": lambda t, at: t.narrow(len(at) + 1, 1, 2),
    "features by index_select": lambda t, at: t.index_select(len(at) + 1, torch.tensor([2, 0, 2])),
    "features gathered": lambda t, at: t.gather(len(at) + 1, (t * 0).nan_to_num().long() + 2),
    "topk": lambda t, at: t.topk(2, len(at) + 1)[0],
}


@pytest.mark.sweep(20)
@pytest.mark.parametrize("name", OF_ROWS)
@ways
def test_the_same_of_every_row(name, way):
    f = OF_ROWS[name]
    check_padded(make_table(), lambda x: f(x, (slice(None),)) * 1, lambda row, _: f(row, ()), way=way)


PLACE = {
    "first": lambda t, d: t.select(d, 0),
    "last": lambda t, d: t.select(d, -1),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", PLACE)
@pytest.mark.parametrize("places", PLACES)
@ways
def test_one_place_of_every_row(name, places, way):
    table = make_table(places, FULL)
    b, r = table.batch_dim, table.ragged_dim
    got = way(lambda x: PLACE[name](x, r))(table.x)
    assert type(got) is torch.Tensor
    expected = [PLACE[name](row, r - (b < r)) for row in table.rows]
    check_parts(table, got.unbind(b - (r < b)), expected)


@pytest.mark.sweep(3)
@ways
def test_places_of_every_row(way):
    table = make_table(lengths=[3, 7, 2])
    for index in ([0, -1], [1, 0, 1]):
        got = way(lambda x: x[:, index, 1:])(table.x)  # noqa: B023
        check_parts(table, got, [row[index, 1:] for row in table.rows])
    check_parts(table, table.x.index_select(1, torch.tensor([1])), [row[[1]] for row in table.rows])


def test_a_place_that_a_row_has_not():
    x = make_table(lengths=[3, 2]).x
    for op in (
        lambda: x[:, 2],
        lambda: x[:, -3],
        lambda: x[:, [0, 2]],
        lambda: x[torch.tensor([0, 1]), torch.tensor([2, 2])],
        lambda: x.detach().__setitem__((slice(None), 2), 1.0),
        lambda: x.detach().__setitem__((1, 2), 1.0),
    ):
        with pytest.raises(RuntimeError, match="too short"):
            op()


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_chunks(places, chunks):
    """Each row's own chunks; a row that has fewer gives empty ones."""
    table = make_table(places, [5, 7, 1, 4])
    place = table.ragged_dim - (table.batch_dim < table.ragged_dim)
    for number in range(chunks):
        parts = []
        for row in table.rows:
            of_row = row.chunk(chunks, place)
            parts.append(of_row[number] if number < len(of_row) else row.narrow(place, 0, 0))
        check_parts(table, table.x.chunk(chunks, table.ragged_dim)[number], parts)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.data())
def test_any_slice(lengths, data):
    bound = st.one_of(st.none(), st.integers(-8, 8))
    part = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, 3])))
    table = make_table(lengths=lengths, width=data.draw(st.sampled_from([6, 7])), entry=(2,))
    check_padded(table, lambda x: x[:, part], lambda row, _: row[part])


# ---- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "which",
    [slice(1, 3), slice(None, None, 2), [2, 0, 0], [-1], torch.tensor([True, False, True, True])],
    ids=str,
)
@pytest.mark.parametrize("places", PLACES)
def test_rows(which, places):
    table = make_table(places)
    numbers = torch.arange(4)[which].tolist()
    x = table.x[(*[slice(None)] * table.batch_dim, which)]
    assert x.row_lengths().tolist() == [table.lengths[n] for n in numbers]
    parts, expected = x.to_tensors(), part_of(table, numbers)
    torch.testing.assert_close(parts, expected)
    weights = [torch.randn_like(p) for p in parts]
    got, wanted = (
        torch.autograd.grad(rows, table.leaf, weights, retain_graph=True)[0] for rows in (parts, expected)
    )
    torch.testing.assert_close(got, wanted)


def test_rows_one_by_one():
    table = make_table()
    for rows in (
        table.x.unbind(),
        list(table.x),
        [table.x[n] for n in range(4)],
        [table.x.select(0, n) for n in range(4)],
    ):
        check_parts(table, rows, table.rows)
    assert torch.equal(table.x[-1], table.rows[3]) and table.x[2, 1:3, 0].shape == (2,)
    assert [len(part.lengths) for part in table.x.split(3)] == [3, 1]
    assert [len(part.lengths) for part in table.x.chunk(2)] == [2, 2]
    with pytest.raises(IndexError, match="out of bounds for the 4 rows"):
        table.x[4]


@ways
def test_single_entries(way):
    table, rows, places = make_table(lengths=FULL), torch.tensor([0, 1, 1]), torch.tensor([2, 6, -7])
    got = way(lambda x: x[rows, places])(table.x)
    check_parts(table, got, [table.rows[0][2], table.rows[1][6], table.rows[1][0]])


# ---- masks and indices of entries ------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@ways
def test_a_mask_of_entries(way):
    check_padded(make_table(), lambda x: x[x.sum(2) > 0] * 1, lambda row, _: row[row.sum(1) > 0], way=way)
    check_padded(make_table(), lambda x: x[x > 0] * 1, lambda row, _: row[row > 0], way=way)
    check_padded(
        make_table(), lambda x: x.masked_select(x > 0) * 1, lambda row, _: row.masked_select(row > 0), way=way
    )
    keep = torch.rand(4, 7, 4) > 0.5
    check_padded(
        make_table(),
        lambda x: x.masked_select(keep),
        lambda row, i: row.masked_select(keep[i, : len(row)]),
        way=way,
    )


@ways
def test_gathering_entries(way):
    table = make_table(lengths=[3, 7, 0, 2])
    index = [
        torch.randint(0, len(row), (n, 4))
        for n, row in zip([5, 1, 0, 2], table.rows, strict=True)
        if len(row)
    ]
    index.insert(2, torch.zeros(0, 4, dtype=torch.int64))
    ragged = PaddedTensor.from_tensors(index, multiple=6)
    ragged = ragged.with_padded(ragged.to_dense(fill=10**9))
    got = way(lambda x: x.gather(1, ragged) * 1)(table.x)
    check_parts(
        table,
        got,
        [row.gather(0, i) for row, i in zip(table.rows, index, strict=True)],
    )
    beyond = PaddedTensor.from_tensors([torch.full((1, 4), n) for n in (2, 6, 0, 2)])
    with pytest.raises(RuntimeError, match="beyond its row"):
        table.x.gather(1, beyond)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("largest", [True, False])
@ways
def test_topk_of_short_rows(largest, way):
    table = make_table()
    got = way(lambda x: x.topk(2, 1, largest)[0])(table.x)
    assert got.row_lengths().tolist() == [2, 0, 2, 1]
    expected = [row.topk(min(2, len(row)), 0, largest)[0] for row in table.rows]
    check_parts(table, got, expected)


# ---- writing ---------------------------------------------------------------------------------------------------

WRITES = {  # as index of [B, T, 4], and what it does to each row
    "a slice": (lambda x, v: x.__setitem__((slice(None), slice(1, 3)), v[0]), lambda r, i, v: r[1:3].copy_(v[0])),
    "one feature": (lambda x, v: x.__setitem__((..., 2), v[1]), lambda r, i, v: r[:, 2].copy_(v[1])),
    "a row": (lambda x, v: x.__setitem__(2, v), lambda r, i, v: r.copy_(v.expand_as(r)) if i == 2 else r),
    "the first": (lambda x, v: x.__setitem__((slice(None), 0), v), lambda r, i, v: r[0].copy_(v)),
    "the last": (lambda x, v: x.__setitem__((slice(None), -1), v), lambda r, i, v: r[-1].copy_(v)),
    "a row's last": (lambda x, v: x.__setitem__((1, -1), v), lambda r, i, v: r[-1].copy_(v) if i == 1 else r),
    "single ones": (lambda x, v: x.__setitem__((torch.tensor([0, 1]), torch.tensor([2, -1])), v),
                    lambda r, i, v: r[2 if i == 0 else -1].copy_(v) if i < 2 else r),
    "a mask": (lambda x, v: x.__setitem__(x.detach().sum(2) > 0, 3.0),
               lambda r, i, v: r.__setitem__(r.detach().sum(1) > 0, 3.0)),
    "elements": (lambda x, v: x.__setitem__(x.detach() > 0, 3.0), lambda r, i, v: r.__setitem__(r.detach() > 0, 3.0)),
    "masked rows": (lambda x, v: x.__setitem__(x.detach().sum(2) > 0, x[x.detach().sum(2) > 0] * v),
                    lambda r, i, v: r.__setitem__(r.detach().sum(1) > 0, r[r.detach().sum(1) > 0] * v)),
    "rows like them": (lambda x, v: x.__setitem__(slice(None), x.clone() * v), lambda r, i, v: r.copy_(r.clone() * v)),
    "a part of them": (lambda x, v: x.__setitem__((slice(None), slice(1, None)), x.clone()[:, 1:] * v),
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


@pytest.mark.sweep(18)
@pytest.mark.parametrize("name", WRITES)
@ways
def test_writes(name, way):
    on_padded, on_row = WRITES[name]

    def run(x, v):
        y = x * 1
        on_padded(y, v)
        return y

    def judge(row, i, v):
        row = row * 1
        on_row(row, i, v)
        return row

    values = torch.randn(4, dtype=torch.float64, requires_grad=True)
    check_padded(make_table(lengths=FULL), run, judge, [values], way)


def test_writes_that_are_refused():
    x = make_table().x.detach()
    before = x.to_dense()
    plain = torch.zeros(4, 7, 4, dtype=torch.float64)
    for op in (
        lambda: x.__setitem__((slice(None), slice(-2, None)), 1.0),
        lambda: x.__setitem__((slice(None), [0, 1]), 1.0),
        lambda: x.__setitem__(x > 0, torch.ones(3)),
        lambda: x.__setitem__(x[:, :2] > 0, 1.0),
        lambda: x.__setitem__((slice(None), slice(None, 2)), x),
        lambda: x.flatten(0, 1).__setitem__(slice(1, 2), 1.0),
        lambda: plain.__setitem__(slice(None), x),
        lambda: plain[x > 0],
        lambda: x[plain > 0],
        lambda: x[:, :, :, 1],
        lambda: x.flatten(0, 1)[2],
        lambda: x[:, ::-1],
        lambda: x.split([2, 5], 1),
    ):
        with pytest.raises((DispatchError, ValueError, IndexError), match=r"[Pp]added|lengths|x\[mask\]"):
            op()
    torch.testing.assert_close(x.to_dense(), before)


# ---- growing ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("places", PLACES)
@ways
def test_append(places, way):
    table = make_table(places)
    shape = [n for d, n in enumerate(table.leaf.shape) if d != table.ragged_dim]
    new = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    b, r = table.batch_dim, table.ragged_dim
    got = way(lambda x, new: x.append(new) * 1)(table.x, new)
    expected = [
        torch.cat([row, one.unsqueeze(r - (b < r))], r - (b < r))
        for row, one in zip(table.rows, new.unbind(b - (r < b)), strict=True)
    ]
    check_parts(table, got, expected, [new])


def test_append_needs_room():
    x = PaddedTensor.from_tensors([torch.arange(3), torch.arange(1)])
    with pytest.raises(RuntimeError, match="fills the table"):
        x.append(torch.tensor([7, 7]))
    with pytest.raises(ValueError, match=r"one entry for each row, of shape \(2,\)"):
        x.append(torch.tensor([7]))
    wider = x.to_padded(multiple=4, at_least=4)
    assert [row.tolist() for row in wider.append(torch.tensor([7, 8])).to_tensors()] == [[0, 1, 2, 7], [0, 8]]


# ---- joining ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(8)
@pytest.mark.parametrize("places", PLACES)
@ways
def test_entries_joined(places, way):
    a, b = make_table(places), make_table(places, lengths=[1, 0, 0, 6], width=6)
    place = a.ragged_dim - (a.batch_dim < a.ragged_dim)
    got = way(lambda x, y: torch.cat([x, y, x * 2], a.ragged_dim) * 1)(a.x, b.x)
    pairs = zip(a.rows, b.rows, strict=True)
    check_parts(a, got, [torch.cat([p, q, p * 2], place) for p, q in pairs], [b.leaf])


@pytest.mark.sweep(6)
@pytest.mark.parametrize("places", PLACES)
@ways
def test_rows_joined(places, way):
    a, b = make_table(places), make_table(places, lengths=[1, 0], width=9)
    got = way(lambda x, y: torch.cat([x, y], a.batch_dim) * 1)(a.x, b.x)
    check_parts(a, got, [*a.rows, *b.rows], [b.leaf])


@pytest.mark.sweep(2)
@ways
def test_a_dense_operand_joins(way):
    a, p = make_table(), torch.randn(4, 2, 4, dtype=torch.float64, requires_grad=True)
    got = way(lambda x, p: torch.cat([p, x, p], 1) * 1)(a.x, p)
    check_parts(a, got, [torch.cat([q, row, q]) for q, row in zip(p, a.rows, strict=True)], [p])
    got = way(lambda x, p: torch.cat([x, p], 0) * 1)(a.x, p)
    check_parts(a, got, [*a.rows, *p], [p])


def test_narrow_counts_from_the_end():
    x = make_table(lengths=[3, 7, 2]).x
    torch.testing.assert_close(x.narrow(1, -2, 2).to_tensors(), x[:, -2:].to_tensors())
    torch.testing.assert_close(x.narrow(1, -2, 1).to_tensors(), x[:, -2:-1].to_tensors())
    assert [row.shape[0] for row in x.narrow(0, -2, 2).to_tensors()] == [7, 2]
    for dim in (0, 1):
        with pytest.raises(RuntimeError, match="at least 1 chunk"):
            x.chunk(0, dim)


# ---- extremes --------------------------------------------------------------------------------------------------


def test_a_length_beyond_the_table_counts_as_its_width():
    table = torch.arange(8.0).view(2, 4)
    x, y = PaddedTensor(table, torch.tensor([9, 2])), PaddedTensor(table, torch.tensor([4, 2]))
    for f in (
        lambda x: x[:, -2:],
        lambda x: x[:, :-1],
        lambda x: x.chunk(2, 1)[1],
        lambda x: torch.cat([x, x], 1),
        lambda x: x[x > 1],
    ):
        torch.testing.assert_close(f(x).to_tensors(), f(y).to_tensors())
    assert torch.equal(x[:, -2], y[:, -2]) and x.sum() == y.sum() and torch.equal(x.mean(1), y.mean(1))


@pytest.mark.parametrize("shape", [(0, 4, 2), (2, 0, 2), (2, 4, 0), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_nothing_to_index(shape, dtype):
    x = PaddedTensor(torch.ones(shape).to(dtype), torch.zeros(shape[0], dtype=torch.int64))
    for part in (x[:, 1:], x[:, -2:], x[1:], x[:, :, :1], x[x == x], x.chunk(2, 1)[1], torch.cat([x, x], 1)):
        assert part.dtype == dtype and all(row.numel() == 0 for row in part.to_tensors())
    assert torch.cat([x, x]).shape[0] == 2 * shape[0] and list(x[:, :1].flatten(0, 1).shape)[1:] == [shape[2]]
    x[:, 1:] = 1
    x[x == x] = 1
    assert x.dim() == 3 and len(x.to_tensors()) == shape[0]
    if shape[0] and shape[1]:
        grown = x.append(torch.ones(shape[0], shape[2]).to(dtype))
        assert [len(row) for row in grown.to_tensors()] == [1] * shape[0]


# ---- a row by its own length -----------------------------------------------------------------------------------

ROW_BY_ROW = {
    "the row itself": lambda x, i: x.__setitem__(i, x[i] * 2),
    "after an ellipsis": lambda x, i: x.__setitem__((i, ...), x[i] * 2),
    "some features": lambda x, i: x.__setitem__((i, slice(None), slice(1, 3)), x[i][:, 1:3] * 2),
    "one feature": lambda x, i: x.__setitem__((i, slice(None), 1), x[i][:, 1] * 2),
    "a number": lambda x, i: x.__setitem__(i, 7.0),
}


@pytest.mark.sweep(10)
@pytest.mark.parametrize("door", [lambda f: f, lambda f: desugar.compile(f, backend="eager")])
@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_a_row_is_written_by_what_reading_it_gives(name, door):
    rows = [torch.rand(n, 4) for n in (2, 0, 3, 1)]
    x = PaddedTensor.from_tensors([row.clone() for row in rows])
    jagged = JaggedTensor.from_tensors(rows)
    write = door(lambda x: [ROW_BY_ROW[name](x, i) for i in (0, 1, 2, -1)] and x * 1)
    written = write(x)
    for i in range(4):
        ROW_BY_ROW[name](jagged, i)
    for out in (x, written):
        assert all(map(torch.equal, out.unbind(), jagged.unbind()))


def test_a_row_along_the_second_dimension_is_written_too():
    x = PaddedTensor.from_tensors([torch.ones(2, 3), torch.ones(1, 3)]).transpose(0, 1)
    x[:, 0] = x[:, 0] * 5
    assert x[:, 0].tolist() == [[5, 5, 5], [5, 5, 5]] and x[:, 1].tolist() == [[1, 1, 1]]


def test_a_row_of_another_length_is_not_written():
    x = PaddedTensor.from_tensors([torch.ones(2), torch.ones(4)])
    with pytest.raises(
        ValueError, match="expected the 2 entries of the row, or the 4 places of the table, got 3"
    ):
        x[0] = torch.zeros(3)
    assert x[0].tolist() == [1, 1]
