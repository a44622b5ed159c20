"""Indices, masks, cuts and splits, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import (
    EVERY,
    JAGGED,
    LAYOUTS,
    PLACES,
    WAYS,
    alike,
    check_parts,
    desugared,
    eager,
    hold,
    judge_rows,
    judged,
    layouts,
    make,
    make_batch,
    pairs_of,
    refused,
    row_dim,
    ways,
)

PAIRS = [*pairs_of([*LAYOUTS, "not contiguous"]), *pairs_of(["padded"], WAYS[1:])]
FULL = [3, 7, 1]  # no row is empty, one fills the table
ALL = slice(None)

# ---- the same of every row -------------------------------------------------------------------------------------

OF_ROWS = {  # of [B, T, 4] and [T, 4], which an index of every row gives
    "slice": lambda t, at: t[(*at, slice(1, 3))],
    "from the second on": lambda t, at: t[(*at, slice(1, None))],
    "the first two": lambda t, at: t[(*at, slice(None, 2))],
    "from the end": lambda t, at: t[(*at, slice(-2, None))],
    "to the end": lambda t, at: t[(*at, slice(None, -1))],
    "both": lambda t, at: t[(*at, slice(1, -1))],
    "both, a feature": lambda t, at: t[(*at, slice(1, -1), 0)],
    "between": lambda t, at: t[(*at, slice(-3, -1))],
    "crossed": lambda t, at: t[(*at, slice(-2, 2))],
    "crossed further": lambda t, at: t[(*at, slice(-3, 2))],
    "step": lambda t, at: t[(*at, slice(1, None, 2))],
    "step from the end": lambda t, at: t[(*at, slice(-3, None, 2))],
    "beyond": lambda t, at: t[(*at, slice(50, 60))],
    "features too": lambda t, at: t[(*at, slice(1, None), slice(None, None, 2))],
    "some features": lambda t, at: t[(*at, ALL, slice(1, 3))],
    "a feature": lambda t, at: t[(*at, slice(None, 2), 1)],
    "features by number": lambda t, at: t[(*at, ALL, [0, -1])],
    "a new one": lambda t, at: t[(*at, slice(None, 2), None)],
    "a new one before": lambda t, at: t[(*at, None, ..., -1)],
    "a new one behind": lambda t, at: t[..., None],
    "ellipsis": lambda t, at: t[(..., slice(1, 3))],
    "ellipsis, a feature": lambda t, at: t[..., 2],
    "narrow": lambda t, at: t.narrow(len(at) + 1, 1, 2),
    "features by index_select": lambda t, at: t.index_select(len(at) + 1, torch.tensor([2, 0, 2])),
    "features gathered": lambda t, at: t.gather(len(at) + 1, (t * 0).nan_to_num().long() + 2),
    "topk": lambda t, at: t.topk(2, len(at) + 1)[0],
    "gather features": lambda t, at: t.gather(len(at) + 1, t.argsort(-1)),
    "gather": lambda t, at: t.gather(len(at), t.argsort(len(at))),
    "take_along_dim": lambda t, at: torch.take_along_dim(t, t.argsort(len(at)), len(at)),
}


def at_all(f):
    """A function of ``[B, T, 4]`` and an index of the dimensions before the places, and the same of a row."""
    return (lambda x: f(x, (ALL,)) * 1), (lambda row, _: f(row, ()))


test_the_same_of_every_row = judged({name: at_all(f) for name, f in OF_ROWS.items()}, PAIRS, sweep=5)

OF_FULL = {  # no row has fewer than two entries
    "the first": lambda t, at: t[(*at, 0)],
    "the last, some features": lambda t, at: t[(*at, -1, slice(1, 3))],
    "the first, some features": lambda t, at: t[(*at, 0, slice(1, 3))],
    "places": lambda t, at: t[(*at, [0, -1], slice(1, None))],
    "places and all features": lambda t, at: t[(*at, [0, -1])],
    "places again": lambda t, at: t[(*at, [1, 0, 1], slice(1, None))],
    "by index_select": lambda t, at: t.index_select(len(at), torch.tensor([1])),
    "a number as a tensor": lambda t, at: t[(*at, torch.tensor(-1))],
    "narrow from the end": lambda t, at: t.narrow(len(at), -2, 2),
    "narrow before the end": lambda t, at: t.narrow(len(at), -2, 1),
}


test_the_same_of_every_full_row = judged(
    {name: at_all(f) for name, f in OF_FULL.items()}, PAIRS, sweep=4, lengths=[3, 7, 2]
)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("layout", EVERY)
@ways
def test_one_place_of_every_row(place, layout, way):
    batch = make(layout, FULL)
    b, r = batch.batch_dim, batch.ragged_dim
    got = way(lambda x: x.select(r, place))(batch.x)
    assert type(got) is torch.Tensor
    check_parts(batch, got.unbind(b - (r < b)), [row.select(row_dim(batch), place) for row in batch.rows])


RAGGED_DIM_2 = {
    "slice": (lambda x: x[:, :, 1:3], lambda row: row[:, 1:3]),
    "from the end": (lambda x: x[:, :, -2:], lambda row: row[:, -2:]),
    "both": (lambda x: x[:, :, 1:-1], lambda row: row[:, 1:-1]),
    "crossed": (lambda x: x[:, :, -3:2], lambda row: row[:, -3:2]),
    "a new one": (lambda x: x[..., None], lambda row: row[..., None]),
    "gather": (lambda x: x.gather(2, x.argsort(2)), lambda row: row.sort(1).values),
    "topk": (lambda x: x.topk(2, 2).values, lambda row: row.topk(min(2, row.shape[1]), 1).values),
}


test_ragged_dim_2 = judged(
    {name: (f, lambda row, _, g=g: g(row)) for name, (f, g) in RAGGED_DIM_2.items()},
    [("ragged dim 2", eager)],
)

test_topk_of_short_rows = judged(
    {
        f"largest={largest}": (
            lambda x, largest=largest: x.topk(2, 1, largest)[0],
            lambda row, _, largest=largest: row.topk(min(2, len(row)), 0, largest)[0],
        )
        for largest in (True, False)
    },
    pairs_of(LAYOUTS, WAYS),
    sweep=3,
)


@pytest.mark.parametrize(
    ("layout", "chunks"),
    [
        *itertools.product(["back to back", "holes"], [1, 2, 3, 7, 9]),
        *itertools.product(PLACES, [1, 2, 3, 7]),
    ],
)
def test_chunks(layout, chunks):
    """Each row's own chunks; a row that has fewer gives empty ones."""
    batch = make(layout, [5, 7, 0, 1, 4])
    place = row_dim(batch)
    for number in range(chunks):
        of_rows = [row.chunk(chunks, place) for row in batch.rows]
        parts = [c[number] if number < len(c) else c[0].narrow(place, 0, 0) for c in of_rows]
        check_parts(batch, batch.x.chunk(chunks, batch.ragged_dim)[number], parts)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.data())
