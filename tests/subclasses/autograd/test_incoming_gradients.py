"""Gradients that a caller, a hook or an autograd function makes: cotangents; values in their place are refused."""

import math
from functools import partial

import pytest
import torch

import subclasses
from subclasses import DispatchError, inner
from tests import doors
from tests.subclasses.autograd.judge import agree, agreeing, passing
from tests.subclasses.subjects import LowRank, declare
from tests.tables import raising

aten = torch.ops.aten

DOORS = {**doors.DOORS, "desugar": partial(doors.by_desugar, strict=True)}
every_door = pytest.mark.parametrize("door", DOORS)
every_fallback = pytest.mark.parametrize("fallback", ["map", "views", "materialize"])


def pair_class(fallback, *, ruled=True, kind="structure"):
    """A class of two numbers, with a rule that mixes them unless it is not to have one."""
    members = {"materialize": lambda self: self.first * self.second} if fallback == "materialize" else {}
    rule = lambda func, x: Pair(x.first * x.second, x.first.sin())  # noqa: E731
    Pair = declare(
        name="Pair",
        keywords={"fallback": fallback, "kind": kind},
        rules={aten.sinh: rule} if ruled else {},
        first=inner(),
        second=inner(),
        **members,
    )
    return Pair


def leaves():
    return [torch.tensor([v], requires_grad=True) for v in (2.0, 5.0)]


def given_to(door, Pair, give, op=torch.sinh):
    """The gradients of the inner tensors by ``give``, which gets the result and its inner tensors."""
    inners = leaves()
    return give(DOORS[door](op)(Pair(*inners)), inners, Pair)


def expected(scale=1.0):
    first, second = leaves()
    return torch.autograd.grad(scale * (first * second + first.sin()), (first, second))


def of(y):
    return y.cotangent(torch.ones(1), torch.ones(1))


def clamped(g):
    return g.cotangent(g.first.clamp(-1, 1), g.second.clamp(-1, 1))


def of_leaves(inners, backward):
    backward()
    return [t.grad for t in inners]


def by_a_hook(y, inners, Pair):
    handle = y.register_hook(clamped)
    total = 3 * sum(t.sum() for t in y.unwrap())
    found = torch.autograd.grad(total, inners, retain_graph=True)
    handle.remove()
    thrice = torch.autograd.grad(total, inners)
    assert [(t / f).item() for t, f in zip(thrice, found, strict=True)] == pytest.approx([3, 3])
    return found


def by_grad(y, inners, Pair):
    return torch.autograd.grad(y, inners, of(y))


GIVES = {
    "grad": by_grad,
    "a list": lambda y, inners, Pair: torch.autograd.grad([y], inners, grad_outputs=[of(y)]),
    "backward": lambda y, inners, Pair: of_leaves(inners, lambda: y.backward(of(y))),
    "backward of several": lambda y, inners, Pair: of_leaves(
        inners, lambda: torch.autograd.backward((y,), (of(y),))
    ),
    "a hook": by_a_hook,
    "a function": lambda y, inners, Pair: torch.autograd.grad(
        3 * sum(t.sum() for t in passing(clamped)(y).unwrap()), inners
    ),
}


@pytest.mark.sweep(48)
@every_fallback
@pytest.mark.parametrize("give", GIVES)
@every_door
def test_it_takes_the_derivative_of_the_rule(door, give, fallback):
    torch.testing.assert_close(tuple(given_to(door, pair_class(fallback), GIVES[give])), expected())


@pytest.mark.sweep(2)
@every_door
def test_a_hook_reads_a_cotangent(door):
    """The hook scales derivatives, and not the number that a value represents."""
    seen, Pair = [], pair_class("materialize")
    hook = lambda g: (seen.append(type(g)), g * 2)[1]  # noqa: E731
    found = given_to(door, Pair, lambda y, inners, Pair: (y.register_hook(hook), by_grad(y, inners, Pair))[1])
    torch.testing.assert_close(found, expected(2.0))
    assert seen == [Pair.Cotangent]


VALUES = {
    "grad": lambda y, inners, v: torch.autograd.grad(y, inners, v),
    "a list": lambda y, inners, v: torch.autograd.grad([y], inners, grad_outputs=[v]),
    "backward": lambda y, inners, v: y.backward(v),
    "backward of several": lambda y, inners, v: torch.autograd.backward((y,), (v,)),
    "a hook": lambda y, inners, v: (y.register_hook(lambda g: v), by_grad(y, inners, type(y))),
}


