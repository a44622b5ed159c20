"""Views, on both layouts, and as results of PyTorch's ``torch.compile``, which makes them anew by ``as_strided``."""

from __future__ import annotations

import pytest
import torch

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.doors import by_desugar, by_stock
from tests.subclasses.ragged.judge import (
    WAYS,
    classes,
    desugared,
    eager,
    judge_rows,
    judged,
    layouts,
    make,
    make_batch,
    pairs_of,
    random,
    refused,
    same,
    stock,
)
from tests.tables import giving

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


BATCH = make_batch()
test_merged_dimensions_hold_what_exists = giving(
    {
        "size": (lambda: BATCH.x.flatten(0, 1).shape, (9, 4)),
        "place": (lambda: BATCH.x.flatten(0, 1).ragged_dim, 0),
        "rows": (
            lambda: (lambda x: x.flatten(0, 1).unflatten(0, x.shape[:2]).offsets is BATCH.offsets)(BATCH.x),
            True,
        ),
    }
)


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


# ==== made anew by as_strided =======================================================================================

MADE_ANEW = {
    "transpose": lambda x: x.transpose(1, 2),
    "detach": lambda x: x.detach(),
    "chunk": lambda x: x.chunk(2, -1)[1],
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)),
    "features": lambda x: x[..., 1:],
    "each second": lambda x: x[..., ::2],
    "a feature": lambda x: x[..., 2],
    "twice": lambda x: x.transpose(1, 2)[:, 1:3].unsqueeze(1),
}


def rows_of(x):
    return [row.detach() for row in x.to_tensors()]


@pytest.mark.sweep(9)
@layouts
@pytest.mark.parametrize("name", MADE_ANEW)
def test_values_gradients_and_writes(name, layout):
    f, batch = MADE_ANEW[name], make(layout)
    x, y = (batch.x.detach().clone().requires_grad_() for _ in range(2))
    got, expected = stock(f)(x), f(y)
    torch.testing.assert_close(rows_of(got), rows_of(expected))
    assert got.requires_grad == expected.requires_grad
    assert (got.shape, got.ragged_dim) == (expected.shape, expected.ragged_dim)
    if got.requires_grad:
        grads = [torch.autograd.grad((y * y).sum(), x)[0] for x, y in ((x, got), (y, expected))]
        torch.testing.assert_close(*map(rows_of, grads))
    x, y = x.detach(), y.detach()
    stock(f)(x).mul_(3)
    f(y).mul_(3)
    torch.testing.assert_close(rows_of(x), rows_of(y))


TURNED = make_batch("ragged dim 2").x.detach()
MERGED = make_batch("holes").x.detach().flatten(0, 1)
VALUES = torch.randn(9, 4)[2:]  # which begin behind their storage
TABLE = torch.randn(6, 5, 4)[1:]
ROWS_LAST = PaddedTensor(TABLE, torch.tensor([1, 2, 3, 4]), ragged_dim=0, batch_dim=2)
test_other_layouts = same(
    {
        "ragged dim 2": lambda: (
            stock(lambda x: x.transpose(1, 2)[..., 1:])(TURNED),
            [row.mT[:, 1:] for row in TURNED.to_tensors()],
        ),
        "merged": lambda: (stock(lambda x: x[:, 1:])(MERGED).entries(), MERGED.entries()[:, 1:]),
        "values behind their storage": lambda: (
            stock(lambda x: x[..., 1:])(JaggedTensor(VALUES, torch.tensor([0, 3, 7]))).values,
            VALUES[:, 1:],
        ),
        "rows last": lambda: (
            (lambda y: (y.padded, y.ragged_dim, y.batch_dim))(
                stock(lambda x: x.transpose(0, 1)[1:3])(ROWS_LAST)
            ),
            (TABLE.transpose(0, 1)[1:3], 1, 2),
        ),
    }
)


@layouts
def test_other_lengths_and_sizes(layout):
    f = stock(MADE_ANEW["features"])
    for lengths in ([3, 0, 5], [2, 4], [6, 1, 2, 3]):
        batch = make(layout, lengths)
        torch.testing.assert_close(rows_of(f(batch.x.detach())), [row.detach()[:, 1:] for row in batch.rows])


@layouts
def test_what_strides_do_not_tell(layout):
    x = make(layout, [1, 1], entry=(1,)).x.detach()
    if layout == "padded":
        x = x.to_jagged().to_padded()
    with pytest.raises(NotImplementedError, match=r"cannot tell where the rows .* backend='desugar'"):
        x.as_strided((2, 1, 1), (1, 1, 1))
    with pytest.raises(NotImplementedError, match="cannot tell where the rows"):
        make(layout).x.as_strided((2, 3), (1, 1))


def test_rows_that_were_cut():
    x = make("padded").x.detach()
    for grad in (False, True):
        with pytest.raises(NotImplementedError, match=r"^(aten\.)?as_strided.*: cannot tell where the rows"):
            stock(lambda x: x[:, 1:])(x.detach().requires_grad_(grad))


@pytest.mark.sweep(12)
@pytest.mark.parametrize("begin", [3, 4, 5, 8])
@pytest.mark.parametrize("name", MADE_ANEW)
def test_a_beginning_is_never_misread(name, begin):
    """Releases of PyTorch count it once or twice."""
    values = torch.randn(60)[begin : begin + 28].view(7, 4)
    x = JaggedTensor(values, torch.tensor([0, 3, 7]))
    try:
        got = stock(MADE_ANEW[name])(x)
    except NotImplementedError as error:
        assert "for certain" in str(error)  # noqa: PT017  refused or right
        return
    torch.testing.assert_close(rows_of(got), rows_of(MADE_ANEW[name](x)))


SIZED = {
    "a copy, stock": (by_stock, lambda x, n: x[..., :n].clone()),
    "a view, ours": (by_desugar, lambda x, n: x[..., :n]),
}


@layouts
@pytest.mark.parametrize("way", SIZED)
def test_a_size_that_is_an_int_argument(way, layout):
    """Stock raises IndexError for the view, also of PyTorch's own wrappers."""
    door, f = SIZED[way]
    compiled = door(f)
    for n in (2, 3, 1, 4):
        x = make(layout).x.detach()
        got, expected = compiled(x, n), f(x, n)
        assert (type(got), got.shape, got.ragged_dim) == (type(expected), expected.shape, expected.ragged_dim)
        torch.testing.assert_close(rows_of(got), rows_of(expected))
