"""Parameters of nested classes and of classes with rules, trained beside their innermost tensors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import subclasses
from subclasses import DispatchError, Outer, inner
from subclasses.spec.values import OF_PARAMETER
from tests.doors import COMPILED, DOORS
from tests.subclasses.dispatch.training import check_trained, innermost, saved
from tests.subclasses.subjects import LowRank, Pair, declare

ByRow = declare(
    __module__=__name__,
    name="ByRow",
    keywords={"fallback": "materialize", "trainable": True},
    base=inner(),
    scale=inner(),
    materialize=lambda self: self.base * 1 * self.scale,
)
Frozen = declare(LowRank, name="Frozen", keywords={"trainable": False})
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def of_rows(a, whole):
    return (whole * X).sin().sum() + a.sum()


def of_pair(a, b):
    return (a * X).sum() + (X @ b.T).sin().sum()


# A function that makes a value of tensors, the loss of the Parameter, and the loss of the tensors.
CASES = {
    "two deep": (
        lambda a, b, s, t: ByRow(LowRank(a, b), s),
        lambda p: of_rows(p.unwrap("base"), p),
        lambda a, b, s: of_rows(a @ b, a @ b * s),
    ),
    "three deep": (
        lambda a, b, s, t: ByRow(ByRow(LowRank(a, b), s), t),
        lambda p: of_rows(p.unwrap("base"), p),
        lambda a, b, s, t: of_rows(a @ b * s, a @ b * s * t),
    ),
    "mapped": (
        lambda a, b, s, t: Pair(LowRank(a, b), LowRank(a + 1, b - 1)),
        lambda p: of_pair(*p.unwrap()),
        lambda a, b, c, d: of_pair(a @ b, c @ d),
    ),
}


def make(case):
    generator = torch.Generator().manual_seed(1)
    sizes = ((4, 2), (2, 3), (4, 1), (4, 3))
    return nn.Parameter(CASES[case][0](*[torch.randn(size, generator=generator) for size in sizes]))


def moved(p):
    module = nn.Module()
    module.p = p
    return module.to(torch.float64).to(torch.float32).p


# How a Parameter is trained: a change of it before, a change of its loss, the optimizer.
HOW = {
    **{name: (lambda p: p, DOORS["eager"], name, {}) for name in ("SGD", "AdamW")},
    "AdamW one by one": (lambda p: p, DOORS["eager"], "AdamW", {"foreach": False}),
    "AdamW, fused": (lambda p: p, DOORS["eager"], "AdamW", {"fused": True}),
    **{change.__name__: (change, DOORS["eager"], "AdamW", {}) for change in (copy.deepcopy, saved, moved)},
    **{name: (lambda p: p, door, "AdamW", {}) for name, door in COMPILED.items()},
}


@pytest.mark.parametrize(
    ("how", "case"),
    [
        pytest.param(how, case, marks=pytest.mark.sweep(9) if how in COMPILED else ())
        for how in HOW
        for case in CASES
    ],
)
def test_the_innermost_tensors_are_trained(how, case):
    change, door, optimizer, options = HOW[how]
    _, loss, plain = CASES[case]
    check_trained(change(make(case)), door(loss), plain, optimizer, **options)


@pytest.mark.parametrize("door", DOORS)
def test_a_gradient_is_one_at_every_depth(door):
    p = make("two deep")
    CASES["two deep"][1](p).backward()
    doubled = DOORS[door](lambda g: g * 2)(p.grad)
    assert type(doubled.base) is LowRank.Cotangent and doubled._layout.cotangent
    torch.testing.assert_close(doubled.base.left, p.grad.base.left * 2)


def test_the_value_that_a_parameter_is_made_of_keeps_its_meaning():
    base = LowRank(torch.randn(4, 2), torch.randn(2, 3))
    p = nn.Parameter(ByRow(base, torch.ones(4, 1)))
    assert OF_PARAMETER in p.__dict__["base"].__dict__ and OF_PARAMETER not in base.__dict__
    with pytest.raises(DispatchError, match="a write to its materialized tensor would be lost"):
        base.mul_(2)


def refusal_of(x):
    """The error of a step on a Parameter; the step does not change the Parameter."""
    p = nn.Parameter(x)
    p.grad, before = torch.ones(p.shape), innermost(p)
    with pytest.raises(DispatchError) as caught:
        torch.optim.SGD([p], lr=0.1).step()
    assert all(map(torch.equal, innermost(p), before))
    return str(caught.value)


@pytest.mark.parametrize("cls", [ByRow, Pair])
def test_a_step_of_a_class_inside_that_cannot_train_is_refused(cls):
    text = refusal_of(cls(Frozen(torch.randn(4, 2), torch.randn(2, 3)), torch.randn(4, 3)))
    name = "base" if cls is ByRow else "a"
    assert f"a Parameter is a {cls.__name__} with a Frozen as {name}: " in text


def test_a_class_of_integers_inside_is_not_told_to_train():
    """Its declaration with ``trainable=True`` would be refused."""
    # A permutation matrix by its indices, which no optimizer changes.
    Permutation = declare(
        name="Permutation",
        keywords={"fallback": "materialize"},
        order=inner(dtype=torch.int64),
        outer=staticmethod(lambda order: Outer((order.shape[0],) * 2, dtype=torch.float32)),
        materialize=lambda self: torch.eye(self.order.shape[0])[self.order],
    )
    Permuted = declare(
        name="Permuted",
        keywords={"fallback": "materialize", "trainable": True},
        weight=inner(),
        permutation=inner(),
        materialize=lambda self: self.weight @ self.permutation.materialize(),
    )
    permutation = Permutation(torch.tensor([1, 0]))
    text = refusal_of(Permuted(torch.ones(2, 2), permutation))
    assert "a Permuted with a Permutation as permutation" in text and "trainable=True" not in text
    assert "let the outer class hold the inner tensors and call Permutation(self.order) in its" in text
    assert "trainable=True" not in refusal_of(permutation)


# ---- optimizers do not ask the rules of a class for arithmetic -------------------------------------------------

BALL = {"radius": inner(), "center": inner()}


def of_balls(func, x, y):
    """Radii add up, whatever is done with the centers."""
    (r, c), (s, d) = ((t.radius, t.center) if isinstance(t, Ball) else (0, t) for t in (x, y))
    radius = r * abs(d) + s * abs(c) if func is torch.mul else r + s
    center = func(c, d)
    return Ball(radius.expand_as(center), center)


def never(func, x, *args, **kwargs):
    """A rule for functions, above autograd."""
    raise AssertionError(f"an optimizer asked for {func}")


FUNCTIONS = [torch.add, torch.sub, torch.mul, torch.div, torch.sqrt]
Ball = declare(keywords={"fallback": "map"}, rules={subclasses.arithmetic: of_balls}, **BALL)
Above = declare(keywords={"fallback": "map"}, rules=dict.fromkeys(FUNCTIONS, never), **BALL)
# A class that cannot be mapped.
Product = declare(
    keywords={"fallback": "materialize", "trainable": True},
    materialize=lambda self: self.radius * self.center,
    **BALL,
)


def loss(radius, center):
    return (radius.square() + (radius * center).square()).sum()


def check(cls, optimizer, door="eager", **how):
    p = nn.Parameter(cls(torch.randn(3, 2), torch.randn(3, 2)))
    check_trained(p, lambda p: loss(*p.unwrap()), loss, optimizer, door=door, **how)


foreach = pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])


@foreach
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adadelta", "RAdam"])
@pytest.mark.parametrize("cls", [Ball, Above])
def test_a_step_is_that_of_each_inner_tensor(cls, optimizer, foreach):
    check(cls, optimizer, foreach=foreach)


@pytest.mark.sweep(36)
@foreach
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("cls", [Ball, Product])
@pytest.mark.parametrize("door", ["stock", "desugar"])
def test_a_compiled_step_is_the_same(cls, optimizer, foreach, door):
    check(cls, optimizer, door, clip=False, foreach=foreach)


def test_values_keep_their_rules():
    x = Ball(torch.ones(2), torch.ones(2))
    p = nn.Parameter(x.clone())
    assert (p - x).detach().radius.tolist() == [2, 2] and x.sub_(x).radius.tolist() == [2, 2]
    with torch.no_grad():
        assert (p - p).radius.tolist() == [2, 2] and p.sub_(p).radius.tolist() == [0, 0]


WRITES = {
    "mul_.Tensor": lambda p: p.mul_(0.5),
    "_foreach_mul_.Scalar": lambda p: torch._foreach_mul_([p], 0.5),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", ["stock", "desugar"])
@pytest.mark.parametrize(
    ("op", "make"),
    [
        ("mul_.Tensor", lambda: Ball(*torch.ones(2, 2))),
        ("mul_.Tensor", lambda: Product(*torch.ones(2, 2))),
        ("mul_.Tensor", lambda: LowRank(*torch.ones(2, 2, 2))),
        ("_foreach_mul_.Scalar", lambda: LowRank(*torch.ones(2, 2, 2))),
    ],
)
def test_a_graph_does_not_write_to_a_parameter(op, make, door):
    """Without fullgraph the graph ends there, as the error advises, and the inner tensors are written to."""
    p, step = nn.Parameter(make()), torch.no_grad()(WRITES[op])
    words = (
        rf"aten.{op} writes to a Parameter of an? \w+ in a compiled function, .*; compile without fullgraph=True, "
        "or keep the optimizer's step out"
    )
    with pytest.raises(Exception, match=words):  # by way of Dynamo's own
        DOORS[door](step, fullgraph=True)(p)
    assert torch.stack(p.detach().unwrap()).unique().tolist() == [1]
    torch.compiler.reset()
    DOORS[door](step)(p)
    assert torch.stack(p.detach().unwrap()).unique().tolist() == [0.5]


@pytest.mark.parametrize("cls", [Ball, Product])
def test_a_gradient_of_the_users_own(cls):
    p = nn.Parameter(cls(torch.ones(2), torch.ones(2)))
    p.grad = torch.ones(2)
    words = r"A step of an optimizer takes Parameters, .* torch.zeros_like\(parameter\)"
    with pytest.raises(DispatchError, match=words):
        torch.optim.SGD([p]).step()
    p.grad = torch.zeros_like(p).add_(1)
    torch.optim.SGD([p], lr=0.5).step()
    assert torch.stack(p.detach().unwrap()).unique().tolist() == [0.5]


# ---- memory of gradients, and strides that fused kernels take --------------------------------------------------

Sum = declare(
    keywords={"fallback": "materialize", "trainable": True},
    a=inner(),
    b=inner(),
    materialize=lambda self: self.a + self.b,
)


def einsum(x, left, right):
    return torch.einsum("bi,ri,or->bo", x, right, left)


# Its rule gives gradients of other strides.
Einsum = declare(
    LowRank,
    keywords={"trainable": True},
    rules={F.linear: lambda func, x, w, bias=None: einsum(x, *w.unwrap())},
)

FACTORS = torch.tensor([1.0, 2.0])
# A loss of the whole and its two parts.
LOSSES = {
    "the whole": lambda p, a, b: (p * FACTORS).sum(),
    "parts": lambda p, a, b: (a * FACTORS + b * FACTORS).sum(),
    "one sum": lambda p, a, b: ((a + b) * FACTORS).sum(),
    "expanded": lambda p, a, b: a.sum() + b.sum(),
    "mixed": lambda p, a, b: (p * FACTORS).sum() + a.sum(),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", LOSSES)
def test_accumulation_and_clipping(name, door):
    p = nn.Parameter(Sum(torch.zeros(2), torch.zeros(2)))
    parts = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    loss = DOORS[door](lambda p: LOSSES[name](p, *p.unwrap()))

    def check():
        torch.testing.assert_close([p.grad.a, p.grad.b], [t.grad for t in parts])

    for _ in range(3):
        loss(p).backward()
        LOSSES[name](sum(parts), *parts).backward()
        check()
    for leaves in ([p], parts):
        nn.utils.clip_grad_norm_(leaves, 1.0)
    check()
    for leaf in (p, *parts):
        leaf.grad.mul_(3)
    check()


@pytest.mark.parametrize("cls", [Sum, Pair])
def test_two_parameters_with_one_gradient(cls):
    p, q = (nn.Parameter(cls(torch.zeros(2), torch.zeros(2))) for _ in range(2))
    plain = torch.zeros(2, requires_grad=True)
    for _ in range(2):
        ((p.unwrap()[0] + q.unwrap()[0] + plain) * FACTORS).sum().backward()
    for grad in (p.grad.a, q.grad.a, plain.grad):
        assert grad.equal(2 * FACTORS)
    p.grad.zero_()
    assert q.grad.a.equal(2 * FACTORS) and plain.grad.equal(2 * FACTORS)


def test_the_callers_gradient_stays_as_it_is():
    p, g = nn.Parameter(Sum(torch.zeros(2), torch.zeros(2))), torch.ones(2)
    for _ in range(2):
        torch.autograd.backward([p.unwrap()[0]], [g])
    assert g.equal(torch.ones(2)) and p.grad.a.equal(torch.full((2,), 2.0))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_gradients_of_other_strides(optimizer, options):
    p, x = nn.Parameter(Einsum(torch.randn(8, 2), torch.randn(2, 6))), torch.randn(5, 6)

    def loss(p):
        p.register_post_accumulate_grad_hook(lambda p: strides.append(p.grad.left.stride()))
        return F.linear(x, p).square().mean()

    strides = []
    check_trained(p, loss, lambda *parts: einsum(x, *parts).square().mean(), optimizer, clip=False, **options)
    assert p.left.stride() not in strides  # the condition under test