def test_any_slice(lengths, data):
    bound = st.one_of(st.none(), st.integers(-8, 8))
    part = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, 3])))
    width = data.draw(st.sampled_from([6, 7]))
    judge_rows(
        "padded", lambda x: x[:, part], lambda row, _: row[part], lengths=lengths, entry=(2,), width=width
    )


@given(st.data())
def test_slices_of_slices(data):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    batch = make_batch("holes", lengths)
    x, rows = batch.x, batch.rows
    for _ in range(2):
        bounds = st.one_of(st.none(), st.integers(-6, 6))
        of_rows, of_entries = (slice(data.draw(bounds), data.draw(bounds)) for _ in range(2))
        x, rows = x[of_rows, of_entries], [row[of_entries] for row in rows[of_rows]]
    torch.testing.assert_close(x.to_tensors(), rows)
    assert isinstance(x, JaggedTensor) and x.max_length >= max(map(len, rows), default=0)
    check_parts(batch, list((x * 2).sum(1)), [(row * 2).sum(0) for row in rows])


def test_slices_share_the_values():
    x = make_batch().x
    assert x[1:, :-1].values.data_ptr() == x.values.data_ptr()


# ---- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", EVERY)
@pytest.mark.parametrize(
    "which",
    [
        slice(1, 3),
        slice(None, -1),
        slice(2, 2),
        slice(None, None, 2),
        [2, 0, 2],
        [-1],
        torch.tensor([3, 1]),
        torch.tensor([True, False, True, True]),
    ],
    ids=str,
)
def test_some_rows(which, layout):
    batch = make(layout)
    numbers = torch.arange(4)[which].tolist()
    got = batch.x[(*[ALL] * batch.batch_dim, which)]
    assert got.shape[batch.batch_dim] == len(numbers)
    if numbers:
        check_parts(batch, got.to_tensors(), [batch.rows[i] for i in numbers])


GROUPS = {
    "chunk": lambda x: x.chunk(3),
    "chunk in two": lambda x: x.chunk(2),
    "split": lambda x: x.split(2),
    "split in threes": lambda x: x.split(3),
    "split by sizes": lambda x: x.split([1, 3]),
    "narrow": lambda x: [x.narrow(0, 0, 2), x.narrow(0, -2, 2)],
}
ONE_BY_ONE = {
    "unbind": lambda x: x.unbind(),
    "list": list,
    "by number": lambda x: [x[n] for n in range(4)],
    "from the end": lambda x: [x[n] for n in range(-4, 0)],
    "select": lambda x: [x.select(0, n) for n in range(4)],
}


