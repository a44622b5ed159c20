"""Reading and writing by indices, masks, cuts and splits, on both layouts, with a loop over the rows as judge."""

import pytest
import torch
from hypothesis import given, strategies as st

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import (
    EVERY,
    JAGGED,
    LAYOUTS,
    WAYS,
    alike,
    check_parts,
    classes,
    desugared,
    eager,
    hold,
    judge_rows,
    judged,
    judged_by_rows,
    make,
    make_batch,
    pairs_of,
    refused,
    same,
)
from tests.tables import giving, raising

PAIRS = [*pairs_of([*LAYOUTS, "not contiguous"]), *pairs_of(["padded"], WAYS[1:])]
FULL = [3, 7, 1]  # no row is empty, one fills the table
ALL = slice(None)

# ---- the same of every row -------------------------------------------------------------------------------------

OF_ROWS = {  # of [B, T, 4] and [T, 4], which an index of every row gives
    "slice": lambda t, at: t[(*at, slice(1, 3))],
    "from the first on": lambda t, at: t[(*at, slice(0, None))],
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
    "scatter": lambda t, at: t.scatter(len(at) + 1, t.argsort(-1)[..., :2], t[..., 1:3]),
    "scatter of a number": lambda t, at: torch.scatter(t, -1, t.argsort(-1)[..., 1:], 2.0),
    "scatter_add": lambda t, at: t.scatter_add(-1, t.argsort(-1) // 2, t * t),
    "scatter_reduce": lambda t, at: t.scatter_reduce(-1, t.argsort(-1), src=t * t, reduce="amax"),
    "scatter_": lambda t, at: (t * 1).scatter_(len(at) + 1, index=t.argsort(-1)[..., :1], src=t.detach()),
    "take_along_dim": lambda t, at: torch.take_along_dim(t, t.argsort(len(at)), len(at)),
}


def at_all(f):
    """A function of ``[B, T, 4]`` and an index of the dimensions before the places, and the same of a row."""
    return (lambda x: f(x, (ALL,)) * 1), (lambda row, _: f(row, ()))


test_the_same_of_every_row = judged({name: at_all(f) for name, f in OF_ROWS.items()}, PAIRS, sweep=16)

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


PLACES_FIRST = [*(layout for layout in JAGGED if layout != "ragged dim 2"), "[B, T]", "[T, B]"]
PLACES_SECOND = ["ragged dim 2", "[B, D, T]", "[D, B, T]"]


def batch_dim_of(x):
    return x.batch_dim if isinstance(x, PaddedTensor) else 0


def one_place(dim):
    """One place of every row, as a dense tensor; the dimension is that in a row."""
    return {
        str(place): (
            lambda x, place=place: x.select(x.ragged_dim, place).movedim(
                batch_dim_of(x) - (x.ragged_dim < batch_dim_of(x)), 0
            ),
            lambda rows, place=place: [row.select(dim, place) for row in rows],
        )
        for place in (0, -1)
    }


test_one_place_of_every_row, test_one_place_of_every_row_elsewhere = (
    judged_by_rows(one_place(dim), pairs_of(layouts, WAYS), sweep=12, lengths=FULL)
    for dim, layouts in enumerate((PLACES_FIRST, PLACES_SECOND))
)

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
    sweep=12,
)


def chunk_of(row, chunks, number, place):
    """A chunk of a row; a row that has fewer gives empty ones."""
    parts = row.chunk(chunks, place)
    return parts[number] if number < len(parts) else row.narrow(place, 0, 0)


def chunks_of(place, last):
    """Each row's own chunks; the place is that in a row."""
    return {
        f"{number} of {chunks}": (
            lambda x, chunks=chunks, number=number: x.chunk(chunks, x.ragged_dim)[number],
            lambda row, _, chunks=chunks, number=number: chunk_of(row, chunks, number, place),
        )
        for chunks in (1, 2, 3, 7, last)
        for number in range(chunks)
    }


test_chunks = judged(chunks_of(0, 9), pairs_of([*LAYOUTS, "[T, B]"]), sweep=4, lengths=[5, 7, 0, 1, 4])
test_chunks_elsewhere = judged(
    chunks_of(1, 7), pairs_of(["[B, D, T]", "[D, B, T]"]), sweep=4, lengths=[5, 7, 0, 1, 4]
)


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


