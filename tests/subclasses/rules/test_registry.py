"""Who may write a rule, and which of several applies."""

from __future__ import annotations

import contextlib
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import DispatchError, Outer, SpecError, TensorSubclass, dynamic, inner
from tests.subclasses.subjects import MODES as DOORS, Int8Weight, declare, make_int8
from tests.tables import giving, raising

aten = torch.ops.aten

KEY_NAMES = ["overload", "packet", "function", "tag"]  # a function's own text holds its address


def fresh(base: type = TensorSubclass, **keywords):
    """A new class with one inner tensor and no rules of its own."""
    return declare(base, name="Box", held=inner(), keywords=keywords)


def answer(word):
    """A rule that returns its name, to see which one ran; below autograd it returns a tensor of numbers."""
    return lambda func, x, *args, **kwargs: word if isinstance(word, str) else torch.full(x.shape, word)


def on_held(func, x, *args, **kwargs):
    return type(x)(func(x.held, *args, **kwargs))


# ---- refused registrations ----------------------------------------------------------------------------------


def test_a_failed_registration_leaves_nothing_behind():
    Box = fresh()
    Box.implements(torch.sum)(answer("sum"))
    with pytest.raises(SpecError, match=r"Box: expected a function as the rule for .*, got 3 of type int"):
        Box.implements(aten.add.Tensor)(3)
    with pytest.raises(SpecError, match="takes ops"):
        Box.implements(aten.neg.default, torch.mean, "no op")(answer(1))
    x = Box(torch.ones(2))
    assert torch.sum(x) == "sum"
    for call in (lambda: x + x, lambda: -x, lambda: torch.mean(x)):
        with pytest.raises(DispatchError, match="no rule"):
            call()
    Box.implements(aten.neg.default, torch.mean)(answer("again"))
    assert torch.mean(x) == "again"


# ---- the kinds of keys -------------------------------------------------------------------------------------

SEVERAL = (aten.cos.default, aten.sin.default, torch.tan)
# The keys of a rule, a call, the function that the rule gets, the inner tensor of the result.
KEYS = {
    "an overload": ([aten.add.Tensor], lambda x: x + torch.tensor(3.0), aten.add.Tensor, [3, 3]),
    "an overload, of a number": ([aten.add.Tensor], lambda x: x + 3, aten.add.Tensor, [3, 3]),
    "a packet": ([aten.sum], aten.sum.default, aten.sum.default, 0),
    "a packet, another overload": ([aten.sum], lambda x: x.sum(0), aten.sum.dim_IntList, 0),
    "a tag": ([torch.Tag.pointwise], torch.cos, aten.cos.default, [1, 1]),
    "a tag, in place": ([torch.Tag.pointwise], Tensor.cos_, aten.cos.default, [1, 1]),
    "one of several": (SEVERAL, torch.cos, aten.cos.default, [1, 1]),
    "another of several": (SEVERAL, torch.sin, aten.sin.default, [0, 0]),
    "a function of several": (SEVERAL, torch.tan, torch.tan, [0, 0]),
}


@pytest.mark.parametrize("case", KEYS)
def test_kinds_of_keys(case):
    keys, call, function, expected = KEYS[case]
    Box, asked = fresh(), []

    def rule(func, *args):
        asked.append(func)
        return on_held(func, *args)

    assert Box.implements(*keys)(rule) is rule
    assert call(Box(torch.zeros(2))).held.tolist() == expected and asked == [function]


test_other_ops_have_no_rule = raising(
    [
        (
            lambda key=key, call=call: call(declare(name="Box", rules={key: on_held})(torch.ones(2))),
            DispatchError,
            words,
        )
        for key, call, words in [
            (aten.mul.Tensor, lambda x: x + 3, r"Box has no rule for aten.add.Tensor\(Box\[2\], int\)"),
            (torch.Tag.pointwise, Tensor.sum, "no rule for aten.sum.default"),
            (torch.add, lambda x: x.add_(1), r"no rule for aten\.add_\.Tensor"),
        ]
    ]
)


@pytest.mark.parametrize("fallback", ["error", "materialize"])
@pytest.mark.parametrize("base", [0, 1], ids=["own", "inherited"])
def test_a_packet_that_only_writes(fallback, base):
    Box = declare(keywords={"fallback": fallback}, materialize=lambda self: self.held)

    @Box.implements(aten.add_, aten.zero_)
    def rule(func, x, *args, **kwargs):
        func(x.held, *args, **kwargs)
        return x

    x = (Box, declare(Box))[base](torch.ones(2))
    x += 1
    assert x.held.tolist() == [2, 2] and x.add_(torch.ones(2), alpha=2).held.tolist() == [4, 4]
    assert x.zero_().held.tolist() == [0, 0]


