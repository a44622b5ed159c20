"""Gradients that a caller, a hook or an autograd function makes: cotangents; values in their place are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import DispatchError, TensorSubclass, inner
from tests.subclasses.subjects import LowRank

aten = torch.ops.aten

DOORS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="aot_eager"),
    "backend": lambda fn: torch.compile(fn, backend="desugar", options={"backend": "eager"}),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager", strict=True),
}


def pair_class(fallback, *, ruled=True, kind="structure"):
    """A class of two numbers, with a rule that mixes them unless it is not to have one."""
    members = {"materialize": lambda self: self.first * self.second} if fallback == "materialize" else {}
    annotations = {"first": Tensor, "second": Tensor}
    Pair = type(TensorSubclass)(
        "Pair",
        (TensorSubclass,),
        {"__annotations__": annotations, "first": inner(), "second": inner(), **members},
        fallback=fallback,
        kind=kind,
    )
    if ruled:

        @Pair.implements(aten.sinh)
        def rule(func, x):
            return Pair(x.first * x.second, x.first.sin())

    return Pair


def given_to(door, Pair, give, op=torch.sinh):
    """The gradients of the inner tensors by ``give``, which gets the result and what it is made of."""
    inners = [torch.tensor([v], requires_grad=True) for v in (2.0, 5.0)]
    return give(DOORS[door](op)(Pair(*inners)), inners, Pair)


def copy_whose_gradient_is(gradient):
    """An autograd function that copies; its backward returns this of what arrives."""

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.detach().clone()

        @staticmethod
        def backward(ctx, g):
            return gradient(g)

    return Copy.apply


def expected(scale=1.0):
    first, second = (torch.tensor([v], requires_grad=True) for v in (2.0, 5.0))
    return torch.autograd.grad(scale * (first * second + first.sin()), (first, second))


def by_grad(y, inners, Pair):
    return torch.autograd.grad(y, inners, y.cotangent(torch.ones(1), torch.ones(1)))


def by_a_list(y, inners, Pair):
    return torch.autograd.grad([y], inners, grad_outputs=[y.cotangent(torch.ones(1), torch.ones(1))])


def by_backward(y, inners, Pair):
    y.backward(y.cotangent(torch.ones(1), torch.ones(1)))
    return [t.grad for t in inners]


def by_backward_of_several(y, inners, Pair):
    torch.autograd.backward((y,), (y.cotangent(torch.ones(1), torch.ones(1)),))
    return [t.grad for t in inners]


def by_a_hook(y, inners, Pair):
    handle = y.register_hook(lambda g: g.cotangent(g.first.clamp(-1, 1), g.second.clamp(-1, 1)))
    first, second = y.unwrap()
    found = torch.autograd.grad(3 * (first.sum() + second.sum()), inners, retain_graph=True)
    handle.remove()
    thrice = torch.autograd.grad(3 * (first.sum() + second.sum()), inners)
    assert [(t / f).item() for t, f in zip(thrice, found, strict=True)] == pytest.approx([3, 3])
    return found


def by_a_function(y, inners, Pair):
    clamped = copy_whose_gradient_is(lambda g: g.cotangent(g.first.clamp(-1, 1), g.second.clamp(-1, 1)))
    first, second = clamped(y).unwrap()
    return torch.autograd.grad(3 * (first.sum() + second.sum()), inners)


GIVES = [by_grad, by_a_list, by_backward, by_backward_of_several, by_a_hook, by_a_function]


@pytest.mark.sweep(24)
@pytest.mark.parametrize("fallback", ["map", "views", "materialize"])
@pytest.mark.parametrize("give", GIVES)
@pytest.mark.parametrize("door", DOORS)
def test_it_takes_the_derivative_of_the_rule(door, give, fallback):
    torch.testing.assert_close(tuple(given_to(door, pair_class(fallback), give)), expected())


@pytest.mark.parametrize("door", DOORS)
def test_a_hook_reads_a_cotangent(door):
    """What it scales are derivatives, and not the number that a value represents."""
    seen = []

    Pair = pair_class("materialize")

    def give(y, inners, Pair):
        y.register_hook(lambda g: (seen.append(type(g)), g * 2)[1])
        return by_grad(y, inners, Pair)

    torch.testing.assert_close(given_to(door, Pair, give), expected(2.0))
    assert seen == [Pair.Cotangent]


VALUES = {
    "grad": lambda y, inners, v: torch.autograd.grad(y, inners, v),
    "a list": lambda y, inners, v: torch.autograd.grad([y], inners, grad_outputs=[v]),
    "backward": lambda y, inners, v: y.backward(v),
    "backward of several": lambda y, inners, v: torch.autograd.backward((y,), (v,)),
    "a hook": lambda y, inners, v: (y.register_hook(lambda g: v), by_grad(y, inners, type(y))),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("fallback", ["map", "views", "materialize"])
@pytest.mark.parametrize("give", VALUES)
@pytest.mark.parametrize("door", DOORS)
def test_a_value_in_place_of_a_cotangent_is_refused(door, give, fallback):
    def of_value(y, inners, Pair):
        return VALUES[give](y, inners, Pair(torch.ones(1), torch.ones(1)))

    with pytest.raises(
        DispatchError, match=r"a Pair was given.*Write x\.cotangent\(first=\.\.\., second=\.\.\.\)"
    ):
        given_to(door, pair_class(fallback), of_value)


def test_a_value_that_an_autograd_function_returns_is_refused_by_a_representation():
    """Of a structure its inner tensors are taken for the derivatives."""
    valued = copy_whose_gradient_is(lambda g: g._value_cls(torch.ones(1), torch.ones(1)))
    for fallback, kind in (("views", "structure"), ("materialize", "representation")):
        inners = [torch.tensor([v], requires_grad=True) for v in (2.0, 5.0)]
        x = pair_class(fallback, kind=kind)(*inners)
        first, second = valued(x.sinh() if fallback == "views" else x).unwrap()
        if fallback == "views":
            torch.testing.assert_close(torch.autograd.grad((first + second).sum(), inners), expected())
        else:
            with pytest.raises(DispatchError, match=r"Write x\.cotangent"):
                (first + second).sum().backward()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: x.cotangent(torch.ones(1), second=torch.ones(2)),
            ValueError,
            r"second.*size \(1,\), got.*\(2,\)",
        ),
        (
            lambda x: x.cotangent(third=torch.ones(1)),
            TypeError,
            r"third is no inner tensor; these are first, second",
        ),
        (lambda x: x.cotangent(torch.ones(1), first=torch.ones(1)), TypeError, r"first is given twice"),
        (
            lambda x: x.cotangent(*[torch.ones(1)] * 3),
            TypeError,
            r"at most 2 derivatives \(first, second\), got 3",
        ),
        (
            lambda x: x.cotangent(2.0),
            TypeError,
            r"Pair\.cotangent: first: expected a tensor or None, got a float",
        ),
    ],
)
def test_what_a_cotangent_is_made_of_is_checked(call, error, message):
    with pytest.raises(error, match=message):
        call(pair_class("map")(torch.ones(1), torch.ones(1)))


def test_a_derivative_that_is_not_given_is_zero():
    Pair = pair_class("map")
    for x in (Pair(torch.ones(2), torch.ones(3)), Pair(torch.ones(2), torch.ones(3)).cotangent()):
        g = x.cotangent(second=torch.full((3,), 5.0))
        assert type(g) is Pair.Cotangent and g.first.tolist() == [0, 0] and g.second.tolist() == [5, 5, 5]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", ["eager", "stock", "desugar.compile"])
@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize("fallback", ["views", "materialize"])
def test_two_of_them_are_added_by_inner_tensors(fallback, ruled, door):
    def give(results, inners, Pair):
        values = zip(results, (1.0, 10.0), strict=True)
        gradients = [y.cotangent(torch.tensor([v]), torch.tensor([v + 1])) for y, v in values]
        return torch.autograd.grad(results, inners, gradients)

    found = given_to(door, pair_class(fallback, ruled=ruled), give, op=lambda x: [x.clone(), x.clone()])
    assert [g.item() for g in found] == [11, 13]


def test_what_functions_return_is_added_by_inner_tensors():
    """Also where the class says what a sum of values is."""
    Pair = pair_class("views", ruled=False)
    Pair.implements(subclasses.arithmetic)(lambda func, x, y: Pair(x.first * y.first, x.second * y.second))

    ten = copy_whose_gradient_is(lambda g: Pair(torch.tensor([10.0]), torch.tensor([20.0])))
    inners = [torch.tensor([v], requires_grad=True) for v in (2.0, 5.0)]
    x = Pair(*inners)
    total = sum(t for y in (ten(x), ten(x), ten(x)) for t in y.unwrap())
    assert [g.item() for g in torch.autograd.grad(total, inners)] == [30, 60]


@pytest.mark.parametrize("ruled", [False, True])
def test_the_gradient_of_a_leaf_grows_by_inner_tensors(ruled):
    x = pair_class("materialize", ruled=ruled)(torch.ones(1), torch.ones(1)).requires_grad_()
    for _ in range(3):
        x.clone().backward(x.cotangent(torch.tensor([2.0]), torch.tensor([3.0])))
    assert (x.grad.first.item(), x.grad.second.item()) == (6, 9)


def test_a_gradient_stays_a_function_of_what_it_is_made_of():
    """For a derivative of the derivative by the gradient, which forward-mode tangents are made of."""
    Pair = pair_class("materialize")
    inners = [torch.tensor([v], requires_grad=True) for v in (2.0, 5.0)]
    weights = [torch.tensor([v], requires_grad=True) for v in (1.0, 1.0)]
    y = Pair(*inners).sinh()
    found = torch.autograd.grad(y, inners, y.cotangent(*weights), create_graph=True)
    (by_first, by_second) = torch.autograd.grad(found[0], weights)
    assert by_first.item() == 5 and by_second.item() == pytest.approx(torch.tensor(2.0).cos().item())


def test_a_sum_of_values_in_a_backward_is_one_of_values():
    """A forward that runs again, and the code of an autograd function, compute with values."""
    Pair = pair_class("materialize")

    def fn(first, second):
        x = Pair(first, second)
        return (x + x.clone()).sin().sum()

    inners = [torch.tensor([v], requires_grad=True) for v in (2.0, 5.0)]
    want = torch.autograd.grad(fn(*inners), inners)
    got = torch.autograd.grad(torch.utils.checkpoint.checkpoint(fn, *inners, use_reentrant=False), inners)
    torch.testing.assert_close(got, want)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS)
def test_a_backward_inside_of_a_compiled_function_meets_a_parameter(door):
    layer = torch.nn.Linear(3, 4, bias=False)
    layer.weight = torch.nn.Parameter(LowRank(torch.ones(4, 2), torch.ones(2, 3)))
    optimizer, x = torch.optim.SGD(layer.parameters(), lr=0.1), torch.ones(2, 3)

    def step(x):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()
        return layer.weight.left.detach().clone()

    # strict=True would refuse what Dynamo leaves to eager mode here.
    compiled = desugar.compile(step, backend="eager") if door == "desugar.compile" else DOORS[door](step)
    assert [compiled(x)[0, 0].item() for _ in range(2)] == pytest.approx([0.4, 0.28])


@pytest.mark.parametrize("door", DOORS)
def test_a_hook_is_called_by_a_backward_inside_of_a_compiled_function(door):
    Pair = pair_class("views", ruled=False)

    def step(first):
        x = Pair(first, first.detach() * 2)
        x.register_hook(lambda g: g.cotangent(g.first * 3, g.second))
        x.unwrap("first").sum().backward()
        return first.grad

    first = torch.ones(2, requires_grad=True)
    assert (DOORS[door] if door != "desugar.compile" else lambda f: desugar.compile(f, backend="eager"))(
        step
    )(first).tolist() == [3, 3]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize("fallback", ["materialize", "map"])
def test_a_gradient_that_was_assigned_is_added_to(fallback, ruled, door):
    Pair = pair_class(fallback, ruled=ruled)
    x = Pair(torch.tensor([2.0]), torch.tensor([3.0])).requires_grad_()
    x.grad = x.cotangent(torch.tensor([10.0]), torch.tensor([20.0]))
    y = DOORS[door](lambda x: x.unwrap("first") * x.unwrap("second"))(x)
    y.sum().backward()
    assert [x.grad.first.item(), x.grad.second.item()] == [13, 22]


class Line(TensorSubclass, fallback="views"):
    """Coefficients in a hidden dim: it represents no plain tensor, so that no plain tensor is its gradient."""

    coefficients: Tensor = inner()

    @staticmethod
    def outer(coefficients):
        return subclasses.Outer(coefficients.shape[:-1])


@Line.implements(aten.mul.Tensor)
def multiply(func, x, y):
    x, y = (t.coefficients if isinstance(t, Line) else t.unsqueeze(-1) for t in (x, y))
    return Line(x * y)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "give",
    [
        lambda y, t, g: torch.autograd.grad(y, t, g),
        lambda y, t, g: torch.autograd.grad(outputs=[y], inputs=[t], grad_outputs=(g,)),
        lambda y, t, g: torch.autograd.backward([y], grad_tensors=[g]),
        lambda y, t, g: y.backward(g),
    ],
)
def test_a_plain_gradient_of_a_value_that_represents_none_is_refused(give, door):
    """The formula of a product would multiply it by the other value, and what is no gradient would arrive."""
    t = torch.ones(2, 3, requires_grad=True)
    y = DOORS[door](lambda x: x * x)(Line(t))
    with pytest.raises(DispatchError, match=r"a plain tensor arrived as the cotangent of a Line"):
        give(y, t, torch.ones(2))
    assert t.grad is None


def turning_class(*ops):
    """A mapped class with rules for ops that formulas of derivatives apply to cotangents, which mean something else."""

    class Turn(TensorSubclass, fallback="map"):
        cosine: Tensor = inner()
        sine: Tensor = inner()

    def rule(func, x, *others, **options):
        if func in (aten.add.Tensor, aten.sub.Tensor) and all(isinstance(y, Turn) for y in others):
            (y,) = others
            return Turn(x.cosine * y.cosine - x.sine * y.sine, x.cosine * y.sine + x.sine * y.cosine)
        if func is aten.neg.default:
            return Turn(x.cosine.clone(), -x.sine)
        if func in (aten.sum.default, aten.sum.dim_IntList):
            return Turn(x.cosine.prod(), x.sine.prod())
        return NotImplemented

    for op in ops:
        Turn.implements(op)(rule)
    return Turn


TURNS = {
    "two fields": (lambda x: 3 * x.unwrap("cosine") + 5 * x.unwrap("sine"), [3, 5]),
    "used twice": (lambda x: 2 * (x * 1).unwrap("cosine") + (x * 3).unwrap("sine"), [2, 3]),
    "expanded": (
        lambda x: (x.expand(2, 1).unwrap("cosine") * 2).sum() + 3 * x.expand(2, 1).unwrap("sine").sum(),
        [4, 6],
    ),
    "a formula that multiplies": (
        lambda x: x.sinh().unwrap("cosine") + 2 * x.exp().unwrap("sine"),
        [math.cosh(1), 2 * math.exp(2)],
    ),
    "one minus": (lambda x: (1 - x).unwrap("cosine") + 2 * (1 - x).unwrap("sine"), [-1, -2]),
}


@pytest.mark.sweep(21)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("how", TURNS)
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.neg.default, aten.sum], ids=str)
def test_cotangents_of_a_mapped_class_are_no_values_either(op, how, door):
    Turn, (fn, wanted) = turning_class(op), TURNS[how]
    a, b = torch.tensor([1.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)
    found = torch.autograd.grad(DOORS[door](lambda a, b: fn(Turn(a, b)))(a, b).sum(), (a, b))
    assert [g.item() for g in found] == pytest.approx(wanted)
    parameter = torch.nn.Parameter(Turn(torch.tensor([1.0]), torch.tensor([2.0])))
    for times in (1, 2):
        DOORS[door](fn)(parameter).sum().backward()
        gradient = parameter.grad
        assert [gradient.cosine.item(), gradient.sine.item()] == pytest.approx([times * g for g in wanted])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", [door for door in DOORS if door != "stock"])
@pytest.mark.parametrize("returned", [lambda x: x, lambda x: x.clone(), lambda x: x.detach()])
def test_a_value_that_is_used_as_a_whole_may_be_a_result(returned, door):
    Pair = pair_class("materialize", ruled=False)

    def fn(first, second):
        x = Pair(first, second)
        return (x * 3).sum(), returned(x)

    sides = []
    for f in (DOORS[door](fn), fn):
        first, second = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
        plain, x = f(first, second)
        sides.append(torch.autograd.grad(plain + (x * 2).sum() + 0 * first.sum(), (first, second)))
    assert sides[0] == sides[1]