@pytest.mark.parametrize("layout", [*JAGGED, "padded"])
@pytest.mark.parametrize("name", GROUPS | ONE_BY_ONE)
def test_rows_one_by_one_and_in_groups(name, layout):
    batch = make(layout)
    if name in ONE_BY_ONE:
        check_parts(batch, ONE_BY_ONE[name](batch.x), batch.rows)
        return
    got, groups = GROUPS[name](batch.x), GROUPS[name](torch.arange(4))
    assert [len(part.row_lengths()) for part in got] == [len(numbers) for numbers in groups]
    check_parts(batch, [row for part in got for row in part], batch.rows)


@pytest.mark.sweep(2)
@ways
@layouts
def test_single_entries(layout, way):
    rows, places = torch.tensor([0, 1, 1]), torch.tensor([2, 6, -7])
    batch = make(layout, FULL)
    got = way(lambda x: x[rows, places])(batch.x)
    check_parts(batch, got, [batch.rows[0][2], batch.rows[1][6], batch.rows[1][0]])


SOME, MORE = torch.tensor([0, 3]), torch.tensor([2, 1])
test_several_index_tensors = judged(
    {
        "holes": (lambda x: x[:, :, SOME, MORE], lambda row, _: row[:, SOME, MORE]),
        "numbers": (lambda x: x[:, :, 1, [2, 0]], lambda row, _: row[:, 1, [2, 0]]),
    },
    [("holes", eager)],
    entry=(4, 3),
)
test_index_tensors_around_the_rows = judged(
    {
        "one": (
            lambda x: x[:, [0, 1]].index_select(3, MORE),
            lambda row, _: row[[0, 1]][..., MORE],
        )
    },
    [("ragged dim 2", eager)],
    entry=(4, 3),
)


@pytest.mark.parametrize(
    ("layout", "index", "places"),
    [
        ("holes", (SOME, torch.tensor([-1, 0]), MORE), [(-1, 2), (0, 1)]),
        ("ragged dim 2", (SOME, MORE, torch.tensor([0, -1]), MORE), [(2, 0, 2), (1, 0, 1)]),
    ],
)
def test_index_tensors_for_rows_places_and_features(layout, index, places):
    batch = make(layout, [3, 2, 5, 1], (4, 3))
    check_parts(batch, batch.x[index], [batch.rows[0][places[0]], batch.rows[3][places[1]]])


# ---- splits ----------------------------------------------------------------------------------------------------

SPLITS = {
    f"{where}, {i}": (
        lambda x, where=where, i=i: x.tensor_split(where, 1)[i],
        lambda row, _, where=where, i=i: row.tensor_split(where, 0)[i],
    )
    for where in (1, 2, 3, 7, [1, 3], (2,), [-1], [0, 2, 2], torch.tensor([1, 2]))
    for i in range(where if isinstance(where, int) else len(where) + 1)
}
COMPILED_SPLITS = {name: case for name, case in SPLITS.items() if "tensor" not in name}
OTHER_NAMES = {
    "features": (lambda x: x.tensor_split(3, -1)[0], lambda row, _: row.tensor_split(3, -1)[0]),
    "hsplit": (lambda x: x.hsplit([2])[1], lambda row, _: row[2:]),
    "dsplit": (lambda x: x.dsplit(2)[1], lambda row, _: row[:, 2:]),
}

test_splits_of_rows = judged(SPLITS | OTHER_NAMES, sweep=5, lengths=[3, 0, 5, 1, 4])
test_compiled_splits_of_rows = judged(
    COMPILED_SPLITS, pairs_of(LAYOUTS, [desugared]), sweep=42, lengths=[3, 0, 5, 1, 4]
)


@layouts
@pytest.mark.parametrize("where", [1, 2, 3, 7, [1, 3], [-1]], ids=str)
def test_splits_of_the_batch(where, layout):
    batch = make(layout, [3, 0, 5, 1, 4])
    numbers = [part.tolist() for part in torch.arange(5).tensor_split(where)]
    for parts in (batch.x.tensor_split(where), batch.x.vsplit(where if where != 2 else [3])):
        if len(parts) == len(numbers):  # vsplit refuses numbers that do not divide that of the rows
            found = [part.to_tensors() for part in parts]
            torch.testing.assert_close(found, [[batch.rows[n] for n in part] for part in numbers])


# ---- masks and indices of entries ------------------------------------------------------------------------------

MASKED = {
    "entries": lambda t: t[t.sum(-1) > 0],
    "elements": lambda t: t[t > 0],
    "masked_select": lambda t: t.masked_select(t > 0),
}
KEEP = torch.arange(4 * 7 * 4).view(4, 7, 4) % 3 > 0

