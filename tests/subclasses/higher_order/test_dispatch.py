"""``torch.cond`` and ``while_loop`` over declared classes; the judge is Python's own ``if`` and ``while``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from subclasses import DispatchError, TensorSubclass
from subclasses.int8 import Int8Tensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.subjects import (
    FACTORIES,
    Hostile,
    Int8Weight,
    Optional,
    Pair,
    Tagged,
    assert_same,
    declare,
    make_int8,
    make_pair,
)
from tests.tables import giving, raising

cond_op, loop_op = torch.ops.higher_order.cond, torch.ops.higher_order.while_loop

WAYS = ["eager", "aot_eager"]


def ready(fn: Callable[..., Any], way: str) -> Callable[..., Any]:
    """A function for eager mode, compiled, or traced at its call."""
    if way == "make_fx":
        return lambda *args: make_fx(fn)(*args)
    return fn if way == "eager" else torch.compile(fn, backend=way, fullgraph=True)


def cond_of(true_fn: Callable[..., Any], false_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a predicate and operands."""
    return lambda pred, *operands: torch.cond(pred, true_fn, false_fn, operands)


# ---- the judge ---------------------------------------------------------------------------------------------


def python_cond(pred, true_fn, false_fn, operands=()):
    return (true_fn if pred else false_fn)(*operands)


def python_loop(cond_fn, body_fn, carried):
    while cond_fn(*carried):
        carried = body_fn(*carried)
    return carried


def check_cond(fn, make, way):
    """``fn(c, ...)`` calls ``c`` as ``torch.cond`` without the predicate; both branches are compared."""

    def with_op(op):
        return lambda pred, *args: fn(lambda *branches: op(pred, *branches), *args)

    call, judge = ready(with_op(torch.cond), way), with_op(python_cond)
    for pred in (torch.tensor(True), torch.tensor(False)):
        compare(partial(call, pred), partial(judge, pred), make)


def check_loop(fn, make, way):
    compare(ready(partial(fn, while_loop), way), partial(fn, python_loop), make)


def outcome(call, make):
    """The results, and the gradients of the arguments by another cotangent for each."""
    torch.manual_seed(0)
    args = make()
    results = tree_leaves(call(*args))
    plain = [t for result in results for t in unwrapped(result) if t.requires_grad]
    if plain:
        sum((t * torch.arange(1.0, t.numel() + 1).reshape(t.shape)).sum() for t in plain).backward()
    return [result.detach() for result in results], [arg.grad for arg in args]


def compare(call, judge, make):
    """Values, types, metadata and gradients of two calls."""
    (found, gradients), (expected, wanted) = outcome(call, make), outcome(judge, make)
    for check, *pairs in ((assert_same, found, expected), (assert_same_gradient, gradients, wanted)):
        for pair in zip(*pairs, strict=True):
            check(*pair)


def unwrapped(value):
    """The plain inner tensors, differentiably."""
    if not isinstance(value, TensorSubclass):
        return [value]
    return [t for part in value.unwrap() if part is not None for t in unwrapped(part)]


def assert_same_gradient(found, expected):
    """A compiled ``cond`` has zeros where the branch that was taken has no gradient, as for plain tensors."""
    if expected is not None:
        assert_same(found, expected)
    elif found is not None:
        assert all(not t.any() for t in unwrapped(found))


# ---- cond: every kind of class -----------------------------------------------------------------------------


# Each is given the call with its predicate bound, a wrapper and a plain tensor. In the first case, the first branch has
# a result of the class where it maps, else a plain one.
CASES = {
    "one operand": lambda c, x, t: c(lambda x: x.sin() * 2, lambda x: x.cos() + 1, (x,)),
    "mixed": lambda c, x, t: c(
        lambda x, t: {"both": x * t, "plain": t + 1},
        lambda x, t: {"both": t * x.sin(), "plain": t * 3},
        (x, t),
    ),
    "captured": lambda c, x, t: c(lambda t: x * t, lambda t: x + t, (t,)),
    "twice": lambda c, x, t: c(lambda x, y: x + y, lambda x, y: x * y, (x, x)),
    "copies": lambda c, x, t: c(lambda x, t: (x.clone(), t.sin()), lambda x, t: (x.clone(), t * 3), (x, t)),
}
MAPPING = [
    "pair",
    "rows",
    "tagged",
    "nested",
    "nested twice",
    "optional, absent",
    "optional, there",
    "shadow",
]


