"""Gradients given by hand, and gradients of leaves, on both layouts."""

from __future__ import annotations

import pytest
import torch

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.both import row_dim
from tests.subclasses.ragged.judge import desugared, eager, stock
from tests.subclasses.ragged.padded_judge import PLACES, make_table

ROWS = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0]), torch.tensor([5.0, 6.0])]
TWOS = [torch.ones(2), torch.ones(2), torch.ones(2)]  # as many entries, other rows

cases = pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor], ids=lambda c: c.__name__)
ways = pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)

GIVERS = {
    "backward": lambda y, x, g: (y.backward(g), x.grad)[1],
    "autograd.backward": lambda y, x, g: (torch.autograd.backward([y], [g]), x.grad)[1],
    "autograd.grad": lambda y, x, g: torch.autograd.grad(y, x, g)[0],
}
givers = pytest.mark.parametrize("give", GIVERS.values(), ids=GIVERS.keys())


def leaf_of(cls):
    return cls.from_tensors(ROWS).requires_grad_()


def rows_of(x):
    return [row.tolist() for row in x.to_tensors()]


# ---- given by hand ---------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@givers
@ways
@cases
def test_other_lengths_are_an_error(cls, way, give):
    x = leaf_of(cls)
    y = way(lambda x: x * 2)(x)
    for rows in (TWOS, [*TWOS[:2], torch.ones(3)]):
        with pytest.raises(ValueError, match=r"lengths \[3, 1, 2\] and \[2, 2, [23]\]"):
            give(y, x, cls.from_tensors(rows))
    assert x.grad is None
    assert rows_of(give(y, x, y.detach())) == [[4, 8, 12], [16], [20, 24]]  # nothing was freed meanwhile


@givers
@cases
def test_other_sizes_and_layouts_are_an_error(cls, give):
    x = leaf_of(cls)
    other = PaddedTensor if cls is JaggedTensor else JaggedTensor
    wrong = [torch.ones(3), torch.ones(3, 2), other.from_tensors(ROWS), cls.from_tensors(ROWS).unsqueeze(-1)]
    for g in wrong:
        with pytest.raises(ValueError, match=r"a gradient and its value have the same rows"):
            give(x * 2, x, g)
    assert x.grad is None


@pytest.mark.sweep(2)
@givers
@ways
@cases
def test_the_same_lengths_of_another_tensor(cls, way, give):
    x = leaf_of(cls)
    got = give(way(lambda x: x * 2)(x), x, cls.from_tensors([row + 1 for row in ROWS]))
    assert type(got) is cls and got.row_lengths().tolist() == [3, 1, 2]
    assert rows_of(got) == [[4, 6, 8], [10], [12, 14]]


@pytest.mark.sweep(2)
@givers
@ways
@cases
def test_a_dense_one_counts_where_there_are_entries(cls, way, give):
    x = leaf_of(cls)
    got = give(way(lambda x: x * 2)(x), x, torch.arange(9.0).view(3, 3))
    assert type(got) is cls
    assert rows_of(got) == [[0, 2, 4], [6], [12, 14]]


@givers
def test_holes_and_wider_tables(give):
    x = leaf_of(JaggedTensor)
    holey = JaggedTensor(torch.arange(12.0), torch.tensor([0, 4, 8, 12]), lengths=torch.tensor([3, 1, 2]))
    assert rows_of(give(x * 2, x, holey)) == [[0, 2, 4], [8], [16, 18]]
    x = leaf_of(PaddedTensor)
    assert rows_of(give(x * 2, x, PaddedTensor.from_tensors(ROWS, multiple=8))) == [[2, 4, 6], [8], [10, 12]]


@cases
def test_several_outputs(cls):
    x, bias = leaf_of(cls), torch.zeros(3, requires_grad=True)
    y, z = x * 2, (x + bias).sum(1)
    with pytest.raises(ValueError, match=r"lengths \[3, 1, 2\] and \[2, 2, 2\]"):
        torch.autograd.backward([z, y], [torch.ones(3), cls.from_tensors(TWOS)])
    with pytest.raises(ValueError, match=r"is dense, got a"):
        torch.autograd.backward([z, y], [x.detach(), None])
    torch.autograd.backward([z, y], [torch.ones(3), y.detach()])
    assert rows_of(x.grad) == [[5, 9, 13], [17], [21, 25]]
    assert bias.grad.tolist() == [3, 2, 1]


@cases
def test_a_second_derivative(cls):
    x, g = leaf_of(cls), torch.ones(3, 3, requires_grad=True)
    (first,) = torch.autograd.grad(x * x, x, g, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), g)
    assert second.tolist() == [[2, 4, 6], [8, 0, 0], [10, 12, 0]]


