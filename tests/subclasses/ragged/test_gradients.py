"""Gradients that are given and returned, holes, which reach no gradient, and writes into slices."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import (
    PLACES,
    WAYS,
    classes,
    desugared,
    eager,
    make_table,
    numbers_of,
    row_dim,
    stock,
    two_ways,
)
from tests.tables import giving

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


@pytest.mark.sweep(8)
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
def test_several_outputs_and_a_second_derivative(cls):
    x, bias = leaf_of(cls), torch.zeros(3, requires_grad=True)
    y, z = x * 2, (x + bias).sum(1)
    for gradients, words in (
        ([torch.ones(3), cls.from_tensors(TWOS)], r"lengths \[3, 1, 2\] and \[2, 2, 2\]"),
        ([x.detach(), None], r"is dense, got a"),
    ):
        with pytest.raises(ValueError, match=words):
            torch.autograd.backward([z, y], gradients)
    torch.autograd.backward([z, y], [torch.ones(3), y.detach()])
    assert numbers_of(x.grad) == [[5, 9, 13], [17], [21, 25]] and bias.grad.tolist() == [3, 2, 1]
    g = torch.ones(3, 3, requires_grad=True)
    (first,) = torch.autograd.grad(x * x, x, g, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), g)
    assert second.tolist() == [[2, 4, 6], [8, 0, 0], [10, 12, 0]]


test_values_are_free_until_the_backward = giving(
    {  # like a plain sum, which saves only the size
        cls.__name__: (
            lambda cls=cls: (
                (
                    summed := (
                        lambda y: (
                            torch.multiprocessing.reductions.StorageWeakRef(y.stored.untyped_storage()),
                            y.sum(),
                        )
                    )(leaf_of(cls) * 2)
                )[0].expired()
                and summed[1].requires_grad
            ),
            True,
        )
        for cls in (JaggedTensor, PaddedTensor)
    }
)


# ---- given by a hook -------------------------------------------------------------------------------------------


# The result of a hook, and the resulting gradient; None where the hook's result is refused.
HOOKS = {
    "another": (lambda g: g * 3, 6),
    "a new one": (lambda g: type(g).from_tensors([row * 3 for row in g.to_tensors()]), 6),
    "none": (lambda g: None, 2),
    "other rows": (lambda g: type(g).from_tensors(TWOS), None),
    "a dense one": (lambda g: torch.ones(3), None),
}


@pytest.mark.parametrize("of_leaf", [True, False], ids=["leaf", "result"])
@classes
@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_returns(name, cls, of_leaf):
    (hook, n), x = HOOKS[name], leaf_of(cls)
    y = x * 2
    total, handle = y.sum(), (x if of_leaf else y).register_hook(hook)
    if n is None:
        with pytest.raises(ValueError, match=r"a hook: a gradient and its value"):
            total.backward(retain_graph=True)
        assert x.grad is None
        handle.remove()
    total.backward()
    assert numbers_of(x.grad) == [[n or 2] * 3, [n or 2], [n or 2] * 2]


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


@pytest.mark.sweep(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_a_leaf_of_which_slices_are_used_or_returned(cut, way):
    table = make_table()
    x = PaddedTensor(table.leaf.detach(), table.lengths).requires_grad_()
    way(lambda x: cut(x).square())(x).sum().backward()
    (wanted,) = torch.autograd.grad(cut(table.x).square().sum(), table.leaf)
    assert type(x.grad) is PaddedTensor and torch.equal(x.grad.lengths, table.lengths)
    torch.testing.assert_close(x.grad.to_dense(), wanted)
    if way is not stock:
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

OPS = {
    "exp": torch.exp,
    "log": torch.log,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "var": lambda x: x.var(1),
    "amax": lambda x: x.amax(-1),
    "prod": lambda x: x.prod(-1),
}


@pytest.mark.sweep(32)
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@two_ways
def test_a_gradient_is_that_of_the_rows(op, fill, way):
    def loss(values, offsets, lengths):
        return op(JaggedTensor(values, offsets, lengths=lengths, max_length=3)).sum()

    values = torch.arange(1.0, 13.0, dtype=torch.float64).view(6, 2)
    values[[2, 5]] = fill
    places = torch.tensor([0, 3, 6]), torch.tensor([2, 2])
    way(loss)(values.requires_grad_(), *places).backward()
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


# ==== writes into slices ============================================================================================


def make(cls):
    return cls.from_tensors(ROWS)


# ---- values that a write reaches -------------------------------------------------------------------------------

WRITTEN_CUTS = {
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


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("write", "way"), [*((write, eager) for write in WRITES), ("neg_", desugared)])
@classes
@pytest.mark.parametrize("name", WRITTEN_CUTS)
def test_a_write_reaches_what_is_in_the_slice(name, cls, write, way):
    cut, expected = WRITTEN_CUTS[name]
    x = make(cls)
    got = way(lambda x: (WRITES[write](cut(x)), x.sum())[1])(x)
    assert numbers_of(x) == expected and got == sum(map(sum, expected))


@classes
def test_numbers_and_dropout(cls):
    x = make(cls)
    x[:, :1].zero_(), x[:2].fill_(7), F.dropout(x[2:], 1.0, inplace=True)
    assert numbers_of(x) == [[7, 7, 7], [7], [0, 0]]


# ---- autograd's record of a write ------------------------------------------------------------------------------


@pytest.mark.parametrize("of_weight", [False, True], ids=["of the values", "of a weight"])
@pytest.mark.parametrize("name", WRITTEN_CUTS)
def test_a_recorded_write_to_shared_values_is_refused(name, of_weight):
    """The gradient of the other tensor would not know of it."""
    cut, _ = WRITTEN_CUTS[name]
    x = make(JaggedTensor).requires_grad_(not of_weight)
    w, y = torch.ones(1, requires_grad=of_weight), x * 1
    for write in (lambda t: t.mul_(w * 2), lambda t: t.copy_(t * w), lambda t: t.mul_(w).add_(1)):
        with pytest.raises(NotImplementedError, match=r"shares its values"):
            write(cut(y))
    assert numbers_of(y.detach()) == numbers_of(x.detach())
    with torch.no_grad():
        cut(y).neg_()
    assert numbers_of(y.detach()) == WRITTEN_CUTS[name][1]


@classes
def test_rows_are_not_written_to_where_it_would_be_lost(cls):
    y = make(cls).requires_grad_() * 1
    stored = cls.__spec__.size_from
    for part in (lambda: y[1], lambda: y.unbind()[1], lambda: y.to_tensors()[1], lambda: y.unwrap(stored)):
        with pytest.raises(RuntimeError, match="is being modified inplace"):
            part().mul_(2)
    assert numbers_of(y.detach()) == numbers_of(make(cls))
    make(cls)[1].mul_(2)


# A write to a value or to a slice of it, and the function that makes the slice. The squares of both are saved before
# the write.
LATER = {
    "mul_": (lambda y, part: y.mul_(2), lambda y: y),
    "copy_": (lambda y, part: y.copy_(y.detach() * 2), lambda y: y),
    "x[index] = value": (lambda y, part: y.__setitem__((slice(None), 0), 5.0), lambda y: y),
    "index_put_": (
        lambda y, part: y.index_put_((torch.tensor([0]), torch.tensor([0])), torch.tensor(5.0)),
        lambda y: y,
    ),
    "dropout": (lambda y, part: F.dropout(y, 0.5, inplace=True), lambda y: y),
    **{
        f"{name}, all": (torch.no_grad()(lambda y, part: y.mul_(2)), f)
        for name, (f, _) in WRITTEN_CUTS.items()
    },
    **{name: (torch.no_grad()(lambda y, part: part.mul_(2)), f) for name, (f, _) in WRITTEN_CUTS.items()},
}


@classes
@pytest.mark.parametrize("name", LATER)
def test_a_later_write_to_what_was_saved_is_noticed(name, cls):
    write, cut = LATER[name]
    y = make(cls).requires_grad_() * 1
    part, stored = cut(y), y.unwrap(cls.__spec__.size_from)
    totals = (y * y).sum() + (part * part).sum(), stored.square().sum()
    write(y, part)
    for total in totals:
        with pytest.raises(RuntimeError, match="modified"):
            total.backward()


def dropped(x):
    y = x * 2
    assert F.dropout(y, 0.5, False, inplace=True) is y
    F.dropout(y, 1.0, inplace=True)
    return (y + x).sum()


def negated(x, cut):
    y = x * 1
    cut(y).neg_()
    return y.sum()


# Functions with writes, the classes that may have them, and the gradients of a leaf.
WRITTEN = {
    "dropout": (dropped, (JaggedTensor, PaddedTensor), [[1, 1, 1], [1], [1, 1]]),
    **{
        name: (
            lambda x, cut=cut: negated(x, cut),
            (PaddedTensor,),
            [[1 if n > 0 else -1 for n in row] for row in signs],
        )
        for name, (cut, signs) in WRITTEN_CUTS.items()
    },
}


@pytest.mark.sweep(8)
@two_ways
@pytest.mark.parametrize(("name", "cls"), [(name, cls) for name, (_, of, _) in WRITTEN.items() for cls in of])
def test_what_is_written_to_has_its_gradient(name, cls, way):
    f, _, expected = WRITTEN[name]
    x = make(cls).requires_grad_()
    way(f)(x).backward()
    assert numbers_of(x.grad) == expected


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


TWINS = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda t: pickle.loads(pickle.dumps(t))}


def beside_a_copy_that_is_written_to():
    y = make(JaggedTensor)
    copy.deepcopy(y[1:]).neg_()
    return numbers_of(y)


test_what_shares_values_is_copied_without_the_rest = giving(
    {
        **{
            f"{name} of {part}": (
                lambda twin=twin, of=of: numbers_of(twin(of(make(JaggedTensor)))),
                numbers_of(of(make(JaggedTensor))),
            )
            for name, twin in TWINS.items()
            for part, of in {"all": lambda y: y, "a slice": lambda y: y[1:]}.items()
        },
        "a write to a copy": (beside_a_copy_that_is_written_to, numbers_of(make(JaggedTensor))),
    }
)
