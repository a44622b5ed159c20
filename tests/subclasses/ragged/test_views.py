"""Views, cutting, joining and indexing, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import LAYOUTS, WAYS, check_parts, check_rows, make_batch

# On [B, T, 4, 6] and on a row [n, 4, 6].
VIEWS = {
    "transpose features": (lambda x: x.transpose(2, 3), lambda r: r.transpose(1, 2)),
    "transpose ragged": (lambda x: x.transpose(1, 2), lambda r: r.transpose(0, 1)),
    "transpose last": (lambda x: x.transpose(1, -1), lambda r: r.transpose(0, -1)),
    "permute": (lambda x: x.permute(0, 3, 1, 2), lambda r: r.permute(2, 0, 1)),
    "movedim": (lambda x: x.movedim(1, 3), lambda r: r.movedim(0, 2)),
    "mT": (lambda x: x.mT, lambda r: r.mT),
    "unsqueeze": (lambda x: x.unsqueeze(2), lambda r: r.unsqueeze(1)),
    "unsqueeze before ragged": (lambda x: x.unsqueeze(1), lambda r: r.unsqueeze(0)),
    "unsqueeze last": (lambda x: x.unsqueeze(-1), lambda r: r.unsqueeze(-1)),
    "squeeze": (lambda x: x.unsqueeze(1).unsqueeze(3).squeeze(3).squeeze(1), lambda r: r),
    "squeeze all": (lambda x: x.unsqueeze(1).unsqueeze(3).squeeze(), lambda r: r),
    "unflatten": (lambda x: x.unflatten(-1, (2, -1)), lambda r: r.unflatten(-1, (2, -1))),
    "flatten": (lambda x: x.flatten(2), lambda r: r.flatten(1)),
    "view": (lambda x: x.view(x.shape[0], x.shape[1], 24), lambda r: r.reshape(-1, 24)),
    "view by -1": (lambda x: x.view(x.shape[0], -1, 2, 12), lambda r: r.reshape(-1, 2, 12)),
    "view batch by -1": (lambda x: x.view(-1, x.shape[1], 8, 3), lambda r: r.reshape(-1, 8, 3)),
    "reshape of a transposed": (
        lambda x: x.transpose(2, 3).reshape(*x.shape[:2], 24),
        lambda r: r.transpose(1, 2).reshape(-1, 24),
    ),
    "flatten of a transposed": (
        lambda x: x.transpose(1, 2).transpose(1, 2).flatten(2),
        lambda r: r.flatten(1),
    ),
    "expand": (
        lambda x: x.unsqueeze(-1).expand(-1, -1, 4, 6, 3),
        lambda r: r.unsqueeze(-1).expand(-1, 4, 6, 3),
    ),
    "select": (lambda x: x.select(2, 1), lambda r: r.select(1, 1)),
    "select from the end": (lambda x: x.select(-1, -2), lambda r: r.select(-1, -2)),
    "narrow": (lambda x: x.narrow(2, 1, 2), lambda r: r.narrow(1, 1, 2)),
    "slice": (lambda x: x[..., 1:5:2], lambda r: r[..., 1:5:2]),
    "chunk": (lambda x: x.chunk(3, -1)[1], lambda r: r.chunk(3, -1)[1]),
    "split": (lambda x: x.split([1, 5], 3)[1] * 2, lambda r: r.split([1, 5], 2)[1] * 2),
    "tensor_split": (lambda x: x.tensor_split(2, 2)[0], lambda r: r.tensor_split(2, 1)[0]),
    "unbind": (lambda x: x.unbind(2)[3], lambda r: r.unbind(1)[3]),
    "all chunks": (lambda x: torch.cat(x.chunk(2, 2)[::-1], 2), lambda r: torch.cat(r.chunk(2, 1)[::-1], 1)),
    "stack": (lambda x: torch.stack([x, x * 2], 2), lambda r: torch.stack([r, r * 2], 1)),
    "stack before ragged": (lambda x: torch.stack([x, x * 2], 1), lambda r: torch.stack([r, r * 2], 0)),
    "merge and unmerge": (lambda x: (x.flatten(0, 1) * 2).unflatten(0, x.shape[:2]), lambda r: r * 2),
    "merge by view": (lambda x: x.view(-1, 4, 6).view(x.shape[0], x.shape[1], 4, 6), lambda r: r),
    "merge and join": (lambda x: x.reshape(-1, 24).unflatten(0, (x.shape[0], -1)), lambda r: r.flatten(1)),
    "clone": (lambda x: x.clone() * x, lambda r: r * r),
    "to": (lambda x: x.to(torch.float32).double(), lambda r: r.float().double()),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", ["back to back", "holes", "not contiguous"])
@pytest.mark.parametrize("view", VIEWS)
def test_views(view, layout):
    if "view" in view and layout == "not contiguous":
        pytest.skip("not a view there")
    on_ragged, on_row = VIEWS[view]
    check_rows(make_batch(layout, entry=(4, 6)), on_ragged, lambda row, _: on_row(row))


@pytest.mark.sweep(48)
@pytest.mark.parametrize("way", WAYS[1:], ids=lambda w: w.__name__)
@pytest.mark.parametrize("view", VIEWS)
def test_views_in_graphs(view, way):
    on_ragged, on_row = VIEWS[view]
    check_rows(make_batch(entry=(4, 6)), way(lambda x: on_ragged(x) * 2), lambda row, _: on_row(row) * 2)


def test_a_view_shares_memory_and_is_written_through():
    x = make_batch(entry=(4, 6)).x.detach()
    x.transpose(1, 2).unsqueeze(-1).mul_(0)
    assert (x.values == 0).all()


def test_a_view_written_in_place_under_autograd():
    def run(t, dim):
        y = t * 1
        y.transpose(dim, dim + 1)[..., :2].mul_(t.transpose(dim, dim + 1)[..., :2])
        return y

    check_rows(make_batch(entry=(4, 6)), lambda x: run(x, 2), lambda row, _: run(row, 1))


def test_merged_dimensions_hold_what_exists():
    batch = make_batch()
    merged = batch.x.flatten(0, 1)
    assert merged.shape == (9, 4) and merged.ragged_dim == 0
    assert merged.unflatten(0, batch.x.shape[:2]).offsets is batch.x.offsets


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.transpose(0, 2),
        lambda x: x.permute(1, 0, 2),
        lambda x: x.unsqueeze(0),
        lambda x: x.flatten(),
        lambda x: x.flatten(1),
        lambda x: x.view(x.shape[0], -1),
        lambda x: x.transpose(1, 2).flatten(0, 1),
        lambda x: x.expand(3, *x.shape),
        lambda x: x[:, ::-1],
        lambda x: x @ x.mT,
        lambda x: x.mT + x,
    ],
)
def test_what_rows_cannot_do_is_refused(f):
    with pytest.raises(DispatchError, match="JaggedTensor"):
        f(make_batch().x)


# ---- indexing --------------------------------------------------------------------------------------------------

INDICES = [
    (slice(None), slice(1, None)),
    (slice(None), slice(None, 2)),
    (slice(None), slice(1, 3)),
    (slice(None), slice(-2, None)),
    (slice(None), slice(None, -1)),
    (slice(None), slice(-3, 2)),
    (slice(None), slice(1, -1), 0),
    (slice(None), slice(None), slice(1, 3)),
    (..., 2),
    (..., None),
    (slice(None), None, ..., -1),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_entries_of_every_row(index, layout):
    batch = make_batch(layout)
    rest = index if index[0] is ... else index[1:]
    if layout == "ragged dim 2" and index == (..., 2):
        pytest.skip("one entry of every row there")
    if layout == "ragged dim 2" and index[0] is not ...:
        rest = (*rest[:0], slice(None), *rest[:1]) if len(rest) == 1 and isinstance(rest[0], slice) else None
        if rest is None:
            pytest.skip("written for ragged dim 1")
        index = (slice(None), *rest)
    got = check_rows(batch, lambda x: x[index], lambda row, _: row[rest])
    assert got.max_length >= max(got.row_lengths().tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("position", [0, -1])
def test_one_entry_of_every_row(position, layout):
    batch = make_batch(layout, lengths=[3, 1, 5])
    index = (slice(None), slice(None), position) if layout == "ragged dim 2" else (slice(None), position)
    check_parts(batch, list(batch.x[index]), [row[index[1:]] for row in batch.rows])
    if layout != "ragged dim 2":
        check_parts(batch, list(batch.x[:, position, 1:3]), [row[position, 1:3] for row in batch.rows])


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor], ids=lambda c: c.__name__)
@pytest.mark.parametrize("lengths", [[1], [1, 1], [1, 0, 1]], ids=str)
@pytest.mark.parametrize("entry", [(4,), (1,), (2, 1)], ids=str)
def test_rows_of_one_entry_are_merged_and_unmerged(entry, lengths, cls):
    x = cls.from_tensors([torch.randn(n, *entry) for n in lengths])
    for y in (
        x.flatten(0, 1).unflatten(0, x.shape[:2]),
        x.view(-1, *entry).view(x.shape),
        x.reshape(-1, *entry).reshape(*x.shape[:2], -1).reshape(x.shape),
    ):
        assert (y.shape, y.ragged_dim) == (x.shape, x.ragged_dim)
        torch.testing.assert_close(y.to_tensors(), x.to_tensors())


def test_a_row_too_short_is_named():
    with pytest.raises(IndexError, match=r"rows \[1\]"):
        make_batch().x[:, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "which",
    [
        slice(1, 3),
        slice(None, -1),
        slice(2, 2),
        slice(None, None, 2),
        [2, 0, 2],
        torch.tensor([3, 1]),
        torch.tensor([True, False, True, True]),
    ],
    ids=str,
)
def test_some_rows(which, layout):
    batch = make_batch(layout)
    numbers = torch.arange(4)[which].tolist()
    got = batch.x[which]
    assert got.shape[0] == len(numbers)
    check_parts(batch, got.to_tensors(), [batch.rows[i] for i in numbers])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_row(layout):
    batch = make_batch(layout)
    check_parts(batch, [batch.x[2]], [batch.rows[2]])
    check_parts(batch, [batch.x[-1, 0]], [batch.rows[-1][0]])
    check_parts(batch, batch.x.unbind(), batch.rows)
    check_parts(batch, list(batch.x), batch.rows)
    with pytest.raises(IndexError, match="out of bounds for the 4 rows"):
        batch.x[4]


def test_groups_of_rows():
    batch = make_batch("holes")
    for groups in (batch.x.chunk(3), batch.x.split(2), batch.x.split([1, 3])):
        check_parts(batch, [row for group in groups for row in group], batch.rows)


def test_slices_share_the_values():
    x = make_batch().x
    assert x[1:, :-1].values.data_ptr() == x.values.data_ptr()


def test_entries_under_a_mask():
    batch = make_batch("holes", entry=())
    check_rows(batch, lambda x: x[x > 0], lambda row, _: row[row > 0])
    check_rows(batch, lambda x: x.masked_select(x > 0), lambda row, _: row[row > 0])
    wide = make_batch("holes")
    check_rows(wide, lambda x: x[x.sum(2) > 0], lambda row, _: row[row.sum(1) > 0])


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