test_a_mask_of_entries = judged(
    {name: alike(lambda t, f=f: f(t) * 1) for name, f in MASKED.items()}, PAIRS, sweep=3
)
test_a_mask_of_numbers = judged({"elements": alike(MASKED["elements"])}, [("holes", eager)], entry=())
test_a_dense_mask = judged(
    {
        "masked_select": (
            lambda x: x.masked_select(KEEP),
            lambda row, i: row.masked_select(KEEP[i, : len(row)]),
        )
    },
    pairs_of(["padded"], WAYS),
)


@ways
def test_gathering_entries(way):
    batch, counts = make("padded", [3, 7, 0, 2]), [5, 1, 0, 2]
    index = [torch.randint(0, max(1, len(row)), (n, 4)) for n, row in zip(counts, batch.rows, strict=True)]
    ragged = hold("padded", index)
    got = way(lambda x: x.gather(1, ragged) * 1)(batch.x)
    check_parts(batch, got, [row.gather(0, i) for row, i in zip(batch.rows, index, strict=True)])


# ---- refused ---------------------------------------------------------------------------------------------------

BEYOND_A_ROW = {
    "the third": lambda x: x[:, 2],
    "the third from the end": lambda x: x[:, -3],
    "places": lambda x: x[:, [0, 2]],
    "an entry": lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 2])],
    "written": lambda x: x.detach().__setitem__((ALL, 2), 1.0),
    "one written": lambda x: x.detach().__setitem__((1, 2), 1.0),
    "gathered": lambda x: x.gather(1, x.argsort(1) + 1),
    "a row": lambda x: x[2],
}

test_a_place_that_a_row_has_not = refused(
    {
        name: (f, (IndexError, RuntimeError), r"too short|rows \[1\]|out of bounds|beyond its row")
        for name, f in BEYOND_A_ROW.items()
    },
    ["back to back", "padded"],
    lengths=[3, 2],
)

FLAT = "without dim= it takes entries of the flattened tensor"
test_what_jagged_rows_refuse = refused(
    {
        "a mask of places": (lambda x: x[:, torch.tensor([True, False])], DispatchError, "Jagged"),
        "a matrix of features": (lambda x: x[..., [[0, 1]]], DispatchError, "Jagged"),
        "no batch": (lambda x: x[None], DispatchError, "Jagged"),
        "topk of the batch": (lambda x: x.topk(1, 0), DispatchError, "Jagged"),
        "gather of the batch": (lambda x: x.gather(0, x.argsort(1)), DispatchError, "Jagged"),
        "a dense index": (lambda x: x.gather(1, torch.zeros(4, 1, 4).long()), DispatchError, "Jagged"),
        "take_along_dim": (lambda x: torch.take_along_dim(x, x.argsort(1)), DispatchError, FLAT),
    },
    ["holes"],
)
test_index_tensors_apart_are_refused = refused(
    {
        "places": (lambda x: x[SOME, :, torch.tensor([0, -1])], DispatchError, "follow each other"),
        "features": (lambda x: x[:, SOME, :, MORE], DispatchError, "features that follow each other"),
    },
    ["ragged dim 2"],
    lengths=[3, 2, 5, 1],
    entry=(4, 3),
)
test_what_is_refused = refused(
    {
        "merged": (lambda x: x.flatten(0, 1).tensor_split(2), DispatchError, "merged dimensions"),
        "no such dimension": (lambda x: x.tensor_split(2, 3), IndexError, "has no dimension 3"),
        "no section": (lambda x: x.tensor_split(0, 1), RuntimeError, "1 section or more"),
        "no chunk": (lambda x: x.chunk(0, 1), RuntimeError, "at least 1 chunk"),
        "no chunk of the batch": (lambda x: x.chunk(0), RuntimeError, "at least 1 chunk|greater than 0"),
        "a remainder": (lambda x: x.dsplit(3), RuntimeError, "no multiple of 3"),
    }
)

# ---- extremes --------------------------------------------------------------------------------------------------

BEYOND = [
    lambda x: x[:, -2:],
    lambda x: x[:, :-1],
    lambda x: x.chunk(2, 1)[1],
    lambda x: torch.cat([x, x], 1),
    lambda x: x[x > 1],
    lambda x: x[:, -2],
    lambda x: x.sum().unsqueeze(0),
    lambda x: x.mean(1),
]


@pytest.mark.parametrize("f", BEYOND)
def test_a_length_beyond_the_table_counts_as_its_width(f):
    table = torch.arange(8.0).view(2, 4)
    x, y = PaddedTensor(table, torch.tensor([9, 2])), PaddedTensor(table, torch.tensor([4, 2]))
    torch.testing.assert_close(list(f(x)), list(f(y)))


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
