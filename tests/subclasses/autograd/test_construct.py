"""Gradients between a wrapper and its inner tensors, in eager mode and under torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import DispatchError, TensorSubclass, inner, static
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agree, agreeing, numbers
from tests.subclasses.subjects import (
    Int8Weight,
    Nested,
    Optional,
    Pair,
    Rows,
    Scaled,
    Tagged,
    assert_same,
    declare,
    make_int8,
    make_pair,
)
from tests.tables import giving, raising

BACKENDS = [None, "eager", "aot_eager"]
backends = pytest.mark.parametrize("backend", BACKENDS)
two_ways = pytest.mark.parametrize("door", ["eager", "desugar"])


def run_with(backend, fn):
    return fn if backend is None else torch.compile(fn, backend=backend, fullgraph=True)


def leaves(*sizes, dtype=torch.float32):
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in sizes]


# ---- construction ------------------------------------------------------------------------------------------

QDATA = torch.randint(-9, 9, (4, 3), dtype=torch.int8)


def optional_and_metadata_and_an_outer_of_its_own(a, b):
    x = Optional(a, b) * 2
    y = Tagged(x.unwrap("extra"), tag="t", length=3).sin()
    return Rows(y.unwrap("held") + Optional(a).unwrap("base"), count=5).unwrap("row")


def nested(a, b, c):
    x = Nested(Pair(a, b), c) * 2
    return x.unwrap("pair").unwrap("b") * x.unwrap("rest") + x.unwrap("pair").unwrap("a")


def mutated_before_and_after(x, data, scale):
    """The trap of PyTorch issue 127996."""
    data = data * 1
    data.mul_(2)
    w = Weight(data, scale)
    y = F.linear(x, w)
    y.add_(1)
    z = F.linear(y[:, :1].expand(5, 4), w)
    z.mul_(3)
    return z


def plainly_mutated(x, data, scale):
    y = F.linear(x, 2 * data * scale) + 1
    return F.linear(y[:, :1].expand(5, 4), 2 * data * scale) * 3


def written_to_what_the_wrapper_was_made_of(data):
    """The inner tensors alias the tensors given to the constructor and share their version counter."""
    data = data * 1
    out = Pair(data, data * 2).unwrap("b").sin()
    data.add_(1)
    return out + data


Summed = declare(rules={torch.ops.aten.add.Tensor: lambda func, x, y: Summed(func(x.held, y.held))})
# A function that makes a value of tensors, the same without the class, and the sizes of the tensors.
MADE = {
    "each inner tensor": (
        lambda a, b: torch.mul(*(Pair(a, b * 2).sin() * 3).unwrap()),
        lambda a, b: (a.sin() * 3) * ((b * 2).sin() * 3),
        (3, 3),
    ),
    "through materialize": (
        lambda data, factor: Scaled(data, factor) * 3 + 1,
        lambda data, factor: data * factor * 3 + 1,
        (3, ()),
    ),
    "beside integers": (
        lambda scale, zero: Int8Weight(QDATA, scale, zero) + 1,
        lambda scale, zero: (QDATA - zero) * scale + 1,
        ((4, 1), (4, 1)),
    ),
    "under map, given to each": (
        lambda a, b: (Pair(a, b) * 2).unwrap("a") + Pair(a, b).unwrap("b"),
        lambda a, b: a * 2 + b,
        (3, 3),
    ),
    "a sum by a rule": (
        lambda a: sum(Summed(a).unwrap("held") * k for k in (2, 1)),
        lambda a: a * 3,
        (3,),
    ),
    "optional": (
        optional_and_metadata_and_an_outer_of_its_own,
        lambda a, b: (b * 2).sin() + a,
        (3, 3),
    ),
    "nested": (nested, lambda a, b, c: b * 2 * c * 2 + a * 2, (3, 3, 3)),
    "a rule without an autograd function": (
        lambda x, data, scale, bias: F.linear(x.sin(), Weight(data, scale), bias).cos(),
        lambda x, data, scale, bias: F.linear(x.sin(), data * scale, bias).cos(),
        ((5, 4), (3, 4), (3, 1), 3),
    ),
    "mutation": (mutated_before_and_after, plainly_mutated, ((5, 4), (3, 4), (3, 1))),
    "a write": (written_to_what_the_wrapper_was_made_of, lambda d: (d * 2).sin() + d + 1, (3,)),
}


test_construction_is_differentiable_in_each_inner_tensor = agreeing(MADE, DOORS)


def test_construction_from_leaves_that_do_not_require_grad_records_nothing():
    x = Pair(torch.ones(2), torch.ones(2))
    assert not x.requires_grad and x.is_leaf
    with torch.no_grad():
        assert not Pair(*leaves(2, 2)).requires_grad
    y = Pair(torch.ones(2), leaves(2)[0])
    assert y.requires_grad and not y.a.requires_grad and not y.b.requires_grad


def test_what_is_stored_aliases_what_was_given():
    (a, b), c = leaves(2, 2), torch.ones(2)
    assert Pair(a, b).a.data_ptr() == a.data_ptr() and Pair(c, b).a is c


class Grown(TensorSubclass, fallback="map"):
    rows: Tensor = inner()

    def append(self, row, at):
        self.rows[at] = row
        return Grown(self.rows)


@pytest.mark.parametrize("door", [*DOORS, "graphs"])
def test_an_append_in_place_that_would_lose_a_gradient_is_refused(door):
    def append_twice(rows, first, second):
        return Grown(rows).append(first, 0).append(second, 1).unwrap("rows").square().sum()

    fn = torch.compile(append_twice, backend="eager") if door == "graphs" else DOORS[door](append_twice)
    rows, (first, second) = torch.zeros(3), leaves((), ())
    with pytest.raises(RuntimeError, match="created in no_grad mode and is being modified inplace"):
        fn(rows, first, second)
    assert rows.tolist() == [first.item() if door == "eager" else 0.0, 0.0, 0.0]
    with torch.no_grad():
        assert torch.equal(fn(torch.zeros(3), first, second), first.square() + second.square())
    total = Grown(torch.zeros(3)).append(first, 0).unwrap("rows").square().sum()
    torch.testing.assert_close(torch.autograd.grad(total, first)[0], 2 * first)


# The result of `wrap_cotangent` for a plain cotangent, and the error.
WRAPPED = {
    "plain": (lambda c: c, "expected a Bad with the derivatives by each inner tensor, got a Tensor"),
    "none": (lambda c: None, "expected a Bad .*got a NoneType"),
    "another class": (lambda c: Halves(c), "expected a Bad .*got a Halves"),
    "a type": (type, "expected a Bad"),
    "another size": (
        lambda c: Bad(c[:1]),
        r"expected a derivative of size \(2,\) by held, got one of size \(1,\)",
    ),
}
Bad = declare(
    name="Bad",
    keywords={"fallback": "map"},
    how=static(default="plain"),
    held=inner(),
    wrap_cotangent=lambda self, cotangent: WRAPPED[self.how][0](cotangent),
)
Negated = declare(wrap_cotangent=lambda self, cotangent: Negated(-cotangent))


test_what_wrap_cotangent_returns_is_checked = raising(
    {
        "nothing defined": (
            lambda: declare(name="Mute")(torch.ones(3, requires_grad=True)).backward(torch.ones(3)),
            "a plain tensor arrived as the cotangent of a Mute. Define `wrap_co",
        ),
        **{
            how: (lambda h=how: Bad(torch.ones(2, requires_grad=True), how=h).backward(torch.ones(2)), words)
            for how, (_, words) in WRAPPED.items()
        },
    }
)


def by_plain_cotangent(cls, number):
    inners = leaves(*[3] * number)
    cls(*inners).backward(torch.full((3,), 5.0))
    return [t.grad.tolist() for t in inners]


test_plain_cotangents = giving(
    {
        "given to each under map": (lambda: by_plain_cotangent(Pair, 2), [[5, 5, 5]] * 2),
        "as the class says": (lambda: by_plain_cotangent(Negated, 1), [[-5, -5, -5]]),
    }
)


# ---- access ------------------------------------------------------------------------------------------------


def test_unwrap_of_a_leaf_gives_its_gradient_as_a_wrapper():
    x = make_pair().requires_grad_()
    (x.unwrap("a") * 3).sum().backward()
    assert_same(x.grad, x.cotangent(a=torch.full((3, 4), 3.0)))


@pytest.fixture
def leaf():
    return make_pair().requires_grad_()


test_access = giving(
    {
        "attributes are raw": (lambda x: [x.a.requires_grad, (x * 2).a.requires_grad], [False, False]),
        "unwrap is differentiable": (lambda x: x.unwrap("a").grad_fn is not None, True),
        "unwrap without gradients": (torch.no_grad()(lambda x: x.unwrap("a") is x.a), True),
        "unwrap of no leaf": (lambda x: x.detach().unwrap()[0].requires_grad, False),
        "unwrap of what is absent": (
            lambda x: Optional(torch.ones(2)).requires_grad_().unwrap("extra"),
            None,
        ),
        "autocast": (
            torch.autocast("cpu", torch.bfloat16)(lambda x: (x @ torch.ones(4, 3)).dtype),
            torch.bfloat16,
        ),
    },
    fixture="leaf",
)


@pytest.mark.sweep(3)
@backends
def test_a_cotangent_holds_the_fixed_inner_tensors(backend):
    """And the gradients of two accesses add up."""
    x = make_int8(zero=True).requires_grad_()
    (run_with(backend, lambda x: x.unwrap("scale") * 2)(x).sum() + x.unwrap("scale").sum() * 3).backward()
    assert type(x.grad) is Int8Weight.Cotangent and x.grad.qdata.equal(x.qdata)
    assert x.grad.scale.tolist() == [[5]] * 4 and x.grad.zero.tolist() == [[0]] * 4


@pytest.mark.sweep(2)
@two_ways
@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_wrapper_and_a_plain_cotangent_meet(door, leaf, swapped):
    def loss(x):
        terms = [(x.unwrap("data_") ** 2).sum(), (x * x).sum(), x.unwrap("factor").exp()]
        return sum(reversed(terms) if swapped else terms)

    data, factor = leaves(3, ())
    Trained = declare(Scaled, keywords={"trainable": True})
    x = Trained(data.detach(), factor.detach()).requires_grad_() if leaf else Scaled(data, factor)
    DOORS[door](loss)(x).backward()
    got = (x.grad.data_, x.grad.factor) if leaf else (data.grad, factor.grad)
    d, f = (t.detach().clone().requires_grad_() for t in (data, factor))
    ((d**2).sum() + ((d * f) ** 2).sum() + f.exp()).backward()
    torch.testing.assert_close(got, (d.grad, f.grad))


def in_two_ways(x):
    return (x.unwrap("data_") ** 2).sum() + (x * x).sum()


# A leaf of a class that is not trainable has a plain gradient, and no sum of both.
test_sums_that_are_refused = raising(
    {
        "of a value that was written to since": (
            lambda: (x := Scaled(*leaves(3, ())), loss := in_two_ways(x), x.data_.mul_(2), loss.backward()),
            RuntimeError,
            "modified by an inplace operation",
        ),
        "to be differentiated again": (
            lambda: torch.autograd.grad(
                in_two_ways(Scaled(*(parts := leaves(3, ())))), parts[0], create_graph=True
            ),
            r"with create_graph=True cannot add: let both read inner tensors",
        ),
        "of a leaf that is not trained": (
            lambda: in_two_ways(Scaled(torch.ones(3), torch.ones(())).requires_grad_()).backward(),
            "let both read inner tensors",
        ),
    }
)


def test_arithmetic_of_cotangents():
    x = make_int8().requires_grad_()
    (x.unwrap("scale") * 2).sum().backward()
    g = x.grad
    for value, expected in (
        (g + g, 4),
        (g * 3, 6),
        (g / 2, 1),
        (-g, -2),
        (g - g * 0.5, 1),
        (torch.zeros_like(g), 0),
    ):
        assert type(value) is Int8Weight.Cotangent and value.qdata.equal(x.qdata)
        assert value.scale.tolist() == [[expected]] * 4
    with torch.no_grad():
        g.mul_(2).add_(g)
    assert g.scale.tolist() == [[8]] * 4
    for call, words in (
        (g.sin, r"on a cotangent of Int8Weight.*does not represent a plain tensor"),
        (lambda: g + torch.ones(4, 3), r"added to one another and scaled by numbers only"),
    ):
        with pytest.raises(DispatchError, match=words):
            call()


# ---- rules for Python-level functions ----------------------------------------------------------------------


class Weight(TensorSubclass, size_from="data_", fallback="error", trainable=True):
    """A rule with no autograd function anywhere."""

    data_: Tensor = inner()
    scale: Tensor = inner()


@Weight.implements(F.linear)
def _(func, x, w, bias=None):
    return func(x, w.unwrap("data_") * w.unwrap("scale"), bias)


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_rule_has_the_gradient_of_a_parameter(backend):
    data, scale = torch.randn(3, 4), torch.rand(3, 1)
    w = torch.nn.Parameter(Weight(data, scale))
    x, x2, d2, s2 = (t.clone().requires_grad_() for t in (torch.randn(5, 4),) * 2 + (data, scale))
    with torch.no_grad():
        x2.copy_(x)
    run_with(backend, lambda x, w: F.linear(x, w).sin())(x, w).sum().backward()
    F.linear(x2, d2 * s2).sin().sum().backward()
    torch.testing.assert_close((x.grad, w.grad.data_, w.grad.scale), (x2.grad, d2.grad, s2.grad))


# ---- higher derivatives ------------------------------------------------------------------------------------


Product = declare(
    keywords={"fallback": "materialize"},
    one=inner(),
    other=inner(),
    materialize=lambda self: self.one * self.other,
)
DEPENDENT = {
    "the same tensor": lambda x: (x, x),
    "one of the other": lambda x: (x, x.exp()),
    "by way of a third": lambda x: ((y := x.sin()) * 2, y.sum(0, keepdim=True)),
}


# With a graph of the gradient, the derivative of one inner tensor by another was once counted twice.
test_second_derivatives = agreeing(
    {
        **{
            name: (
                lambda x, parts=parts: Product(*parts(x)) * 1,
                lambda x, parts=parts: torch.mul(*parts(x)),
                [(1, 2)],
            )
            for name, parts in DEPENDENT.items()
        },
        "a product": (lambda d, f: Scaled(d, f).sin(), lambda d, f: (d * f).sin(), [3, ()]),
        "of one inner tensor": (
            lambda a, b: (Pair(a, b) * 2).sin().unwrap("a"),
            lambda a, b: (a * 2).sin(),
            [3, 3],
        ),
        "of two values": (
            lambda a, b: Scaled(a, b.sum()) * Scaled(a, b.sum()),
            lambda a, b: (a * b.sum()) ** 2,
            [3, 3],
        ),
        "a rule for a function": (
            lambda a, b: F.linear(a.view(1, 3), Weight(b.view(1, 3), a[:1].view(1, 1))),
            lambda a, b: F.linear(a.view(1, 3), (b * a[0]).view(1, 3)),
            [3, 3],
        ),
        "beside an inner tensor": (
            lambda a, b: Scaled(a, b.sum()).unwrap("data_") * (Scaled(a.exp(), b.sum()) + 1),
            lambda a, b: a * (a.exp() * b.sum() + 1),
            [3, 3],
        ),
    },
    twice=["eager", "desugar"],
)


# ---- hooks ---------------------------------------------------------------------------


def test_hooks_see_wrappers():
    x, seen = make_pair().requires_grad_(), []
    y = x * 2
    y.register_hook(lambda g: seen.append(type(g)) or g * 3)
    y.sum().backward()
    assert seen == [Pair] and x.grad.a.eq(6).all()


# ---- materialize, called as an author may ----------------------------------------------------------------------

Halves = declare(name="Halves", keywords={"fallback": "materialize"}, materialize=lambda self: self.held / 2)


@pytest.mark.parametrize("door", ["stock", "inside"])
@pytest.mark.parametrize(
    "call", [Halves.materialize, lambda x: Halves.materialize(x), lambda x: x.materialize()]
)
def test_materialize_may_be_what_is_compiled(call, door):
    run = DOORS[door](call)
    agree(lambda held: run(Halves(held).clone()), lambda held: held * 0.5, numbers(2))