test_a_function_by_any_way_to_call_it = giving(
    {
        f"{number}": (
            lambda key=key, call=call: call(declare(rules={key: answer("ruled")})(torch.ones(2, 2))),
            "ruled",
        )
        for number, (key, call) in enumerate(
            [
                *(
                    (key, call)
                    for key in (torch.sum, Tensor.sum)
                    for call in (torch.sum, Tensor.sum, lambda x: x.sum())
                ),
                (torch.matmul, lambda x: x @ x),
                (F.linear, torch.nn.Linear(2, 2)),
            ]
        )
    }
)


def test_a_function_rule_gets_the_function_that_it_names():
    """So that a rule for several can compare with them, whichever equivalent one was called."""
    seen = []
    x = declare(rules={torch.clamp: lambda func, x, *args, **kw: seen.append((func, args, kw))})(
        torch.ones(2)
    )
    for call in (lambda: torch.clamp(x, min=0), lambda: x.clamp(0), lambda: torch.clip(x, 1, max=2)):
        with contextlib.suppress(DispatchError):  # the rule returns nothing
            call()
    assert seen == [(torch.clamp, (), {"min": 0}), (torch.clamp, (0,), {}), (torch.clamp, (1,), {"max": 2})]


# ---- which one applies -------------------------------------------------------------------------------------


def test_an_overload_comes_before_its_packet_and_its_packet_before_a_tag():
    Box = fresh()
    x = Box(torch.ones(1))
    for key, word in ((torch.Tag.pointwise, 1), (aten.cos, 2), (aten.cos.default, 3)):
        Box.implements(key)(answer(word))
        assert aten.cos.default(x) == word


OF_PARENT = declare(rules={aten.cos.default: answer(1), aten.max.other: answer(3)})
ONE = torch.ones(1)


def nearer_base():
    """A value of a class of two bases, of which one has a rule, as the base of both has."""
    root, left, _, both = two_bases()
    root.implements(aten.cos.default)(answer(1))
    left.implements(aten.cos.default)(answer(2))
    return both(ONE)


test_the_nearest_class_comes_first = giving(
    {
        "an inherited rule": (lambda: aten.cos.default(declare(OF_PARENT)(ONE)), 1),
        "a packet of a child": (
            lambda: aten.cos.default(declare(OF_PARENT, rules={aten.cos: answer(2)})(ONE)),
            2,
        ),
        "the parent stays": (lambda: aten.cos.default(OF_PARENT(ONE)), 1),
        "a nearer base": (lambda: aten.cos.default(nearer_base()), 2),
        "an overload of the parent": (
            lambda: torch.max(*[declare(OF_PARENT, rules={aten.max.default: answer(2)})(ONE)] * 2),
            3,
        ),
        "another overload": (
            lambda: torch.max(declare(OF_PARENT, rules={aten.max.default: answer(2)})(ONE)),
            2,
        ),
    }
)
test_two_tags_of_one_op_raise = raising(
    [
        (
            lambda: declare(rules={torch.Tag.core: answer(1), torch.Tag.pointwise: answer(2)})(ONE).cos(),
            r"two rules apply to aten.cos.default, equally specific",
        )
    ]
)


every_key = pytest.mark.parametrize(
    "key", [aten.cos.default, aten.cos, torch.cos, torch.Tag.pointwise], ids=KEY_NAMES
)


@every_key
def test_rules_registered_later_on_a_parent_reach_existing_children(key):
    Parent = fresh()
    x = declare(declare(Parent))(torch.ones(1))
    with pytest.raises(DispatchError):
        torch.cos(x)
    Parent.implements(key)(answer(5))
    assert torch.cos(x) == 5


def two_bases():
    Root = fresh()
    Left, Right = declare(Root, name="Left"), declare(Root, name="Right")
    return Root, Left, Right, declare((Left, Right), name="Both")


def on_the_left(func, x):
    return x


def on_the_right(func, x):
    return x


@every_key
def test_two_equally_near_rules_raise_naming_both(key):
    _, Left, Right, Both = two_bases()
    Left.implements(key)(on_the_left)
    Right.implements(key)(on_the_right)
    with pytest.raises(DispatchError) as caught:
        torch.cos(Both(torch.ones(1)))
    assert all(word in str(caught.value) for word in ("on_the_left", "on_the_right", "give Both its own"))
    Both.implements(key)(on_the_left)
    x = Both(torch.ones(1))
    assert torch.cos(x).held is x.held