def every(c, x, t):
    return [case(c, x, t) for case in CASES.values()]


def with_scalar(kind):
    """The inner tensor of "rows" is smaller than the value, so the gradient of a plain operand is refused."""
    return lambda grad: (
        lambda: (
            FACTORIES[kind]().requires_grad_(grad),
            torch.randn(()).requires_grad_(grad and kind != "rows"),
        )
    )


# ---- cond: operands and results ----------------------------------------------------------------------------


def pairs_of(grad, number=1):
    return lambda: tuple(make_pair(3).requires_grad_(grad) for _ in range(number))


def plain_of(grad):
    return lambda: (torch.randn(3).requires_grad_(grad),)


SHAPES = {
    "a wrapper from plain operands": (
        lambda c, t: c(lambda t: Pair(t.sin(), t * 2), lambda t: Pair(t * 3, t.cos()), (t,)),
        plain_of,
    ),
    "results that are an operand": (
        lambda c, t: c(lambda t: Pair(t, t * 2), lambda t: Pair(t * 3, t), (t,)),
        plain_of,
    ),
    "a plain tensor from a wrapper": (
        lambda c, x: c(lambda x: x.unwrap("a") * 2, lambda x: x.unwrap("b") * 3, (x,)),
        pairs_of,
    ),
    "two classes": (
        lambda c, x: c(
            lambda x, y: (x * 2, y.sin()), lambda x, y: (x.sin(), y * 2), (x, Tagged(x.unwrap("a"), tag="t"))
        ),
        pairs_of,
    ),
    "a cond in a branch": (
        lambda c, x: c(
            lambda x: torch.cond(x.unwrap("a").sum() > 9, lambda x: x * 2, lambda x: x * 3, (x,)),
            lambda x: x.sin(),
            (x,),
        ),
        pairs_of,
    ),
    "a gradient in one branch only": (
        lambda c, x, y: c(lambda x, y: x * 2, lambda x, y: x * y, (x, y)),
        lambda grad: pairs_of(grad, 2),
    ),
    "different dynamic ints": (
        lambda c, x: c(
            lambda x: Tagged(x.unwrap("held") * 2, tag="t", length=x.length),
            lambda x: Tagged(x.unwrap("held") * 3, tag="t", length=5),
            (x,),
        ),
        lambda grad: lambda: (Tagged(torch.randn(3), tag="t", length=7).requires_grad_(grad),),
    ),
}


def jagged(grad):
    return JaggedTensor(torch.randn(6, 4), torch.tensor([0, 2, 3, 6])).requires_grad_(grad)


def padded(grad):
    return PaddedTensor(torch.randn(3, 4, 4), torch.tensor([2, 4, 1])).requires_grad_(grad)


def with_row(make):
    return lambda grad: lambda: (make(grad), torch.randn(4).requires_grad_(grad))


def ragged_cases(c, x, t):
    summed = c(lambda x: x.sum(1), lambda x: x.mean(1), (x,))
    soft = c(lambda x: x.softmax(1), lambda x: x.relu(), (x,)) + x
    linear = c(lambda: F.linear(x, t.unsqueeze(0)), lambda: F.linear(x, t.unsqueeze(0) * 2))
    shared = c(lambda x, y: (x + y, x * t), lambda x, y: (x * y, y.sin()), (x, x * 3))
    return summed, soft, linear, shared


def int8_cases(c, x, w):
    given = c(F.linear, lambda x, w: F.linear(x, w) * 2, (x, w))
    return given, c(lambda x: F.linear(x, w), lambda x: x @ w.t(), (x,))


