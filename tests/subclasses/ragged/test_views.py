"""Views, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch

from subclasses import DispatchError
from tests.subclasses.ragged.judge import (
    WAYS,
    classes,
    desugared,
    eager,
    judge_rows,
    judged,
    make,
    make_batch,
    pairs_of,
    random,
    refused,
)

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
    "unflatten -1": (lambda x: x.unflatten(-1, (1, 6)), lambda r: r.unflatten(-1, (1, 6))),
    "index": (lambda x: x[:, :, 1:3, -1], lambda r: r[:, 1:3, -1]),
    "cat": (lambda x: torch.cat([x, x * 2], -1), lambda r: torch.cat([r, r * 2], -1)),
    "clone": (lambda x: x.clone() * x, lambda r: r * r),
    "to": (lambda x: x.to(torch.float32).double(), lambda r: r.float().double()),
}
# Only a table has these.
OF_TABLES = {
    "transpose batch": (lambda x: x.transpose(0, 1), lambda r: r),
    "unsqueeze 0": (lambda x: x.unsqueeze(0), lambda r: r.unsqueeze(0)),
    "view after": (
        lambda x: x.transpose(1, 2).contiguous().view(4, 2, 2, 7, 6),
        lambda r: r.transpose(0, 1).reshape(2, 2, -1, 6),
    ),
}


def doubled(views):
    """Cases of functions whose results are read by another op."""
    return {name: (lambda x, f=f: f(x) * 2, lambda row, _, g=g: g(row) * 2) for name, (f, g) in views.items()}


NO_COPY = {name: case for name, case in VIEWS.items() if "view" not in name}

test_views = judged(
    doubled(VIEWS),
    [("holes", eager), *pairs_of(["back to back"], WAYS)],
    sweep=12,
    entry=(4, 6),
)
test_views_of_values_that_are_not_contiguous = judged(
    doubled(NO_COPY), [("not contiguous", eager)], sweep=12, entry=(4, 6)
)
test_views_of_tables = judged(
    doubled(VIEWS | OF_TABLES), pairs_of(["padded"], [eager, desugared]), sweep=12, entry=(4, 6)
)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 2).unsqueeze(-1),
        lambda x: x.flatten(2),
        lambda x: x[..., 1:],
        lambda x: x.chunk(2, 2)[0],
        lambda x: x.unsqueeze(1),
    ],
)
@pytest.mark.parametrize("layout", ["back to back", "padded"])
def test_a_view_shares_memory_and_is_written_through(layout, view):
    batch = make(layout, entry=(4, 6))
    x, rows = batch.x.detach(), [row.detach().clone() for row in batch.rows]
    part = view(x)
    assert part._is_view()
    part.mul_(0)
    for of_row in (view(row.unsqueeze(0)) for row in rows):
        of_row.mul_(0)
    torch.testing.assert_close(x.to_tensors(), rows)


def write_to_a_view(t, dim):
    y = t * 1
    y.transpose(dim, dim + 1)[..., :2].mul_(t.transpose(dim, dim + 1)[..., :2])
    return y


test_a_view_written_in_place_under_autograd = judged(
    {"mul_": (lambda x: write_to_a_view(x, 2), lambda row, _: write_to_a_view(row, 1))},
    pairs_of(["back to back", "padded"]),
    entry=(4, 6),
)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 1, 4)])
@pytest.mark.parametrize("length", [0, 1])
def test_extents_of_one(shape, length):
    b, t, d = shape
    judge_rows(
        "padded",
        lambda x, p: (x + p).unflatten(-1, (1, d)),
        lambda row, _, p: (row + p[0]).unsqueeze(1),
        [random(1, 1, d)],
        [length] * b,
        (d,),
        width=t,
    )
    x = make("padded", [length] * b, (d,), width=t).x.detach()
    assert x.squeeze().sum() == x.to_dense().sum()


def test_merged_dimensions_hold_what_exists():
    batch = make_batch()
    merged = batch.x.flatten(0, 1)
    assert merged.shape == (9, 4) and merged.ragged_dim == 0
    assert merged.unflatten(0, batch.x.shape[:2]).offsets is batch.x.offsets


test_what_rows_cannot_do_is_refused = refused(
    {
        name: (f, DispatchError, "JaggedTensor")
        for name, f in {
            "transpose": lambda x: x.transpose(0, 2),
            "permute": lambda x: x.permute(1, 0, 2),
            "unsqueeze": lambda x: x.unsqueeze(0),
            "flatten": lambda x: x.flatten(),
            "flatten of places": lambda x: x.flatten(1),
            "view": lambda x: x.view(x.shape[0], -1),
            "flatten of features": lambda x: x.transpose(1, 2).flatten(0, 1),
            "expand": lambda x: x.expand(3, *x.shape),
            "backwards": lambda x: x[:, ::-1],
            "a sum of rows elsewhere": lambda x: x.mT + x,
        }.items()
    },
    ["back to back"],
)


@classes
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