# ---- composite ops -----------------------------------------------------------------------------------------


Weight = declare(
    name="Weight",
    keywords={"size_from": "data_"},
    data_=inner(),
    scale=inner(),
    rules={aten.linear.default: lambda func, x, w, bias=None: func(x, w.data_ * w.scale, bias)},
)
LINEAR = {
    "F.linear": lambda x, w, b: F.linear(x, w, b),
    "by keyword": lambda x, w, b: F.linear(input=x, weight=w, bias=b),
    "the op": aten.linear.default,
    "the packet": aten.linear,
}
every_mode = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])


@every_mode
@pytest.mark.parametrize(
    ("make", "call", "door"),
    [
        *((lambda: Weight(torch.randn(3, 4), torch.tensor(2.0)), call, "eager") for call in LINEAR),
        (lambda: Weight(torch.randn(3, 4), torch.tensor(2.0)), "F.linear", "stock"),
        *((lambda: make_int8(size=(3, 4)), "F.linear", door) for door in ("eager", "stock")),
    ],
)
def test_a_rule_for_a_composite_op_runs_alike_in_every_mode(make, call, door, mode):
    x, w, b = torch.randn(5, 4), make(), torch.randn(3)
    plain = w.materialize() if hasattr(w, "materialize") else w.data_ * w.scale
    run = DOORS[door](LINEAR[call], fullgraph=True)
    with mode():
        torch.testing.assert_close(run(x, w, b), F.linear(x, plain, b))


@pytest.mark.parametrize("door", ["eager", "stock"])
def test_gradients_reach_the_inner_tensors_through_such_a_rule(door):
    run = DOORS[door](lambda x, w: F.linear(x, w).sin(), fullgraph=True)
    leaves = [torch.randn(5, 4), torch.randn(3, 4), torch.tensor(2.0)]
    mine, theirs = ([t.clone().requires_grad_() for t in leaves] for _ in range(2))
    run(mine[0], Weight(*mine[1:])).sum().backward()
    F.linear(theirs[0], theirs[1] * theirs[2]).sin().sum().backward()
    torch.testing.assert_close([t.grad for t in mine], [t.grad for t in theirs])


@pytest.mark.parametrize("key", [aten._sparse_mm.default, aten._sparse_mm], ids=str)
def test_a_composite_op_that_has_no_function_is_refused_and_leaves_nothing(key):
    Box = fresh()
    with pytest.raises(SpecError, match=r"is composite: PyTorch decomposes it before a rule is called"):
        Box.implements(key)(answer(1))
    assert not Box._rulebook.overloads and not Box._rulebook.packets and not Box._rulebook.composite


# Rules, and calls with their results.
OVERLOADS = {
    "a composite op and others": (
        {
            aten.max.other: lambda func, x, y: torch.tensor(1),
            aten.max.dim: lambda func, x, *args: (torch.tensor(2), torch.tensor(0)),
        },
        lambda x: [torch.max(x, x), x.max(x), torch.max(x, 1)[0], x.max(dim=0)[0]],
        [1, 1, 2, 2],
    ),
    "sizes one by one": (
        {aten.reshape.default: lambda func, x, shape: torch.empty(shape)},
        lambda x: [
            *map(len, (x.reshape(3, 2), x.reshape((3, 2)), torch.reshape(x, (3, 2)), x.reshape(-1 * -6)))
        ],
        [3, 3, 3, 6],
    ),
    "composite overloads that have no function": (
        {aten.where: answer(4)},
        lambda x: torch.where(torch.tensor([True, False, True]), x, 0).tolist(),
        [4, 4, 4],
    ),
}


@every_mode
@pytest.mark.parametrize("case", OVERLOADS)
def test_one_function_may_reach_several_overloads(case, mode):
    rules, call, expected = OVERLOADS[case]
    x = declare(rules=rules)(torch.ones(2, 3))
    with mode():
        assert call(x) == expected
        with pytest.raises(DispatchError, match=r"no rule for aten.max.default"):
            x.max()


# ---- wrong rules -------------------------------------------------------------------------------------------