# A function of the call, and the makers of its operands.
COND = {
    **{f"map, {kind}": (every, with_scalar(kind)) for kind in MAPPING},
    **{f"int8, {name}": (case, with_scalar("int8 with zero")) for name, case in CASES.items()},
    "hostile, copies": (CASES["copies"], with_scalar("hostile")),
    **SHAPES,
    "jagged": (ragged_cases, with_row(jagged)),
    "padded": (ragged_cases, with_row(padded)),
    "int8": (
        int8_cases,
        lambda grad: (
            lambda: (
                torch.randn(2, 4).requires_grad_(grad),
                Int8Tensor.from_float(torch.randn(8, 4)),
            )
        ),
    ),
}


@pytest.mark.sweep(48)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("name", COND)
def test_cond(name, grad, way):
    fn, make = COND[name]
    check_cond(fn, make(grad), way)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_different_classes_become_one(way):
    """The true branch has a gradient of the weight's class, the false one a plain gradient; a graph gives the first."""
    x, w = torch.randn(2, 4), Int8Tensor.from_float(torch.randn(8, 4)).requires_grad_()
    call = ready(cond_of(F.linear, lambda x, w: x @ (w * 1.0).t()), way)
    (expected,) = torch.autograd.grad(F.linear(x, w).sum(), w)
    for pred in (True, False):
        (found,) = torch.autograd.grad(call(torch.tensor(pred), x, w).sum(), w)
        if way == "eager" and not pred:
            assert type(found) is Tensor
            found = w.wrap_cotangent(found)
        assert type(found) is type(expected) is Int8Tensor.Cotangent
        torch.testing.assert_close(found.scale, expected.scale)


@pytest.mark.parametrize("way", WAYS)
def test_shared_inner_tensors_stay_shared(way):
    """Two operands share one; the scale of the result is new and its data the operand's, in both branches."""
    t, w = torch.randn(3), make_int8()
    call = ready(cond_of(lambda x, y: x + y, lambda x, y: x * y), way)
    assert_same(call(torch.tensor(True), Pair(t, t * 2), Pair(t, t * 3)), Pair(t * 2, t * 5))
    rescaled = cond_of(lambda w: Int8Weight(w.qdata, w.scale * 2), lambda w: Int8Weight(w.qdata, w.scale * 3))
    found = ready(rescaled, way)(torch.tensor(False), w)
    assert found.qdata is w.qdata and found.scale.equal(w.scale * 3)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_without_gradients(mode, way):
    x = make_pair(3).requires_grad_()
    with mode():
        found = ready(cond_of(lambda x: x * 2, lambda x: x * 3), way)(torch.tensor(True), x)
        assert not found.requires_grad and found.is_inference() == (mode is torch.inference_mode)
        assert_same(found, x * 2)


@pytest.mark.parametrize("way", WAYS)
def test_predicates(way):
    def fn(x, pred=None):
        pred = x.shape[0] > 4 if pred is None else pred
        return torch.cond(pred, lambda x: x * 2, lambda x: x * 3, (x,))

    for size in (3, 6):
        x = make_pair(size)
        resized = fn if way == "eager" else torch.compile(fn, backend=way, fullgraph=True, dynamic=True)
        assert_same(resized(x), x * 2 if size > 4 else x * 3)
        assert_same(ready(fn, way)(x, torch.tensor([False])), x * 3)


ROWS = ([2, 1, 3], [4, 2], [5, 1, 1, 2])
ONE_PROGRAM = {
    "dynamic ints": lambda: [Tagged(torch.randn(3, 4), tag="t", length=n) for n in (3, 6, 9)],
    "lengths": lambda: [JaggedTensor.from_tensors([torch.randn(n, 4) for n in rows]) for rows in ROWS],
}


@pytest.mark.parametrize("values", ["dynamic ints", pytest.param("lengths", marks=pytest.mark.slow)])
def test_one_program_serves_all(values):
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(cond_of(lambda x: x * 2, lambda x: x.softmax(1)), backend=counter, fullgraph=True)
    for x in ONE_PROGRAM[values]():
        found = call(torch.tensor(False), x)
        assert_same(found, x.softmax(1))
        assert not isinstance(x, JaggedTensor) or found.offsets is x.offsets
    assert counter.frame_count == 1