test_a_value_in_place_of_a_cotangent_is_refused = pytest.mark.sweep(10)(
    raising(
        {
            f"{name}, {fallback}, {door}": (
                lambda give=give, fallback=fallback, door=door: given_to(
                    door,
                    pair_class(fallback),
                    lambda y, inners, Pair: give(y, inners, Pair(torch.ones(1), torch.ones(1))),
                ),
                r"a Pair was given.*Write x\.cotangent\(first=\.\.\., second=\.\.\.\)",
            )
            for name, give in VALUES.items()
            for fallback in ("map", "views", "materialize")
            for door in DOORS
        }
    )
)


def test_a_value_that_an_autograd_function_returns_is_refused_by_a_representation():
    """Of a structure its inner tensors are taken for the derivatives."""
    valued = passing(lambda g: g._value_cls(torch.ones(1), torch.ones(1)))
    inners = leaves()
    first, second = valued(pair_class("views")(*inners).sinh()).unwrap()
    torch.testing.assert_close(torch.autograd.grad((first + second).sum(), inners), expected())
    first, second = valued(pair_class("materialize", kind="representation")(*leaves())).unwrap()
    with pytest.raises(DispatchError, match=r"Write x\.cotangent"):
        (first + second).sum().backward()


ONE = torch.ones(1)
WRONG = [
    (lambda x: x.cotangent(ONE, second=torch.ones(2)), ValueError, r"second.*size \(1,\), got.*\(2,\)"),
    (lambda x: x.cotangent(third=ONE), TypeError, r"third is not an inner tensor; these are first, second"),
    (lambda x: x.cotangent(ONE, first=ONE), TypeError, r"first is given twice"),
    (lambda x: x.cotangent(ONE, ONE, ONE), TypeError, r"at most 2 derivatives \(first, second\), got 3"),
    (
        lambda x: x.cotangent(2.0),
        TypeError,
        r"Pair\.cotangent: first: expected a tensor or None, got a float",
    ),
]


test_what_a_cotangent_is_made_of_is_checked = raising(
    [(lambda call=call: call(pair_class("map")(ONE, ONE)), error, message) for call, error, message in WRONG]
)


def test_a_derivative_that_is_not_given_is_zero():
    Pair = pair_class("map")
    for x in (Pair(torch.ones(2), torch.ones(3)), Pair(torch.ones(2), torch.ones(3)).cotangent()):
        g = x.cotangent(second=torch.full((3,), 5.0))
        assert type(g) is Pair.Cotangent and g.first.tolist() == [0, 0] and g.second.tolist() == [5, 5, 5]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", ["eager", "stock", "desugar"])
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
    """The sum of gradients adds inner tensors, even if the class has a rule for sums of values."""
    Pair = pair_class("views", ruled=False)
    Pair.implements(subclasses.arithmetic)(lambda func, x, y: Pair(x.first * y.first, x.second * y.second))

    ten = passing(lambda g: Pair(torch.tensor([10.0]), torch.tensor([20.0])))
    inners = leaves()
    x = Pair(*inners)
    total = sum(t for y in (ten(x), ten(x), ten(x)) for t in y.unwrap())
    assert [g.item() for g in torch.autograd.grad(total, inners)] == [30, 60]


@pytest.mark.parametrize("ruled", [False, True])
def test_the_gradient_of_a_leaf_grows_by_inner_tensors(ruled):
    x = pair_class("materialize", ruled=ruled)(ONE, ONE).requires_grad_()
    for _ in range(3):
        x.clone().backward(x.cotangent(torch.tensor([2.0]), torch.tensor([3.0])))
    assert (x.grad.first.item(), x.grad.second.item()) == (6, 9)


def test_a_gradient_stays_a_function_of_what_it_is_made_of():
    """For a derivative of the derivative by the gradient, which forward-mode tangents are made of."""
    Pair, inners, weights = pair_class("materialize"), leaves(), leaves()
    y = Pair(*inners).sinh()
    found = torch.autograd.grad(y, inners, y.cotangent(*weights), create_graph=True)
    (by_first, by_second) = torch.autograd.grad(found[0], weights)
    assert by_first.item() == 5 and by_second.item() == pytest.approx(torch.tensor(2.0).cos().item())


def sum_of_values(first, second):
    x = pair_class("materialize")(first, second)
    return (x + x.clone()).sin().sum()