test_slices_share_the_values = giving(
    {
        "a slice": (
            lambda: (lambda x: x[1:, :-1].values.data_ptr() == x.values.data_ptr())(make_batch().x),
            True,
        ),
        "all entries have the same rows": (
            lambda: (lambda x: x[0:, 0::1].offsets is x.offsets)(make_batch().x),
            True,
        ),
    }
)

# ---- rows ------------------------------------------------------------------------------------------------------

test_some_rows = judged_by_rows(
    {
        str(which): (
            lambda x, which=which: x[(*[ALL] * batch_dim_of(x), which)],
            lambda rows, which=which: [rows[i] for i in torch.arange(4)[which]],
        )
        for which in (
            slice(1, 3),
            slice(None, -1),
            slice(2, 2),
            slice(None, None, 2),
            [2, 0, 2],
            [-1],
            torch.tensor([3, 1]),
            torch.tensor([True, False, True, True]),
        )
    },
    pairs_of(EVERY),
)
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


test_rows_one_by_one_and_in_groups = judged_by_rows(
    {name: (f, lambda rows: rows) for name, f in ONE_BY_ONE.items()}
    | {
        name: (lambda x, f=f: [row for part in f(x) for row in part], lambda rows: rows)
        for name, f in GROUPS.items()
    },
    pairs_of([*JAGGED, "padded"]),
)
test_sizes_of_groups = same(
    {
        name: lambda layout, f=f: (
            [len(part.row_lengths()) for part in f(make(layout).x)],
            [len(numbers) for numbers in f(torch.arange(4))],
        )
        for name, f in GROUPS.items()
    },
    *JAGGED,
    "padded",
)

ENTRIES = torch.tensor([0, 1, 1]), torch.tensor([2, 6, -7])
test_single_entries = judged_by_rows(
    {"by pairs": (lambda x: x[ENTRIES], lambda rows: [rows[0][2], rows[1][6], rows[1][0]])},
    pairs_of(LAYOUTS, WAYS),
    sweep=2,
    lengths=FULL,
)


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

test_splits_of_rows = judged(SPLITS | OTHER_NAMES, sweep=10, lengths=[3, 0, 5, 1, 4])
test_sections_of_rows = judged(
    {
        f"{sections}, {i}": (
            lambda x, sections=sections, i=i: x.split([*sections, x.shape[1] - sum(sections)], 1)[i],
            lambda row, _, sections=sections, i=i: row.split([*sections, len(row) - sum(sections)])[i],
        )
        for sections in ([2], [1, 1], [0, 1])
        for i in range(len(sections) + 1)
    },
    [*pairs_of(LAYOUTS), *pairs_of(LAYOUTS, [desugared])],
    sweep=12,
    lengths=[3, 2, 5, 4],
)
test_compiled_splits_of_rows = judged(
    COMPILED_SPLITS, pairs_of(LAYOUTS, [desugared]), sweep=84, lengths=[3, 0, 5, 1, 4]
)


def split_batch(layout, split, where):
    """Parts of a batch, and lists of its rows."""
    batch = make(layout, [3, 0, 5, 1, 4])
    groups = torch.arange(5).tensor_split(where)
    return split(batch.x, where), [[batch.rows[n] for n in part] for part in groups]


test_splits_of_the_batch = same(
    {
        f"{split.__name__}, {where}": lambda layout, split=split, where=where: split_batch(
            layout, split, where
        )
        for split, places in (
            (torch.tensor_split, (1, 2, 3, 7, [1, 3], [-1])),
            (torch.vsplit, (1, [3], [1, 3], [-1])),
        )
        for where in places
    },
    *LAYOUTS,
)

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


PICKS = [torch.randint(0, max(1, n), (count, 4)) for n, count in zip([3, 7, 0, 2], [5, 1, 0, 2], strict=True)]
RAGGED_PICKS = hold("padded", PICKS)
test_gathering_entries = judged(
    {"gather": (lambda x: x.gather(1, RAGGED_PICKS) * 1, lambda row, i: row.gather(0, PICKS[i]))},
    pairs_of(["padded"], WAYS),
    lengths=[3, 7, 0, 2],
)
test_gathering_from_a_dense_tensor = judged(
    {
        "gather": (
            lambda x, y: x * y.gather(1, x.argsort(1)),
            lambda row, i, y: row * y[i].gather(0, row.argsort(0)),
            (4, 9, 4),
        )
    },
    pairs_of(LAYOUTS, WAYS),
    entry=(4,),
)

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