def second_derivative(y, x):
    ones = Pair(torch.ones(3), torch.ones(3))
    (gradient,) = torch.autograd.grad(y, x, ones, create_graph=True)
    return torch.autograd.grad(gradient, x, ones)[0]


def test_eager_mode_runs_a_branch_as_python_does():
    """The branch has random numbers and a second derivative, and runs under a mode without a rule for the op."""
    x = make_pair(3).requires_grad_()
    torch.manual_seed(0)
    found = torch.cond(torch.tensor(True), lambda x: F.dropout(x**3, 0.5), lambda x: x * 2, (x,))
    torch.manual_seed(0)
    expected = F.dropout(x**3, 0.5)
    assert_same(found.detach(), expected.detach())
    twice = [second_derivative(result, x) for result in (found, expected)]
    assert_same(*twice)
    with FlopCounterMode(display=False):
        assert_same(cond_op(torch.tensor(False), torch.sin, torch.cos, (x.detach(),)), x.detach().cos())


# ---- with kernels ------------------------------------------------------------------------------------------


def cond_and_more(c, x, t):
    return c(lambda x: x.softmax(1) * t, lambda x: x.relu() + t, (x,)) + x


INDUCTOR = {
    "cond, tagged": (check_cond, CASES["mixed"], with_scalar("tagged")(True)),
    "cond, int8": (check_cond, CASES["mixed"], with_scalar("int8")(True)),
    "cond, padded": (check_cond, cond_and_more, with_row(padded)(True)),
    "cond, jagged": (check_cond, cond_and_more, with_row(jagged)(True)),
    "loop, jagged": (check_loop, lambda loop, x: LOOPS["three times"](loop, x), lambda: (jagged(True),)),
    "loop, pair": (check_loop, lambda loop, x: LOOPS["three times"](loop, x), pairs_of(True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", INDUCTOR)
def test_inductor(case):
    check, fn, make = INDUCTOR[case]
    check(fn, make, "inductor")


# ---- while_loop --------------------------------------------------------------------------------------------


def times(number, step):
    """A loop that makes a step a number of times."""
    return lambda loop, x: loop(lambda i, x: i < number, lambda i, x: (i + 1, step(x)), (torch.tensor(0), x))[
        1
    ]


LOOPS = {
    "three times": times(3, lambda x: (x * 1.5).sin()),
    "never": times(0, lambda x: (x * 1.5).sin()),
    "captured": lambda loop, x: loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, y + x), (torch.tensor(0), x * 2)
    )[1],
    "two": lambda loop, x: loop(
        lambda i, x, y: i < 2, lambda i, x, y: (i + 1, x + y, y.sin()), (torch.tensor(0), x, x * 2)
    )[1:],
}


def every_loop(loop, x):
    return [case(loop, x) for case in LOOPS.values()]


def ragged_loops(loop, x):
    halved = loop(lambda x: x.sum(1).abs().sum() > 0.5, lambda x: (x * 0.5,), (x,))[0]
    return LOOPS["two"](loop, x), LOOPS["captured"](loop, x) + x, halved


# A function of the op, and the maker of its operand.
EVERY_LOOP = {
    **{
        kind: (every_loop, lambda kind=kind: (FACTORIES[kind]().requires_grad_(),))
        for kind in ("pair", "rows", "nested", "shadow")
    },
    "tagged": (every_loop, lambda: (FACTORIES["tagged"](),)),
    **{
        f"{name}, {grad}": (ragged_loops, lambda make=make, grad=grad: (make(grad),))
        for name, make in {"jagged": jagged, "padded": padded}.items()
        for grad in (False, True)
    },
    # The carried tensor requires no grad, a tensor that the loop reads does: PyTorch's own derivative forgets
    # iterations here.
    "plain, that reads a wrapper": (
        lambda loop, x: loop(
            lambda i, t: i < 3, lambda i, t: (i + 1, t * x.unwrap("a")), (torch.tensor(0), torch.ones(3))
        )[1],
        pairs_of(True),
    ),
    "an int": (
        lambda loop, x: math.prod(loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (0, x))),
        pairs_of(False),
    ),
}