# A forward that runs again, and the code of an autograd function, compute with values.
test_a_sum_of_values_in_a_backward_is_one_of_values = agreeing(
    {
        "again": (
            partial(torch.utils.checkpoint.checkpoint, sum_of_values, use_reentrant=False),
            sum_of_values,
            leaves(),
        ),
        "a mapped class": (
            partial(
                torch.utils.checkpoint.checkpoint,
                lambda a, b: (Mapped(a, b).sin() * 2).unwrap("a"),
                use_reentrant=False,
            ),
            lambda a, b: a.sin() * 2,
            leaves(),
        ),
    },
    {"eager": doors.eager},
)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "door", doors.DOORS
)  # strict=True would refuse what Dynamo leaves to eager mode here
def test_a_backward_inside_of_a_compiled_function_meets_a_parameter(door):
    layer = torch.nn.Linear(3, 4, bias=False)
    layer.weight = torch.nn.Parameter(LowRank(torch.ones(4, 2), torch.ones(2, 3)))
    optimizer, x = torch.optim.SGD(layer.parameters(), lr=0.1), torch.ones(2, 3)

    def step(x):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()
        return layer.weight.left.detach().clone()

    compiled = doors.DOORS[door](step)
    assert [compiled(x)[0, 0].item() for _ in range(2)] == pytest.approx([0.4, 0.28])


@pytest.mark.parametrize("door", doors.DOORS)
def test_a_hook_is_called_by_a_backward_inside_of_a_compiled_function(door):
    Pair = pair_class("views", ruled=False)

    def step(first):
        x = Pair(first, first.detach() * 2)
        x.register_hook(lambda g: g.cotangent(g.first * 3, g.second))
        x.unwrap("first").sum().backward()
        return first.grad

    assert doors.DOORS[door](step)(torch.ones(2, requires_grad=True)).tolist() == [3, 3]


@pytest.mark.sweep(12)
@every_door
@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize("fallback", ["materialize", "map"])
def test_a_gradient_that_was_assigned_is_added_to(fallback, ruled, door):
    x = pair_class(fallback, ruled=ruled)(torch.tensor([2.0]), torch.tensor([3.0])).requires_grad_()
    x.grad = x.cotangent(torch.tensor([10.0]), torch.tensor([20.0]))
    DOORS[door](lambda x: x.unwrap("first") * x.unwrap("second"))(x).sum().backward()
    assert [x.grad.first.item(), x.grad.second.item()] == [13, 22]


def product(func, x, y):
    x, y = (t.coefficients if isinstance(t, Line) else t.unsqueeze(-1) for t in (x, y))
    return Line(x * y)


# Coefficients in a hidden dim: it represents no plain tensor, so that no plain tensor is its gradient.
Line = declare(
    name="Line",
    keywords={"fallback": "views"},
    coefficients=inner(),
    outer=staticmethod(lambda coefficients: subclasses.Outer(coefficients.shape[:-1])),
    rules={aten.mul.Tensor: product},
)
# Ways to give a gradient of a value, and the tensor by which is differentiated.
PLAIN = {
    "grad": lambda y, t, g: torch.autograd.grad(y, t, g),
    "a list": lambda y, t, g: torch.autograd.grad(outputs=[y], inputs=[t], grad_outputs=(g,)),
    "backward of several": lambda y, t, g: torch.autograd.backward([y], grad_tensors=[g]),
    "backward": lambda y, t, g: y.backward(g),
}


@pytest.mark.sweep(5)
@every_door
@pytest.mark.parametrize("give", PLAIN)
def test_a_plain_gradient_of_a_value_that_represents_none_is_refused(give, door):
    """A product's formula would multiply the plain gradient by the other value, which gives a wrong gradient."""
    t = torch.ones(2, 3, requires_grad=True)
    y = DOORS[door](lambda x: x * x)(Line(t))
    with pytest.raises(DispatchError, match=r"a plain tensor arrived as the cotangent of a Line"):
        PLAIN[give](y, t, torch.ones(2))
    assert t.grad is None


def turning_class(*ops):
    """A mapped class with rules for ops that formulas of derivatives apply to cotangents, which mean something else."""

    def rule(func, x, *others, **options):
        if func in (aten.add.Tensor, aten.sub.Tensor) and all(isinstance(y, Turn) for y in others):
            (y,) = others
            return Turn(x.cosine * y.cosine - x.sine * y.sine, x.cosine * y.sine + x.sine * y.cosine)
        if func is aten.neg.default:
            return Turn(x.cosine.clone(), -x.sine)
        if func in (aten.sum.default, aten.sum.dim_IntList):
            return Turn(x.cosine.prod(), x.sine.prod())
        return NotImplemented

    Turn = declare(
        name="Turn",
        keywords={"fallback": "map"},
        rules=dict.fromkeys(ops, rule),
        cosine=inner(),
        sine=inner(),
    )
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


