"""Gradients given by hand, gradients of leaves, and holes, which reach no gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import (
    PLACES,
    WAYS,
    classes,
    make_table,
    numbers_of,
    row_dim,
    two_ways,
)

ROWS = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0]), torch.tensor([5.0, 6.0])]
TWOS = [torch.ones(2), torch.ones(2), torch.ones(2)]  # as many entries, other rows
HOLES = JaggedTensor(
    torch.tensor([1.0, 2, 3, 9, 4, 9, 5, 6]), torch.tensor([0, 4, 6, 8]), lengths=torch.tensor([3, 1, 2])
)

GIVERS = {
    "backward": lambda y, x, g: (y.backward(g), x.grad)[1],
    "autograd.backward": lambda y, x, g: (torch.autograd.backward([y], [g]), x.grad)[1],
    "autograd.grad": lambda y, x, g: torch.autograd.grad(y, x, g)[0],
}
givers = pytest.mark.parametrize("give", GIVERS.values(), ids=GIVERS.keys())


def leaf_of(cls):
    return cls.from_tensors(ROWS).requires_grad_()


# ---- given by hand ---------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@givers
@two_ways
@classes
def test_what_is_no_gradient_is_an_error(cls, way, give):
    x = leaf_of(cls)
    y, other = way(lambda x: x * 2)(x), PaddedTensor if cls is JaggedTensor else JaggedTensor
    for rows in (TWOS, [*TWOS[:2], torch.ones(3)]):
        with pytest.raises(ValueError, match=r"lengths \[3, 1, 2\] and \[2, 2, [23]\]"):
            give(y, x, cls.from_tensors(rows))
    wrong = [torch.ones(3), torch.ones(3, 2), other.from_tensors(ROWS), cls.from_tensors(ROWS).unsqueeze(-1)]
    for g in wrong:
        with pytest.raises(ValueError, match=r"a gradient and its value have the same rows"):
            give(y, x, g)
    assert x.grad is None
    assert numbers_of(give(y, x, y.detach())) == [[4, 8, 12], [16], [20, 24]]  # nothing was freed meanwhile


GIVEN = {
    "the same lengths of another tensor": (
        lambda cls: cls.from_tensors([row + 1 for row in ROWS]),
        [[4, 6, 8], [10], [12, 14]],
    ),
    "dense, which counts where there are entries": (
        lambda cls: torch.arange(9.0).view(3, 3),
        [[0, 2, 4], [6], [12, 14]],
    ),
    "wider tables, or holes": (
        lambda cls: PaddedTensor.from_tensors(ROWS, multiple=8) if cls is PaddedTensor else HOLES,
        [[2, 4, 6], [8], [10, 12]],
    ),
}


@pytest.mark.sweep(2)
@givers
@two_ways
@classes
@pytest.mark.parametrize("name", GIVEN)
def test_what_is_a_gradient(name, cls, way, give):
    g, expected = GIVEN[name]
    x = leaf_of(cls)
    got = give(way(lambda x: x * 2)(x), x, g(cls))
    assert type(got) is cls and numbers_of(got) == expected


@classes
def test_several_outputs(cls):
    x, bias = leaf_of(cls), torch.zeros(3, requires_grad=True)
    y, z = x * 2, (x + bias).sum(1)
    with pytest.raises(ValueError, match=r"lengths \[3, 1, 2\] and \[2, 2, 2\]"):
        torch.autograd.backward([z, y], [torch.ones(3), cls.from_tensors(TWOS)])
    with pytest.raises(ValueError, match=r"is dense, got a"):
        torch.autograd.backward([z, y], [x.detach(), None])
    torch.autograd.backward([z, y], [torch.ones(3), y.detach()])
    assert numbers_of(x.grad) == [[5, 9, 13], [17], [21, 25]]
    assert bias.grad.tolist() == [3, 2, 1]


@classes
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
@classes
@pytest.mark.parametrize("wrong", [lambda cls: cls.from_tensors(TWOS), lambda cls: torch.ones(3)])
def test_what_a_hook_may_not_return(cls, of_leaf, wrong):
    x, y, handle = hooked(cls, of_leaf, lambda g: wrong(cls))
    with pytest.raises(ValueError, match=r"a hook: a gradient and its value"):
        y.sum().backward(retain_graph=True)
    assert x.grad is None
    handle.remove()
    y.sum().backward()
    assert numbers_of(x.grad) == [[2, 2, 2], [2], [2, 2]]


@hooks
@classes
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
    assert numbers_of(x.grad) == [[n, n, n], [n], [n, n]]


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
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_a_leaf_of_which_slices_are_used(cut, way):
    table = make_table()
    x = PaddedTensor(table.leaf.detach(), table.lengths).requires_grad_()
    way(lambda x: cut(x).square())(x).sum().backward()
    (wanted,) = torch.autograd.grad(cut(table.x).square().sum(), table.leaf)
    assert type(x.grad) is PaddedTensor and torch.equal(x.grad.lengths, table.lengths)
    torch.testing.assert_close(x.grad.to_dense(), wanted)


@pytest.mark.sweep(2)
@two_ways
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_a_leaf_of_which_slices_are_returned(cut, way):
    x = leaf_of(PaddedTensor)
    part = way(cut)(x)
    (grad,) = torch.autograd.grad(part, x, torch.ones_like(part))
    assert type(grad) is PaddedTensor and grad.lengths is x.lengths


@pytest.mark.parametrize("places", PLACES)
def test_slices_of_other_layouts(places):
    table = make_table(places)
    x, rows = table.x.detach().requires_grad_(), [row.detach().requires_grad_() for row in table.rows]
    x.narrow(x.ragged_dim, 1, 2).square().sum().backward()
    assert (x.grad.ragged_dim, x.grad.batch_dim) == (x.ragged_dim, x.batch_dim)
    part = (*[slice(None)] * row_dim(table), slice(1, 3))
    sum(row[part].square().sum() for row in rows).backward()
    torch.testing.assert_close(x.grad.to_tensors(), [row.grad for row in rows])


@pytest.mark.filterwarnings("ignore:(Anomaly Detection|Error detected):UserWarning")
@classes
def test_anomaly_mode_finds_a_nan_in_the_entries_alone(cls):
    layer, x = torch.nn.Linear(4, 2), cls.from_tensors([torch.rand(2, 4), torch.rand(3, 4)])
    with torch.autograd.set_detect_anomaly(True):
        layer(x).sum().backward()
        with pytest.raises(RuntimeError, match="returned nan values"):
            (-1 - layer(x).square()).sqrt().sum().backward()


# ---- holes -----------------------------------------------------------------------------------------------------

OFFSETS, LENGTHS = torch.tensor([0, 3, 6]), torch.tensor([2, 2])

OPS = {
    "exp": torch.exp,
    "log": torch.log,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "var": lambda x: x.var(1),
    "amax": lambda x: x.amax(-1),
    "prod": lambda x: x.prod(-1),
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@two_ways
def test_a_gradient_is_that_of_the_rows(op, fill, way):
    def loss(values, offsets, lengths):
        return op(JaggedTensor(values, offsets, lengths=lengths, max_length=3)).sum()

    values = torch.arange(1.0, 13.0, dtype=torch.float64).view(6, 2)
    values[[2, 5]] = fill
    way(loss)(values.requires_grad_(), OFFSETS, LENGTHS).backward()
    rows = [values.detach()[a : a + 2].requires_grad_() for a in (0, 3)]
    sum(op(row.unsqueeze(0)).sum() for row in rows).backward()
    hole = torch.zeros(1, 2)
    torch.testing.assert_close(values.grad, torch.cat([rows[0].grad, hole, rows[1].grad, hole]))


@two_ways
def test_a_bias_before_rows_are_cut(way):
    x = JaggedTensor.from_tensors(
        [torch.tensor([[1.0, 1], [2, 2], [0, 0]]), torch.tensor([[3.0, 3], [0, 0]])]
    )
    w = torch.ones(2, requires_grad=True)
    way(lambda x, w: (x * w)[:, :-1].log().sum())(x, w).backward()
    assert w.grad.tolist() == [3, 3]