@pytest.mark.sweep(24)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EVERY_LOOP)
def test_loop(name, way):
    check_loop(*EVERY_LOOP[name], way)


WRITES = {
    "branches": (check_cond, lambda c, x: (c(lambda x: x.mul_(2), lambda x: x.add_(1), (x,)), x), 1),
    "a loop, to what it captures": (
        check_loop,
        lambda loop, x, sums: (
            loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + sums.add_(1)), (torch.tensor(0), x))[1],
            sums,
        ),
        2,
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_to(name, way):
    check, fn, operands = WRITES[name]
    with torch.no_grad():
        check(fn, pairs_of(False, operands), way)


def test_what_the_body_leaves_is_no_state():
    """The offsets, which both carried values and the results share; ``make_fx`` shows what the op is given."""

    def fn(values, offsets):
        x = JaggedTensor(values, offsets, max_length=3)
        _, y, z = loop_op(
            lambda i, x, y: i < 3, lambda i, x, y: (i + 1, x + y, y * 2), (torch.tensor(0), x, x.sin()), ()
        )
        assert y.offsets is offsets and z.offsets is offsets
        return y.values

    graph = make_fx(fn, tracing_mode="fake")(torch.randn(6, 4), torch.tensor([0, 2, 3, 6]))
    (node,) = graph.graph.find_nodes(op="call_function", target=loop_op)
    _, _, carried, read = node.args
    shapes = [[tuple(n.meta["val"].shape) for n in nodes] for nodes in (carried, read)]
    # A counter and the values twice, with the carriers of the padded extent; the offsets once.
    assert sorted(shapes[0]) == [(), (3, 0), (3, 0), (6, 4), (6, 4)]
    assert shapes[1] == [(4,)]


# ---- refusals ----------------------------------------------------------------------------------------------


def message_of(call, *args):
    """The message of an error from subclasses, or from Dynamo around it, on one line."""
    with pytest.raises((TypeError, DispatchError, RuntimeError)) as caught:
        call(*args)
    return re.sub(r"\s+", " ", str(caught.value)).replace("\\", "")


PAIR = "Pair(a=float32[3], b=float32[3])"
DIFFERENT = "the branches of torch.cond give different results: true_fn gives"
NO_BOOL = "a bool or a plain bool tensor of one element"
# A function of a predicate and an operand; how the operand is made; the ways; the error.
REFUSED = {
    "class": (
        cond_of(lambda x: x * 2, lambda x: x.unwrap("a") * 2),
        make_pair,
        WAYS,
        f"{DIFFERENT} ({PAIR}), false_fn gives (float32[3]); return the same structure, classes and metadata from both",
    ),
    "static": (
        cond_of(
            lambda x: Tagged(x.unwrap("a") * 2, tag="s", length=2),
            lambda x: Tagged(x.unwrap("a") * 2, tag="t", length=2),
        ),
        make_pair,
        WAYS,
        f"{DIFFERENT} (Tagged(held=float32[3], tag='s', mode=0, length=2)), "
        "false_fn gives (Tagged(held=float32[3], tag='t', mode=0, length=2))",
    ),
    "optional": (
        cond_of(
            lambda x: Optional(x.unwrap("a") * 2), lambda x: Optional(x.unwrap("a") * 2, x.unwrap("b") * 2)
        ),
        make_pair,
        WAYS,
        f"{DIFFERENT} (Optional(base=float32[3], extra=None)), "
        "false_fn gives (Optional(base=float32[3], extra=float32[3]))",
    ),
    "structure": (
        lambda pred, a: cond_op(pred, lambda x: (x * 2, x), lambda x: (x * 2,), (Pair(a, a * 2),)),
        torch.randn,
        ["make_fx"],
        f"{DIFFERENT} ({PAIR}, {PAIR}), false_fn gives ({PAIR})",
    ),
    "a predicate that is a wrapper": (
        lambda _, x: cond_of(lambda x: x * 2, lambda x: x * 3)(x.sum() > 0, x),
        make_pair,
        WAYS,
        f"expected {NO_BOOL} as the predicate, got a Pair",
    ),
    "a condition of a loop that is a wrapper": (
        lambda _, a: loop_op(lambda x: x.sum() < 3, lambda x: (x * 2,), (Pair(a, a * 2),), ()),
        torch.randn,
        ["make_fx"],
        f"expected cond_fn to return {NO_BOOL}, got a Pair",
    ),
    "a body that changes the class": (
        lambda _, x: times(3, lambda x: x.unwrap("a") * 1)(while_loop, x),
        make_pair,
        WAYS,
        f"the body of while_loop is given (int64[], {PAIR}) and returns (int64[], float32[3])",
    ),
    "a branch that returns its operand": (
        cond_of(lambda x: x, lambda x: x * 2),
        make_pair,
        WAYS,
        "do not support aliasing",
    ),
    "no rule": (
        cond_of(torch.sin, torch.cos),
        lambda n: Hostile(torch.randn(n)),
        WAYS,
        "Hostile has no rule for aten.sin",
    ),
    "by hand": (
        cond_of(torch.sin, torch.cos),
        lambda n: TwoTensor(torch.ones(n), torch.ones(n)),
        [*WAYS, "desugar"],
        "a TwoTensor, a wrapper class written by hand; declare the class",
    ),
    "a loop, by hand": (
        lambda _, x: times(3, lambda x: x * 2)(while_loop, x),
        lambda n: TwoTensor(torch.ones(n), torch.ones(n)),
        [*WAYS, "desugar"],
        "a TwoTensor, a wrapper class written by hand; declare the class",
    ),
}