test_keys_that_are_no_ops = raising(
    [
        (lambda keys=keys: fresh().implements(*keys)(answer(1)), SpecError, words)
        for keys, words in [
            *(
                ([key], r"Box.implements takes ops \(torch.ops.aten.mul.Tensor\), packets")
                for key in ("cos", 3, None, Tensor)
            ),
            ([torch.float32], r"Box.implements takes ops \(torch.ops.aten.mul.Tensor\), packets"),
            ([], r"implements\(\) needs an op"),
            *(
                ([f], f"torch never calls a rule for .*{f.__name__}")
                for f in (torch.ones, torch.full, torch.arange)
            ),
            ([torch.randn], "torch never calls a rule for .*randn"),
        ]
    ]
)


@every_key
def test_two_rules_on_one_class(key):
    Box = declare(rules={key: on_the_left})
    with pytest.raises(SpecError, match=r"has two rules for .*on_the_left.*test_registry.py.*remove one"):
        Box.implements(key)(on_the_right)


def test_a_class_without_function_rules_has_no_interception():
    Box = fresh()
    assert Box.__torch_function__ is torch._C._disabled_torch_function_impl
    Box.implements(torch.cos)(answer(1))
    assert Box.__torch_function__ is not torch._C._disabled_torch_function_impl
    assert Int8Weight.__torch_function__ is not torch._C._disabled_torch_function_impl


# ---- in place ----------------------------------------------------------------------------------------------


def logaddexp(func, *operands):
    parts = [t.unwrap("held") if isinstance(t, TensorSubclass) else torch.as_tensor(t) for t in operands]
    return type(operands[0])(torch.logaddexp(*parts))


def sums() -> type:
    """A mapped class whose ``+`` adds numbers that are stored as logarithms."""
    return declare(name="Box", keywords={"fallback": "map"}, rules={torch.add: logaddexp})


IN_PLACE = {"+=": operator.iadd, "add_": Tensor.add_, "itself": lambda x, y: x.add_(x)}


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("door", ["eager", "stock", "desugar"])
def test_the_in_place_form_of_a_function_with_a_rule_is_not_mapped(how, door):
    x, y = (sums()(torch.randn(3)) for _ in range(2))
    before = x.held.clone()
    words = r"Box has a rule for add and none for Tensor\.add_; write x = torch\.add\(x, \.\.\.\)"
    with pytest.raises(DispatchError if door == "eager" else Exception, match=words):
        DOORS[door](lambda x, y: IN_PLACE[how](x, y))(x, y)
    assert torch.equal(x.held, before)


@pytest.mark.parametrize("key", [aten.add.Tensor, aten.add_.Tensor, aten.add, torch.Tensor.add_])
@pytest.mark.parametrize("inherits", [False, True])
def test_a_rule_for_the_op_or_the_in_place_form_applies(key, inherits):
    Log = declare(sums()) if inherits else sums()
    writes = (aten.add_.Tensor, torch.Tensor.add_)
    Log.implements(key)(lambda func, x, y: x if func in writes else Log(torch.full((2,), 7.0)))
    x = Log(torch.zeros(2))
    assert x.add_(1) is x
    assert x.held.tolist() == ([7.0, 7.0] if key in (aten.add.Tensor, aten.add) else [0.0, 0.0])


@pytest.mark.parametrize("in_place_first", [False, True])
@pytest.mark.parametrize("name", ["and", "or", "xor", "lshift", "rshift"])
def test_operators_with_methods_of_their_own_have_the_rule_of_the_function(name, in_place_first):
    called = {"lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift"}.get(name, f"bitwise_{name}")
    rules = [(getattr(torch, called), answer("new")), (getattr(Tensor, f"{called}_"), answer("in place"))]
    Box = declare(keywords={"fallback": "map"}, rules=dict(reversed(rules) if in_place_first else rules))
    x = Box(torch.ones(2, dtype=torch.int64))
    assert getattr(x, f"__{name}__")(3) == "new"
    assert getattr(x, f"__i{name}__")(3) == "in place"


# ---- functions without a rule, and functions that a rule does not handle -------------------------------------


Doubled = declare(
    name="Doubled", keywords={"fallback": "materialize"}, materialize=lambda self: self.held * 2
)
VIEWS = {
    "x[0]": (Tensor.__getitem__, lambda x: x[0]),
    "select": (Tensor.select, lambda x: x.select(0, 0)),
    "transpose": (torch.transpose, lambda x: x.transpose(0, 1)),
    "view": (Tensor.view, lambda x: x.view(-1)),
    "unflatten": (Tensor.unflatten, lambda x: x.unflatten(1, (1, 2))),
}