@pytest.mark.sweep(42)
@every_door
@pytest.mark.parametrize("how", TURNS)
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.neg.default, aten.sum], ids=str)
def test_cotangents_of_a_mapped_class_are_no_values_either(op, how, door):
    Turn, (fn, wanted) = turning_class(op), TURNS[how]
    run, (a, b) = DOORS[door](fn), (torch.tensor([v], requires_grad=True) for v in (1.0, 2.0))
    found = torch.autograd.grad(DOORS[door](lambda a, b: fn(Turn(a, b)))(a, b).sum(), (a, b))
    assert [g.item() for g in found] == pytest.approx(wanted)
    parameter = torch.nn.Parameter(Turn(torch.tensor([1.0]), torch.tensor([2.0])))
    for times in (1, 2):
        run(parameter).sum().backward()
        gradient = parameter.grad
        assert [gradient.cosine.item(), gradient.sine.item()] == pytest.approx([times * g for g in wanted])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", [door for door in DOORS if door != "stock"])
@pytest.mark.parametrize("returned", [lambda x: x, lambda x: x.clone(), lambda x: x.detach()])
def test_a_value_that_is_used_as_a_whole_may_be_a_result(returned, door):
    Pair = pair_class("materialize", ruled=False)

    def fn(first, second):
        x = Pair(first, second)
        return (x * 3).sum(), returned(x)

    def loss(f, first, second):
        plain, x = f(first, second)
        return plain + (x * 2).sum()

    agree(partial(loss, DOORS[door](fn)), partial(loss, fn), leaves())


# ---- a backward of a rule's result, a second one, and classes without materialize -----------------------------

# Represents twice its inner tensor.
Halves = declare(
    name="Halves",
    keywords={"fallback": "materialize", "kind": "structure"},
    materialize=lambda self: self.held * 2,
    rules={aten.mul.Tensor: lambda func, x, y: Halves(func(x.held, y))},
)
Mapped = declare(keywords={"fallback": "map"}, a=inner(), b=inner())
Logs = declare(
    held=inner(shape="..."),
    wrap_cotangent=lambda self, cotangent: Logs(cotangent),
    rules={aten.mm: lambda func, x, y: torch.logsumexp(x[..., None] + y.held, -2)},
)
# A function that makes a value of a leaf, and its backward.
BACKWARDS = {
    "by an inner tensor": (lambda x: Halves(x) * 3, lambda y, **how: y.unwrap("held").sum().backward(**how)),
    "by the whole": (lambda x: Halves(x) * 3, lambda y, **how: y.materialize().sum().backward(**how)),
    "by a gradient of the class": (
        lambda x: Halves(x) * 3,
        lambda y, **how: y.backward(y.cotangent(torch.ones(3)), **how),
    ),
    "of a mapped class": (
        lambda x: Mapped(x, x * 2) * Mapped(x, x),
        lambda y, **how: y.unwrap("a").sum().backward(**how),
    ),
    "of a function of several ops": (
        lambda x: (x.expand(2, 2, 3) * 1) @ Logs(torch.rand(3, 2)),
        lambda y, **how: y.sum().backward(**how),
    ),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_second_backward(name):
    (made, backward), x = BACKWARDS[name], torch.ones(3, requires_grad=True)
    y = made(x)
    backward(y, retain_graph=True)
    first = x.grad.clone()
    backward(y)
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        backward(y)


# Records the cotangents that arrive, and calls the base, which does not define the tensor that it represents.
arrived = []
Silent = declare(name="Box")
Noting = declare(
    Silent,
    name="Noting",
    wrap_cotangent=lambda self, cotangent: (
        arrived.append(cotangent.shape),
        Silent.wrap_cotangent(self, cotangent),
    )[1],
)


def test_a_plain_cotangent_of_a_class_that_does_not_materialize():
    text = r"{}: a plain cotangent needs a method `materialize\(self\) -> Tensor`, or `wrap_cotangent\(self, c\w+\)`"
    with pytest.raises(DispatchError, match=text.format("Box")):
        Silent(torch.ones(3)).wrap_cotangent(torch.ones(3))
    with pytest.raises(DispatchError, match=text.format("Noting") + " that returns it as a Noting"):
        Noting(torch.ones(3, requires_grad=True)).backward(torch.ones(3))
    assert arrived == [torch.Size([3])]
