"""Who may write a rule, and which of several applies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
from subclasses import DispatchError, Outer, SpecError, TensorSubclass, dynamic, inner
from tests.subclasses.subjects import Int8Weight, make_int8

aten = torch.ops.aten

KEY_NAMES = ["overload", "packet", "function", "tag"]  # a function's own text holds its address


def fresh(base: type = TensorSubclass, **keywords) -> type:
    """A new class with one inner tensor and no rules of its own."""

    class Box(base, **keywords):
        held: Tensor = inner()

    return Box


def answer(word):
    """A rule that returns its name, to see which one ran; below autograd a tensor of numbers stands for it."""
    return lambda func, x, *args, **kwargs: word if isinstance(word, str) else torch.full(x.shape, word)


# ---- what cannot be registered ------------------------------------------------------------------------------


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


def test_an_overload():
    Box = fresh()

    @Box.implements(aten.mul.Tensor)
    def rule(func, x, y):
        assert func is aten.mul.Tensor
        return Box(func(x.held, y))

    assert (Box(torch.ones(2)) * torch.tensor(3.0)).held.tolist() == [3, 3]
    assert (Box(torch.ones(2)) * 3).held.tolist() == [3, 3]  # a number arrives as a tensor
    with pytest.raises(DispatchError, match=r"Box has no rule for aten.add.Tensor\(Box\[2\], int\)"):
        Box(torch.ones(2)) + 3


def test_a_packet_covers_its_functional_overloads():
    Box = fresh()

    @Box.implements(aten.sum)
    def rule(func, x, *args, **kwargs):
        return func(x.held, *args, **kwargs)

    x = Box(torch.ones(2, 3))
    assert torch.ops.aten.sum.default(x) == 6
    assert x.sum(1).tolist() == [3, 3]


@pytest.mark.parametrize("fallback", ["error", "materialize"])
@pytest.mark.parametrize("base", [0, 1], ids=["own", "inherited"])
def test_a_packet_that_only_writes(fallback, base):
    class Box(TensorSubclass, fallback=fallback):
        held: Tensor = inner()

        def materialize(self):
            return self.held

    @Box.implements(aten.add_, aten.zero_)
    def rule(func, x, *args, **kwargs):
        func(x.held, *args, **kwargs)
        return x

    x = (Box, type("Child", (Box,), {}))[base](torch.ones(2))
    x += 1
    assert x.held.tolist() == [2, 2] and x.add_(torch.ones(2), alpha=2).held.tolist() == [4, 4]
    assert x.zero_().held.tolist() == [0, 0]


def test_a_tag():
    Box = fresh()

    @Box.implements(torch.Tag.pointwise)
    def rule(func, x, *args, **kwargs):
        return Box(func(x.held, *args, **kwargs))

    x = Box(torch.zeros(2))
    assert x.cos().held.tolist() == [1, 1]
    x.cos_()
    assert x.held.tolist() == [1, 1]
    with pytest.raises(DispatchError, match=r"no rule for aten.sum.default"):
        x.sum()


@pytest.mark.parametrize(
    "call", [torch.sum, Tensor.sum, lambda x: x.sum()], ids=["torch", "Tensor", "method"]
)
@pytest.mark.parametrize("key", [torch.sum, Tensor.sum], ids=["on torch", "on Tensor"])
def test_a_function_and_its_twin(key, call):
    Box = fresh()
    Box.implements(key)(answer("ruled"))
    assert call(Box(torch.ones(2))) == "ruled"


@pytest.mark.parametrize(
    "call", [lambda x: x @ x, torch.matmul, Tensor.matmul, lambda x: x.__matmul__(x)][:1]
)
def test_operators(call):
    Box = fresh()
    Box.implements(torch.matmul)(answer("ruled"))
    assert call(Box(torch.ones(2, 2))) == "ruled"


def test_a_function_rule_gets_the_function_that_it_names():
    """So that a rule for several can compare with them, whichever equivalent one was called."""
    Box = fresh()
    seen = []

    @Box.implements(torch.clamp)
    def rule(func, x, *args, **kwargs):
        seen.append((func, args, kwargs))
        return x

    x = Box(torch.ones(2))
    torch.clamp(x, min=0)
    x.clamp(0)
    torch.clip(x, 1, max=2)
    assert seen == [(torch.clamp, (), {"min": 0}), (torch.clamp, (0,), {}), (torch.clamp, (1,), {"max": 2})]


def test_functions_that_call_ruled_functions_are_ruled():
    Box = fresh()
    Box.implements(F.linear)(answer("ruled"))
    layer = torch.nn.Linear(2, 2)
    assert layer(Box(torch.ones(1, 2))) == "ruled"


def test_one_rule_for_several_ops():
    Box = fresh()

    @Box.implements(aten.cos.default, aten.sin.default, torch.tan)
    def rule(func, x):
        return Box(func(x.held))

    x = Box(torch.zeros(1))
    assert [f(x).held.item() for f in (torch.cos, torch.sin, torch.tan)] == [1, 0, 0]


def test_implements_returns_the_rule():
    rule = answer(1)
    assert fresh().implements(aten.cos.default)(rule) is rule


# ---- which one applies -------------------------------------------------------------------------------------


def test_an_overload_comes_before_its_packet_and_its_packet_before_a_tag():
    Box = fresh()
    x = Box(torch.ones(1))
    for key, word in ((torch.Tag.pointwise, 1), (aten.cos, 2), (aten.cos.default, 3)):
        Box.implements(key)(answer(word))
        assert aten.cos.default(x) == word


def test_the_nearest_class_comes_first():
    Parent = fresh()

    class Child(Parent):
        pass

    Parent.implements(aten.cos.default)(answer(1))
    assert aten.cos.default(Child(torch.ones(1))) == 1
    Child.implements(aten.cos)(answer(2))
    assert aten.cos.default(Child(torch.ones(1))) == 2
    assert aten.cos.default(Parent(torch.ones(1))) == 1


@pytest.mark.parametrize("key", [aten.cos.default, aten.cos, torch.cos, torch.Tag.pointwise], ids=KEY_NAMES)
def test_rules_registered_later_on_a_parent_reach_existing_children(key):
    Parent = fresh()

    class Child(Parent):
        pass

    class Grandchild(Child):
        pass

    x = Grandchild(torch.ones(1))
    with pytest.raises(DispatchError):
        torch.cos(x)
    Parent.implements(key)(answer(5))
    assert torch.cos(x) == 5


def two_bases():
    Root = fresh()

    class Left(Root):
        pass

    class Right(Root):
        pass

    class Both(Left, Right):
        pass

    return Root, Left, Right, Both


@pytest.mark.parametrize("key", [aten.cos.default, aten.cos, torch.cos, torch.Tag.pointwise], ids=KEY_NAMES)
def test_two_equally_near_rules_raise_naming_both(key):
    _, Left, Right, Both = two_bases()

    @Left.implements(key)
    def on_the_left(func, x):
        return x

    @Right.implements(key)
    def on_the_right(func, x):
        return x

    with pytest.raises(DispatchError) as caught:
        torch.cos(Both(torch.ones(1)))
    text = str(caught.value)
    assert "on_the_left" in text and "on_the_right" in text and "give Both its own" in text
    Both.implements(key)(lambda func, x: x)
    x = Both(torch.ones(1))
    assert torch.cos(x).held is x.held


def test_a_rule_of_a_nearer_base_is_no_conflict():
    Root, Left, _, Both = two_bases()
    Root.implements(aten.cos.default)(answer(1))
    Left.implements(aten.cos.default)(answer(2))
    assert aten.cos.default(Both(torch.ones(1))) == 2


def test_two_tags_of_one_op_raise():
    Box = fresh()
    tags = aten.cos.default.tags
    assert torch.Tag.core in tags and torch.Tag.pointwise in tags
    Box.implements(torch.Tag.core)(answer(1))
    Box.implements(torch.Tag.pointwise)(answer(2))
    with pytest.raises(DispatchError, match=r"two rules apply to aten.cos.default, equally specific"):
        Box(torch.ones(1)).cos()


# ---- composite ops -----------------------------------------------------------------------------------------


class Weight(TensorSubclass, size_from="data_", fallback="error"):
    data_: Tensor = inner()
    scale: Tensor = inner()


@Weight.implements(aten.linear.default)
def _linear(func, x, w, bias=None):
    return func(x, w.data_ * w.scale, bias)


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_rule_for_a_composite_op_runs_alike_in_every_mode(mode, compiled):
    def fn(x, w, b):
        return F.linear(x, w, b)

    run = torch.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn
    data, scale, x, b = torch.randn(3, 4), torch.tensor(2.0), torch.randn(5, 4), torch.randn(3)
    with mode():
        torch.testing.assert_close(run(x, Weight(data, scale), b), F.linear(x, data * scale, b))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_reach_the_inner_tensors_through_such_a_rule(compiled):
    def fn(x, w):
        return F.linear(x, w).sin()

    run = torch.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn
    leaves = [torch.randn(5, 4), torch.randn(3, 4), torch.tensor(2.0)]
    mine = [t.clone().requires_grad_() for t in leaves]
    theirs = [t.clone().requires_grad_() for t in leaves]
    run(mine[0], Weight(*mine[1:])).sum().backward()
    F.linear(theirs[0], theirs[1] * theirs[2]).sin().sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", [aten.linear.default, aten.linear], ids=str)
def test_the_op_itself_is_ruled_too(call, mode):
    with mode():
        assert call(torch.ones(1, 4), Weight(torch.ones(3, 4), torch.tensor(2.0))).tolist() == [[8, 8, 8]]


def test_such_a_rule_may_return_its_argument():
    Box = fresh()
    Box.implements(aten.dropout.default)(lambda func, x, p, train: x)
    x = Box(torch.ones(2)).requires_grad_()
    assert F.dropout(x) is x


def test_a_composite_op_by_keyword():
    assert F.linear(input=torch.ones(1, 4), weight=Weight(torch.ones(3, 4), torch.tensor(2.0))).tolist() == [
        [8, 8, 8]
    ]


@pytest.mark.parametrize("key", [aten._sparse_mm.default, aten._sparse_mm], ids=str)
def test_a_composite_op_that_has_no_function_is_refused_and_leaves_nothing(key):
    Box = fresh()
    with pytest.raises(SpecError, match=r"is composite: PyTorch decomposes it before a rule is called"):
        Box.implements(key)(answer(1))
    assert not Box._rulebook.overloads and not Box._rulebook.packets and not Box._rulebook.composite


@pytest.mark.parametrize("mode", MODES)
def test_one_function_may_reach_a_composite_op_and_others(mode):
    Box = fresh()
    Box.implements(aten.max.other)(lambda func, x, y: torch.tensor(1))
    Box.implements(aten.max.dim)(lambda func, x, *args: (torch.tensor(2), torch.tensor(0)))
    x = Box(torch.ones(2, 3))
    with mode():
        assert (torch.max(x, x), x.max(x), torch.max(x, 1)[0], x.max(dim=0)[0]) == (1, 1, 2, 2)
        with pytest.raises(DispatchError, match=r"no rule for aten.max.default"):
            x.max()


@pytest.mark.parametrize("mode", MODES)
def test_sizes_one_by_one(mode):
    Box = fresh()
    Box.implements(aten.reshape.default)(lambda func, x, shape: torch.empty(shape))
    x = Box(torch.ones(2, 3))
    with mode():
        assert x.reshape(3, 2).shape == x.reshape((3, 2)).shape == torch.reshape(x, (3, 2)).shape == (3, 2)
        assert x.reshape(-1 * -6).shape == (6,)


def test_a_packet_with_composite_overloads_that_have_no_function():
    Box = fresh()
    Box.implements(aten.where)(answer(4))
    x = Box(torch.ones(2))
    assert torch.where(torch.tensor([True, False]), x, 0).tolist() == [4, 4]


def test_a_child_rules_another_overload_of_the_packet():
    Parent = fresh()

    class Child(Parent):
        pass

    Parent.implements(aten.max.other)(answer(1))
    Child.implements(aten.max.default)(answer(2))
    x = Child(torch.ones(()))
    assert (torch.max(x, x), torch.max(x)) == (1, 2)


def test_a_function_rule_of_the_design():
    x, w = torch.randn(2, 3), make_int8()
    expected = F.linear(x, w.materialize())
    torch.testing.assert_close(F.linear(x, w), expected)
    with torch.inference_mode():
        torch.testing.assert_close(F.linear(x, w), expected)
    torch.testing.assert_close(torch.compile(F.linear, backend="aot_eager", fullgraph=True)(x, w), expected)


# ---- wrong rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["cos", 3, None, Tensor, torch.float32], ids=str)
def test_keys_that_are_no_ops(key):
    with pytest.raises(SpecError, match=r"Box.implements takes ops \(torch.ops.aten.mul.Tensor\), packets"):
        fresh().implements(key)(answer(1))


def test_no_key():
    with pytest.raises(SpecError, match=r"implements\(\) needs an op"):
        fresh().implements()


@pytest.mark.parametrize("key", [aten.cos.default, aten.cos, torch.cos, torch.Tag.pointwise], ids=KEY_NAMES)
def test_two_rules_on_one_class(key):
    Box = fresh()

    @Box.implements(key)
    def first(func, x):
        return x

    with pytest.raises(SpecError, match=r"has two rules for .*first.*test_registry.py.*remove one"):

        @Box.implements(key)
        def second(func, x):
            return x


def test_a_class_without_function_rules_has_no_interception():
    Box = fresh()
    assert Box.__torch_function__ is torch._C._disabled_torch_function_impl
    Box.implements(torch.cos)(answer(1))
    assert Box.__torch_function__ is not torch._C._disabled_torch_function_impl
    assert Int8Weight.__torch_function__ is not torch._C._disabled_torch_function_impl


# ---- in place ----------------------------------------------------------------------------------------------


def sums() -> type:
    """A mapped class whose ``+`` adds numbers that are stored as logarithms."""
    Log = fresh(fallback="map")

    @Log.implements(torch.add)
    def rule(func, x, y):
        parts = [t.unwrap("held") if isinstance(t, Log) else torch.as_tensor(t) for t in (x, y)]
        return Log(torch.logaddexp(*parts))

    return Log


def add_in_place(x, y):
    x += y
    return x


IN_PLACE = {
    "+=": add_in_place,
    "add_": lambda x, y: x.add_(y),
    "itself": lambda x, y: x.add_(x),
}


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("door", ["eager", "stock", "desugar"])
def test_the_in_place_form_of_a_function_with_a_rule_is_not_mapped(how, door):
    doors = {
        "eager": lambda f: f,
        "stock": lambda f: torch.compile(f, backend="aot_eager"),
        "desugar": lambda f: desugar.compile(f, backend="eager"),
    }
    x, y = (sums()(torch.randn(3)) for _ in range(2))
    before = x.held.clone()
    with pytest.raises(
        Exception,
        match=r"Box has a rule for add and none for Tensor\.add_; write x = torch\.add\(x, \.\.\.\)",
    ) as error:
        doors[door](IN_PLACE[how])(x, y)
    assert door != "eager" or isinstance(error.value, DispatchError)
    assert torch.equal(x.held, before)


def test_optimizers_move_the_inner_tensors_of_a_mapped_class_with_rules():
    plain = torch.nn.Parameter(torch.linspace(-1, 1, 4))
    wrapped = torch.nn.Parameter(sums()(torch.linspace(-1, 1, 4)))
    for p, value in ((plain, lambda: plain), (wrapped, lambda: wrapped.unwrap("held"))):
        step = torch.optim.SGD([p], lr=0.1, momentum=0.5)
        for _ in range(3):
            p.grad = None
            value().square().sum().backward()
            step.step()
    torch.testing.assert_close(wrapped.held, plain.detach())


@pytest.mark.parametrize("key", [aten.add.Tensor, aten.add_.Tensor, aten.add, torch.Tensor.add_])
@pytest.mark.parametrize("inherits", [False, True])
def test_a_rule_for_the_op_or_the_in_place_form_applies(key, inherits):
    Log = sums()
    if inherits:
        Log = type("Child", (Log,), {})
    writes = (aten.add_.Tensor, torch.Tensor.add_)
    Log.implements(key)(lambda func, x, y: x if func in writes else Log(torch.full((2,), 7.0)))
    x = Log(torch.zeros(2))
    y = x.add_(1)
    assert x.held.tolist() == ([7.0, 7.0] if key in (aten.add.Tensor, aten.add) else [0.0, 0.0])
    assert y is x


def test_other_fallbacks_refuse_in_place_forms_as_before():
    Box = fresh()
    Box.implements(torch.add)(lambda func, x, y: Box(func(x.unwrap("held"), y)))
    with pytest.raises(DispatchError, match=r"no rule for aten\.add_\.Tensor"):
        Box(torch.ones(2)).add_(1)


def test_a_rule_for_the_in_place_form_precedes():
    Log = sums()
    Log.implements(torch.Tensor.add_)(lambda func, x, y: "mine")
    assert Log(torch.ones(2)).add_(1) == "mine"


@pytest.mark.parametrize("in_place_first", [False, True])
@pytest.mark.parametrize("name", ["and", "or", "xor", "lshift", "rshift"])
def test_operators_with_methods_of_their_own_have_the_rule_of_the_function(name, in_place_first):
    names = {"lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift"}
    Box = fresh(fallback="map")
    called = names.get(name, f"bitwise_{name}")
    rules = [
        lambda: Box.implements(getattr(torch, called))(lambda func, x, y: Box(torch.full((2,), 7))),
        lambda: Box.implements(getattr(Tensor, f"{called}_"))(lambda func, x, y: "in place"),
    ]
    for register in reversed(rules) if in_place_first else rules:
        register()
    x = Box(torch.ones(2, dtype=torch.int64))
    assert getattr(x, f"__{name}__")(3).held.tolist() == [7, 7]
    assert getattr(x, f"__i{name}__")(3) == "in place"


# ---- what has no rule, and what a rule leaves alone ----------------------------------------------------------


@pytest.mark.parametrize("function", [torch.ones, torch.full, torch.arange, torch.randn])
def test_factories_ask_no_class(function):
    with pytest.raises(SpecError, match=f"torch never calls a rule for .*{function.__name__}"):
        fresh().implements(function)(answer("made"))


class Doubled(TensorSubclass, fallback="materialize"):
    held: Tensor = inner()

    def materialize(self):
        return self.held * 2


VIEWS = {
    "x[0]": (Tensor.__getitem__, lambda x: x[0]),
    "select": (Tensor.select, lambda x: x.select(0, 0)),
    "transpose": (torch.transpose, lambda x: x.transpose(0, 1)),
    "view": (Tensor.view, lambda x: x.view(-1)),
    "unflatten": (Tensor.unflatten, lambda x: x.unflatten(1, (1, 2))),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_without_its_rule_is_a_copy(name):
    function, call = VIEWS[name]
    gradients = []
    for ruled in (False, True):
        cls = type("Ruled", (Doubled,), {})
        if ruled:
            cls.implements(function)(lambda func, x, *args, cls=cls, **kw: cls.unruled(func, x, *args, **kw))
        held = torch.ones(3, 2, requires_grad=True)
        x = cls(held).clone()
        y = call(x)
        assert not y._is_view()
        y.mul_(5)
        x.sum().backward()
        gradients.append(held.grad)
    assert torch.equal(*gradients)


def test_unruled_takes_no_op_whose_rule_is_asked_for_below():
    with pytest.raises(SpecError, match=r"unruled takes the function before its arguments, got a Tensor"):
        TensorSubclass.unruled(torch.ones(2))
    with pytest.raises(SpecError, match=r"unruled takes a Python-level function.*aten\.add\.Tensor"):
        Doubled.unruled(aten.add.Tensor, Doubled(torch.ones(2)), 1)
    assert Doubled.unruled(aten.linear, torch.ones(1, 2), Doubled(torch.ones(1, 2))).tolist() == [[4.0]]


OPTIMIZERS = {
    "SGD": lambda p, **k: torch.optim.SGD([p], lr=0.1, momentum=0.5, weight_decay=0.1, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW([p], lr=0.1, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad([p], lr=0.1, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop([p], lr=0.1, **k),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rules_for_functions_leave_steps_of_optimizers_alone(optimizer, foreach):
    class Log(TensorSubclass, fallback="materialize", trainable=True):
        held: Tensor = inner()

        def materialize(self):
            return self.held.exp()

    for function in (torch.add, torch.mul, torch.addcdiv, torch.lerp, torch.sqrt):
        Log.implements(function)(lambda func, *args, **kwargs: Log(torch.full((4,), 100.0)))
    plain = torch.nn.Parameter(torch.linspace(-1, 1, 4))
    wrapped = torch.nn.Parameter(Log(torch.linspace(-1, 1, 4)))
    for p, value in ((plain, lambda: plain.exp()), (wrapped, lambda: wrapped.materialize())):
        step = OPTIMIZERS[optimizer](p, foreach=foreach)
        for _ in range(3):
            p.grad = None
            value().sum().backward()
            step.step()
    torch.testing.assert_close(wrapped.held, plain.detach())
    assert (Log(torch.zeros(4)) + 1).held.tolist() == [100.0] * 4


def test_copies_have_the_sizes_of_what_they_are_written_to():
    class Rows(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()
        count: int = dynamic()

        @staticmethod
        def outer(held, count):
            return Outer((count, held.shape[0]))

        def materialize(self):
            return self.held.expand(self.count, -1)

    x = Rows(torch.zeros(2), count=2)
    for y in (Rows(torch.ones(2), count=3), Rows(torch.ones(3), count=2)):
        with pytest.raises(
            DispatchError, match=r"cannot write a Rows into one of another size: expected .*2, 2"
        ):
            x.copy_(y)
    assert not x.held.any()
    assert x.copy_(Rows(torch.ones(2), count=2)) is x and x.held.all()


@pytest.mark.parametrize("backend", ["aot_eager", "desugar"])
def test_a_rule_that_is_registered_late_is_seen_by_what_was_compiled(backend):
    cls = type("Late", (Doubled,), {})
    options = {"options": {"backend": "eager"}} if backend == "desugar" else {}
    stock = torch.compile(lambda x: x + 0, backend=backend, **options)
    direct = desugar.compile(lambda x: x + 0, backend="eager")
    x = cls(torch.ones(2))
    assert stock(x).tolist() == direct(x).tolist() == [2.0, 2.0]
    cls.implements(torch.add)(lambda func, x, y: x.unwrap("held") * 100)
    assert stock(x).tolist() == direct(x).tolist() == (x + 0).tolist() == [100.0, 100.0]


# ---- rules for in-place functions --------------------------------------------------------------------------


def declare_written(rule):
    class Written(TensorSubclass, fallback="map"):
        v: Tensor = inner()

    @Written.implements(torch.mul)
    def _(func, x, y):
        return Written(x.unwrap("v") * y)

    Written.implements(torch.Tensor.mul_)(rule)
    return Written


def write_raw(func, x, y):
    x.v.mul_(y)
    return x


def assign(func, x, y):
    x.v = (x.v * y).detach()
    return x


@pytest.mark.parametrize("rule", [write_raw, assign])
def test_a_write_that_autograd_does_not_see_is_an_error(rule):
    cls = declare_written(rule)
    s, y = torch.ones(2, requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
    words = {write_raw: r"write_raw.*would be lost.*torch.ops.aten.mul_\)", assign: "a field is assigned"}
    with pytest.raises(DispatchError, match=words[rule]):
        (cls(s * 1) + 1).mul_(y)
    for operand in (y.detach(), 3.0):  # where autograd records nothing, it is right
        x = cls(torch.ones(2))
        assert x.mul_(operand) is x and torch.equal(x.v, torch.ones(2) * operand)
    with torch.no_grad():
        assert torch.equal(cls(s * 1).mul_(y).v, y)


def test_such_a_write_to_a_value_that_was_constructed_is_refused_before_it_is_made():
    s, y = torch.ones(2, requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
    x = declare_written(write_raw)(s * 1)
    with pytest.raises(RuntimeError, match="created in no_grad mode and is being modified inplace"):
        x.mul_(y)
    assert torch.equal(x.v, torch.ones(2))


def test_the_rule_for_the_op_that_the_error_advises():
    class Advised(TensorSubclass, fallback="map"):
        v: Tensor = inner()

    @Advised.implements(torch.mul)
    def _(func, x, y):
        return Advised(x.unwrap("v") * y)

    s, y = torch.ones(2, requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
    with pytest.raises(DispatchError, match=r"implements\(torch\.ops\.aten\.mul_\)"):
        Advised(s * 1).mul_(y)
    Advised.implements(aten.mul_)(write_raw)
    x = Advised(s * 1)
    x.mul_(y)
    (x.unwrap("v") * 1).sum().backward()
    assert torch.equal(s.grad, y.detach()) and torch.equal(y.grad, torch.ones(2))