def unruled(func, x, *args, **kwargs):
    return Doubled.unruled(func, x, *args, **kwargs)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_without_its_rule_is_a_copy(name):
    function, call = VIEWS[name]
    gradients = []
    for rules in ({}, {function: unruled}):
        held = torch.ones(3, 2, requires_grad=True)
        x = declare(Doubled, rules=rules)(held).clone()
        y = call(x)
        assert not y._is_view()
        y.mul_(5)
        x.sum().backward()
        gradients.append(held.grad)
    assert torch.equal(*gradients)


def test_copies_have_the_sizes_of_what_they_are_written_to():
    Rows = declare(
        name="Rows",
        keywords={"fallback": "materialize"},
        held=inner(),
        count=dynamic(),
        outer=staticmethod(lambda held, count: Outer((count, held.shape[0]))),
        materialize=lambda self: self.held.expand(self.count, -1),
    )
    x = Rows(torch.zeros(2), count=2)
    for y in (Rows(torch.ones(2), count=3), Rows(torch.ones(3), count=2)):
        with pytest.raises(
            DispatchError, match=r"cannot write a Rows into one of another size: expected .*2, 2"
        ):
            x.copy_(y)
    assert not x.held.any()
    assert x.copy_(Rows(torch.ones(2), count=2)) is x and x.held.all()


@pytest.mark.parametrize("door", ["stock", "inside", "desugar"])
def test_a_rule_that_is_registered_late_is_seen_by_what_was_compiled(door):
    cls = declare(Doubled)
    compiled, x = DOORS[door](lambda x: x + 0), cls(torch.ones(2))
    assert compiled(x).tolist() == [2.0, 2.0]
    cls.implements(torch.add)(lambda func, x, y: x.unwrap("held") * 100)
    assert compiled(x).tolist() == (x + 0).tolist() == [100.0, 100.0]


# ---- rules for in-place functions --------------------------------------------------------------------------


def declare_written(**rules):
    """A mapped class with a rule for ``torch.mul``, and others for methods of Tensor."""
    named = {getattr(Tensor, name): rule for name, rule in rules.items()}
    times = lambda func, x, y: type(x)(x.unwrap("held") * y)  # noqa: E731
    return declare(keywords={"fallback": "map"}, rules={torch.mul: times, **named})


def write_raw(func, x, y):
    x.held.mul_(y)
    return x


def assign(func, x, y):
    x.held = (x.held * y).detach()
    return x


@pytest.fixture
def leaves():
    return torch.ones(2, requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)


def test_an_assignment_that_autograd_does_not_see_is_an_error(leaves):
    s, y = leaves
    with pytest.raises(DispatchError, match="a field is assigned"):
        (declare_written(mul_=assign)(s * 1) + 1).mul_(y)


def test_such_a_write_to_a_value_that_was_constructed_is_refused_before_it_is_made(leaves):
    x = declare_written(mul_=write_raw)(leaves[0] * 1)
    with pytest.raises(RuntimeError, match="created in no_grad mode and is being modified inplace"):
        x.mul_(leaves[1])
    assert torch.equal(x.held, torch.ones(2))


def test_the_rule_for_the_op_that_the_error_advises(leaves):
    Advised, (s, y) = declare_written(), leaves
    with pytest.raises(DispatchError, match=r"implements\(torch\.ops\.aten\.mul_\)"):
        Advised(s * 1).mul_(y)
    Advised.implements(aten.mul_)(write_raw)
    x = Advised(s * 1)
    x.mul_(y)
    (x.unwrap("held") * 1).sum().backward()
    assert torch.equal(s.grad, y.detach()) and torch.equal(y.grad, torch.ones(2))


DROPPED = declare(rules={aten.dropout.default: lambda func, x, p, train: x})(torch.ones(2)).requires_grad_()


test_composite_ops = giving(
    {
        "an argument that a rule for a composite op returns": (
            lambda: F.dropout(DROPPED) is DROPPED,
            True,
        ),
        "a composite op": (
            lambda: Doubled.unruled(aten.linear, torch.ones(1, 2), Doubled(torch.ones(1, 2))).tolist(),
            [[4.0]],
        ),
    }
)
test_unruled_takes_no_op_whose_rule_is_asked_for_below = raising(
    [
        (
            lambda: TensorSubclass.unruled(torch.ones(2)),
            SpecError,
            r"unruled takes the function before its arguments, got a Tensor",
        ),
        (
            lambda: Doubled.unruled(aten.add.Tensor, Doubled(torch.ones(2)), 1),
            SpecError,
            r"unruled takes a Python-level function.*aten\.add\.Tensor",
        ),
    ]
)


# ---- rules for in-place functions --------------------------------------------------------------------------
