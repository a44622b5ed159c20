"""Writes into slices, which share what is stored with the tensor that they come from."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import WAYS, classes, desugared, numbers_of, stock, two_ways


def make(cls):
    return cls.from_tensors([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0]), torch.tensor([5.0, 6.0])])


# ---- what a write reaches --------------------------------------------------------------------------------------

CUTS = {
    "x[1:]": (lambda x: x[1:], [[1, 2, 3], [-4], [-5, -6]]),
    "x[:2]": (lambda x: x[:2], [[-1, -2, -3], [-4], [5, 6]]),
    "x[:, 1:]": (lambda x: x[:, 1:], [[1, -2, -3], [4], [5, -6]]),
    "x[:, :1]": (lambda x: x[:, :1], [[-1, 2, 3], [-4], [-5, 6]]),
    "x[1:][:, 1:]": (lambda x: x[1:][:, 1:], [[1, 2, 3], [4], [5, -6]]),
    "narrow": (lambda x: x.narrow(1, 0, 2), [[-1, -2, 3], [-4], [-5, -6]]),
    "split": (lambda x: x.split(2)[1], [[1, 2, 3], [4], [-5, -6]]),
    "merged": (lambda x: x[1:].flatten(0, 1), [[1, 2, 3], [-4], [-5, -6]]),
}
WRITES = {
    "neg_": lambda t: t.neg_(),
    "mul_": lambda t: t.mul_(-1),
    "copy_": lambda t: t.copy_(-t),
    "sub_": lambda t: t.sub_(t * 2),
    "masked_fill_": lambda t: [t.masked_fill_(t == n, -float(n)) for n in range(1, 7)],
    "lerp_": lambda t: t.lerp_(-t, 1.0),
    "out=": lambda t: torch.neg(t, out=t),
    "copy_ of another dtype": lambda t: t.copy_(-t.long()),
}


@pytest.mark.sweep(3)
@classes
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", CUTS)
def test_a_write_reaches_what_is_in_the_slice(name, write, cls):
    cut, expected = CUTS[name]
    x = make(cls)
    write(cut(x))
    assert numbers_of(x) == expected


@pytest.mark.sweep(12)
@classes
@pytest.mark.parametrize("name", CUTS)
def test_in_a_graph(name, cls):
    cut, expected = CUTS[name]
    x = make(cls)
    got = desugared(lambda x: (cut(x).neg_(), x.sum())[1])(x)
    assert numbers_of(x) == expected and got == sum(map(sum, expected))


@classes
def test_numbers_and_dropout(cls):
    x = make(cls)
    x[:, :1].zero_()
    x[:2].fill_(7)
    F.dropout(x[2:], 1.0, inplace=True)
    assert numbers_of(x) == [[7, 7, 7], [7], [0, 0]]


# ---- what autograd knows of it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("of_weight", [False, True], ids=["of the values", "of a weight"])
@pytest.mark.parametrize("name", CUTS)
def test_a_recorded_write_to_shared_values_is_refused(name, of_weight):
    """The gradient of the other tensor would not know of it."""
    cut, _ = CUTS[name]
    x = make(JaggedTensor).requires_grad_(not of_weight)
    w, y = torch.ones(1, requires_grad=of_weight), x * 1
    for write in (lambda t: t.mul_(w * 2), lambda t: t.copy_(t * w), lambda t: t.mul_(w).add_(1)):
        with pytest.raises(NotImplementedError, match=r"shares its values"):
            write(cut(y))
    assert numbers_of(y.detach()) == numbers_of(x.detach())
    with torch.no_grad():
        cut(y).neg_()
    assert numbers_of(y.detach()) == CUTS[name][1]


@pytest.mark.parametrize("name", CUTS)
def test_of_a_padded_tensor_it_has_its_gradient(name):
    cut, signs = CUTS[name]
    x = make(PaddedTensor).requires_grad_()
    y = x * 1
    cut(y).neg_()
    y.sum().backward()
    assert numbers_of(x.grad) == [[1 if n > 0 else -1 for n in row] for row in signs]


@classes
def test_rows_are_not_written_to_where_it_would_be_lost(cls):
    y = make(cls).requires_grad_() * 1
    stored = cls.__spec__.size_from
    for part in (lambda: y[1], lambda: y.unbind()[1], lambda: y.to_tensors()[1], lambda: y.unwrap(stored)):
        with pytest.raises(RuntimeError, match="is being modified inplace"):
            part().mul_(2)
    assert numbers_of(y.detach()) == numbers_of(make(cls))
    make(cls)[1].mul_(2)


WRITERS = {
    "mul_": lambda y: y.mul_(2),
    "copy_": lambda y: y.copy_(y.detach() * 2),
    "x[index] = value": lambda y: y.__setitem__((slice(None), 0), 5.0),
    "index_put_": lambda y: y.index_put_((torch.tensor([0]), torch.tensor([0])), torch.tensor(5.0)),
    "dropout": lambda y: F.dropout(y, 0.5, inplace=True),
}


@classes
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_later_write_to_what_was_saved_is_noticed(write, cls):
    y = make(cls).requires_grad_() * 1
    total = y.unwrap(cls.__spec__.size_from).square().sum()
    write(y)
    with pytest.raises(RuntimeError, match="modified"):
        total.backward()


@pytest.mark.parametrize("of_slice", [False, True])
@pytest.mark.parametrize("name", CUTS)
@classes
def test_a_slice_that_was_saved_notices_a_write(name, cls, of_slice):
    y = make(cls).requires_grad_() * 1
    part = CUTS[name][0](y)
    total = (y * y).sum() + (part * part).sum()
    with torch.no_grad():
        (part if of_slice else y).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.sweep(2)
@two_ways
@classes
def test_dropout_in_place(cls, way):
    def loss(x):
        y = x * 2
        assert F.dropout(y, 0.5, False, inplace=True) is y
        F.dropout(y, 1.0, inplace=True)
        return (y + x).sum()

    x = make(cls).requires_grad_()
    way(loss)(x).backward()
    assert numbers_of(x.grad) == [[1, 1, 1], [1], [1, 1]]


@two_ways
@classes
def test_a_dense_source_gets_a_dense_gradient(cls, way):
    x, source = make(cls), torch.randn(3, 3, requires_grad=True)
    way(lambda x, source: (x * 1).copy_(source * 2).sum())(x, source).backward()
    assert source.grad.tolist() == [[2, 2, 2], [2, 0, 0], [2, 2, 0]]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_write_beside_a_slice_in_use_is_refused(way):
    """The gradient of the slice would not know of it."""

    def beside(x):
        y = x * 1
        part = y[:, 1:]
        y.mul_(2)
        return part.sum()

    def after(x):
        y = x * 1
        total = y[:, 1:].sum()
        y[:1] = y[:1] * 3
        return total + y.mul_(2).flatten(0, 1).sum()

    x = make(JaggedTensor).requires_grad_()
    refused = torch._dynamo.exc.BackendCompilerFailed if way is stock else NotImplementedError
    with pytest.raises(refused, match=r"is in use and shares its values"):
        way(beside)(x)
    way(after)(x).backward()
    assert numbers_of(x.grad) == [[6, 7, 7], [2], [2, 3]]


@pytest.mark.parametrize("twin", [copy.deepcopy, copy.copy, lambda t: pickle.loads(pickle.dumps(t))])
def test_what_shares_values_is_copied_without_the_rest(twin):
    y = make(JaggedTensor)
    for t in (y, y[1:]):
        assert numbers_of(twin(t)) == numbers_of(t)
    copy.deepcopy(y[1:]).neg_()
    assert numbers_of(y) == numbers_of(make(JaggedTensor))
