"""Views of ragged arguments as results of PyTorch's own ``torch.compile``, which makes them anew by ``as_strided``."""

from __future__ import annotations

import pytest
import torch

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.doors import by_desugar, by_stock
from tests.subclasses.ragged.judge import layouts, make, make_batch, stock

VIEWS = {
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
@pytest.mark.parametrize("name", VIEWS)
def test_values_and_gradients(name, layout):
    f, batch = VIEWS[name], make(layout)
    x = batch.x.detach().requires_grad_()
    got, expected = stock(f)(x), f(x)
    torch.testing.assert_close(rows_of(got), rows_of(expected))
    assert got.requires_grad == expected.requires_grad
    assert (got.shape, got.ragged_dim) == (expected.shape, expected.ragged_dim)
    if got.requires_grad:
        grads = [torch.autograd.grad((y * y).sum(), x)[0] for y in (got, expected)]
        torch.testing.assert_close(*map(rows_of, grads))


@pytest.mark.sweep(9)
@layouts
@pytest.mark.parametrize("name", VIEWS)
def test_writing_to_the_view(name, layout):
    f = VIEWS[name]
    x, y = (make(layout).x.detach() for _ in range(2))
    y.copy_(x)
    stock(f)(x).mul_(3)
    f(y).mul_(3)
    torch.testing.assert_close(rows_of(x), rows_of(y))


def test_other_layouts():
    batch = make_batch("ragged dim 2")
    got = stock(lambda x: x.transpose(1, 2)[..., 1:])(batch.x.detach())
    torch.testing.assert_close(rows_of(got), [row.detach().mT[:, 1:] for row in batch.rows])
    merged = make_batch("holes").x.detach().flatten(0, 1)
    torch.testing.assert_close(
        stock(lambda x: x[:, 1:])(merged).entries(), merged.entries()[:, 1:], equal_nan=True
    )
    values = torch.randn(9, 4)[2:]  # which begin behind their storage
    got = stock(lambda x: x[..., 1:])(JaggedTensor(values, torch.tensor([0, 3, 7])))
    torch.testing.assert_close(got.values, values[:, 1:])
    table = torch.randn(6, 5, 4)[1:]
    turned = PaddedTensor(table, torch.tensor([1, 2, 3, 4]), ragged_dim=0, batch_dim=2)
    got = stock(lambda x: x.transpose(0, 1)[1:3])(turned)
    assert (got.ragged_dim, got.batch_dim) == (1, 2)
    torch.testing.assert_close(got.padded, table.transpose(0, 1)[1:3])


@layouts
def test_other_lengths_and_sizes(layout):
    f = stock(VIEWS["features"])
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
@pytest.mark.parametrize("name", VIEWS)
def test_a_beginning_is_never_misread(name, begin):
    """Releases of PyTorch count it once or twice."""
    values = torch.randn(60)[begin : begin + 28].view(7, 4)
    x = JaggedTensor(values, torch.tensor([0, 3, 7]))
    try:
        got = stock(VIEWS[name])(x)
    except NotImplementedError as error:
        assert "for certain" in str(error)  # noqa: PT017  refused or right
        return
    torch.testing.assert_close(rows_of(got), rows_of(VIEWS[name](x)))


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