test_what_jagged_rows_refuse = refused(
    {
        "a mask of places": (lambda x: x[:, torch.tensor([True, False])], DispatchError, "Jagged"),
        "a matrix of features": (lambda x: x[..., [[0, 1]]], DispatchError, "Jagged"),
        "no batch": (lambda x: x[None], DispatchError, "Jagged"),
        "topk of the batch": (lambda x: x.topk(1, 0), DispatchError, "Jagged"),
        "gather of the batch": (lambda x: x.gather(0, x.argsort(1)), DispatchError, "Jagged"),
        "scatter along the rows": (lambda x: x.scatter(1, x.argsort(1), 0), DispatchError, "ragged one"),
        "scatter of a table": (
            lambda x: x.scatter(2, x.argsort(2), torch.ones(4, 7, 4)),
            DispatchError,
            "the same rows",
        ),
        "scatter into a table": (
            lambda x: torch.ones(4, 7, 4).scatter_(2, x.argsort(2), 0),
            DispatchError,
            "the same rows",
        ),
        "a dense index": (lambda x: x.gather(1, torch.zeros(4, 1, 4).long()), DispatchError, "Jagged"),
        "take_along_dim": (
            lambda x: torch.take_along_dim(x, x.argsort(1)),
            DispatchError,
            "without dim= it takes entries of the flattened tensor",
        ),
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
        "a remainder": (lambda x: x.dsplit(3), RuntimeError, "is not a multiple of 3"),
        "a section too long": (
            lambda x: x.split([2, x.shape[1] - 2], 1),
            RuntimeError,
            "before its last one",
        ),
        "sections of another extent": (lambda x: x.split([1, 1], 1), RuntimeError, "places together"),
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


BEYOND_TABLE, UP_TO_TABLE = (PaddedTensor(torch.arange(8.0).view(2, 4), torch.tensor([n, 2])) for n in (9, 4))
test_a_length_beyond_the_table_counts_as_its_width = same(
    {str(n): lambda f=f: (list(f(BEYOND_TABLE)), list(f(UP_TO_TABLE))) for n, f in enumerate(BEYOND)}
)


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


# ==== writing =======================================================================================================

LENGTHS = [3, 2, 5, 1]

NUMBER = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
ENTRY = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
EACH = torch.arange(16.0, dtype=torch.float64).view(4, 4).requires_grad_()

# An index, the written value, and the write to each row: an index of the row and a value, or None.
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
# Each write doubles the entries that the index reads.
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
# A table refuses an index that differs between rows; the size of a read may depend on the data.
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

test_by_index = judged(BY_INDEX, pairs_of(LAYOUTS[:2]), sweep=18, lengths=LENGTHS)
test_by_index_on_tables = judged(ON_TABLES, pairs_of(["padded"]), sweep=18, lengths=LENGTHS)
test_by_index_in_graphs = judged(
    IN_GRAPHS, [*pairs_of(LAYOUTS, [desugared]), ("padded", WAYS[1])], sweep=60, lengths=LENGTHS
)

test_rows_of_tables_in_graphs = judged(ROWS_OF_TABLES, [("padded", desugared)], sweep=12, lengths=LENGTHS)


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
test_by_mask = judged(BY_MASK, pairs_of([*LAYOUTS[:2], "counted"]), sweep=3, lengths=LENGTHS)
test_by_mask_on_tables = judged(
    dict(list(BY_MASK.items())[:3]), pairs_of(["padded"], WAYS), sweep=3, lengths=LENGTHS
)


def clear(x):
    y = x * 1
    y[y > 0] = 0
    return y


test_a_number_by_mask_in_a_graph = judged({"0": alike(clear)}, pairs_of(["holes"], WAYS), sweep=3)


WRITES = {  # of a table and a value, and the same write to each row
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
    sweep=20,
    lengths=[3, 7, 1],
)


test_writes_by_index_tensors = judged(
    {name: (on_a_copy(f), on_a_copy(on_row), (4,)) for name, (f, on_row) in list(WRITES.items())[-2:]},
    pairs_of(LAYOUTS[:2]),
    lengths=[3, 7, 1],
)


def cleared():
    x = make_batch("holes", LENGTHS).x.detach()
    x[:, :] = 0
    return x


def turned(value):
    x = PaddedTensor.from_tensors([torch.ones(2, 3), torch.ones(1, 3)]).transpose(0, 1)
    x[:, 0] = x[:, 0] * 5 if value is None else value
    return x


test_what_is_written = giving(
    {
        "values elsewhere stay": (lambda: cleared().values.isnan().any(), True),
        "all rows": (lambda: any(row.any() for row in cleared().to_tensors()), False),
        "a row along the second dimension": (
            lambda: [row.unique().tolist() for row in turned(None).to_tensors()],
            [[5], [1]],
        ),
    }
)

# ---- refused ---------------------------------------------------------------------------------------------------

PLAIN = torch.zeros(4, 5, 4, dtype=torch.float64)
OUT_OF_RANGE = torch.tensor([1]), torch.tensor([2])

test_writes_that_jagged_rows_refuse = refused(
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


def in_place(write):
    """A write to a copy without history."""

    def run(x, index, value):
        x = x.detach().clone()
        write(x, index, value)
        return x

    return run


WRITERS = {
    "index_put": lambda x, index, value: x.index_put(index, value),
    "added": lambda x, index, value: x.index_put(index, value, accumulate=True),
    "index_put_": in_place(lambda x, index, value: x.index_put_(index, value)),
    "x[index]": in_place(lambda x, index, value: x.__setitem__(index, value)),
}


def short_rows():
    return [torch.randn(n, 4, dtype=torch.float64) for n in SHORT]


@classes
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", PICKED)
def test_numbers_that_are_tensors(name, writer, cls):
    """They go together with index tensors, as in a loop over what is picked."""
    index, rows = PICKED[name], short_rows()
    x = cls.from_tensors(rows)
    if writer == "x[index]" and len(index) == 3:
        pytest.skip("x[rows, place, features] has features of each row")
    together = torch.broadcast_tensors(*index)
    value = torch.randn(*together[0].shape, *([] if len(index) == 3 else [4]), dtype=torch.float64)
    expected = [row.clone() for row in rows]
    for (row, *where), new in zip(
        zip(*(i.flatten().tolist() for i in together), strict=True),
        value.view(together[0].numel(), -1),
        strict=True,
    ):
        old = expected[row][tuple(where)] if writer == "added" else 0
        expected[row][tuple(where)] = old + new.view(new.shape[0] if len(index) == 2 else ())
    torch.testing.assert_close(WRITERS[writer](x, index, value).to_tensors(), expected)


test_a_number_beyond_a_row = raising(
    {
        f"{row}, {place}, {writer}, {cls.__name__}": (
            lambda cls=cls, write=write, row=row, place=place: write(
                cls.from_tensors(short_rows()),
                (row, torch.tensor(place)),
                torch.zeros(4, dtype=torch.float64),
            ),
            (IndexError, RuntimeError),
            r"too short|out of bounds",
        )
        for row in (torch.tensor(1), torch.tensor([1]))
        for place in (1, 2, -2)
        for writer, write in WRITERS.items()
        for cls in (JaggedTensor, PaddedTensor)
    }
)


def put_at_its_own_places(writer):
    rows, value = short_rows(), torch.randn(2, 4, dtype=torch.float64)
    found = WRITERS[writer](PaddedTensor.from_tensors(rows), (torch.tensor(2),), value)
    return found, [*rows[:2], rows[2] + value if writer == "added" else value]


test_a_row_is_put_at_its_own_places = same(
    {writer: lambda writer=writer: put_at_its_own_places(writer) for writer in WRITERS}
)
test_a_row_of_another_length_is_refused = raising(
    {
        "along the second dimension": (
            lambda: turned(torch.zeros(3, 3)),
            ValueError,
            "expected the 2 entries of the row, or the 2 places of the table, got 3",
        )
    }
)