# ---- given by a hook -------------------------------------------------------------------------------------------


def hooked(cls, of_leaf, hook):
    x = leaf_of(cls)
    y = x * 2
    return x, y, (x if of_leaf else y).register_hook(hook)


hooks = pytest.mark.parametrize("of_leaf", [True, False], ids=["leaf", "result"])


@hooks
@cases
@pytest.mark.parametrize("wrong", [lambda cls: cls.from_tensors(TWOS), lambda cls: torch.ones(3)])
def test_what_a_hook_may_not_return(cls, of_leaf, wrong):
    x, y, handle = hooked(cls, of_leaf, lambda g: wrong(cls))
    with pytest.raises(ValueError, match=r"a hook: a gradient and its value"):
        y.sum().backward(retain_graph=True)
    assert x.grad is None
    handle.remove()
    y.sum().backward()
    assert rows_of(x.grad) == [[2, 2, 2], [2], [2, 2]]


@hooks
@cases
@pytest.mark.parametrize(
    ("hook", "n"),
    [
        (lambda g: g * 3, 6),
        (lambda g: type(g).from_tensors([row * 3 for row in g.to_tensors()]), 6),
        (lambda g: None, 2),
    ],
)
def test_what_a_hook_returns(cls, of_leaf, hook, n):
    x, y, _ = hooked(cls, of_leaf, hook)
    y.sum().backward()
    assert rows_of(x.grad) == [[n, n, n], [n], [n, n]]


# ---- leaves ----------------------------------------------------------------------------------------------------

CUTS = {
    "x[:, 1:]": lambda x: x[:, 1:],
    "x[1:]": lambda x: x[1:],
    "x[:, :2]": lambda x: x[:, :2],
    "x[1:, 1:]": lambda x: x[1:, 1:],
    "x[:, ::2]": lambda x: x[:, ::2],
    "narrow": lambda x: x.narrow(1, 0, 2),
    "split": lambda x: x.split(2, 0)[1],
    "chunk": lambda x: x.chunk(2, 0)[0],
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", [eager, desugared, stock], ids=lambda w: w.__name__)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_a_leaf_of_which_slices_are_used(cut, way):
    table = make_table()
    x = PaddedTensor(table.leaf.detach(), table.lengths).requires_grad_()
    way(lambda x: cut(x).square())(x).sum().backward()
    (wanted,) = torch.autograd.grad(cut(table.x).square().sum(), table.leaf)
    assert type(x.grad) is PaddedTensor and torch.equal(x.grad.lengths, table.lengths)
    torch.testing.assert_close(x.grad.to_dense(), wanted)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_a_leaf_of_which_a_compiled_function_returns_slices(cut):
    x = leaf_of(PaddedTensor)
    for way in (eager, desugared):
        part = way(cut)(x)
        (grad,) = torch.autograd.grad(part, x, torch.ones_like(part))
        assert type(grad) is PaddedTensor and grad.lengths is x.lengths


@pytest.mark.parametrize("places", PLACES)
def test_slices_of_other_layouts(places):
    table = make_table(places)
    x = table.x.detach().requires_grad_()
    x[(*[slice(None)] * table.ragged_dim, slice(1, 3))].square().sum().backward()
    assert (x.grad.ragged_dim, x.grad.batch_dim) == (x.ragged_dim, x.batch_dim)
    rows = [row.detach().requires_grad_() for row in table.rows]
    place = row_dim(table)
    sum(row[(*[slice(None)] * place, slice(1, 3))].square().sum() for row in rows).backward()
    torch.testing.assert_close(x.grad.to_tensors(), [row.grad for row in rows])


def test_a_slice_that_was_written_to():
    x = leaf_of(PaddedTensor)
    z = x * 2
    z[:, 1:].mul_(3)
    (grad,) = torch.autograd.grad(z.sum(), x)
    assert rows_of(grad) == [[2, 6, 6], [2], [2, 6]]


@pytest.mark.filterwarnings("ignore:(Anomaly Detection|Error detected):UserWarning")
@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
def test_anomaly_mode_finds_a_nan_in_the_entries_alone(cls):
    layer, x = torch.nn.Linear(4, 2), cls.from_tensors([torch.rand(2, 4), torch.rand(3, 4)])
    with torch.autograd.set_detect_anomaly(True):
        layer(x).sum().backward()
        with pytest.raises(RuntimeError, match="returned nan values"):
            (-1 - layer(x).square()).sqrt().sum().backward()