@pytest.mark.parametrize(("case", "way"), [(case, way) for case in REFUSED for way in REFUSED[case][2]])
def test_refused(case, way):
    fn, make, _, text = REFUSED[case]
    assert text in message_of(ready(fn, way), torch.tensor(True), make(3))


@pytest.mark.parametrize(
    "call",
    [
        cond_of(lambda x: F.dropout(x), lambda x: x * 2),
        lambda _, x: times(3, lambda x: F.dropout(x))(while_loop, x),
    ],
    ids=["cond", "while_loop"],
)
def test_random_numbers_in_what_is_differentiated(call):
    compiled, args = ready(call, "aot_eager"), (torch.tensor(True), make_pair(3).requires_grad_())
    assert "draws random numbers" in message_of(compiled, *args)
    with torch.no_grad():
        compiled(*args)


SCAN = torch.ops.higher_order.associative_scan
test_other_higher_order_ops = raising(
    [
        (
            lambda: Pair.__torch_dispatch__(SCAN, (Pair,), (make_pair(),)),
            r"Pair has no rule for the higher-order op associative_scan; pass it the",
        )
    ]
)
Ruled = declare(rules={cond_op: lambda func, pred, true_fn, false_fn, operands: "ruled"})
test_a_rule_for_a_higher_order_op = giving(
    {"cond": (lambda: cond_op(torch.tensor(True), torch.sin, torch.cos, (Ruled(torch.ones(1)),)), "ruled")}
)


# ---- resolution --------------------------------------------------------------------------------------------


def test_a_graph_over_plain_tensors():
    graph = make_fx(lambda pred, a, b: cond_op(pred, lambda x: x * 2, lambda x: x + 1, (Pair(a, b),)).a)(
        torch.tensor(True), torch.randn(3), torch.randn(3)
    )
    (node,) = graph.graph.find_nodes(op="call_function", target=cond_op)
    assert [n.name for n in node.args[3]] == ["a_1", "b_1"]
    assert graph.true_graph_0.code.count("torch.ops.aten.mul") == 2
    assert "Pair" not in graph.print_readable(print_output=False)


def test_the_plan_is_kept_like_that_of_any_op():
    Kept = declare(keywords={"fallback": "map"})
    plans = Kept.__torch_dispatch__.__func__.__globals__["_runs"]
    assert cond_op not in plans
    cond_op(torch.tensor(True), torch.sin, torch.cos, (Kept(torch.ones(1)),))
    assert cond_op in plans
