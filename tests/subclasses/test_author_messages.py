"""Messages to an author of a class: each names the class, what came, and what to write instead."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError, Outer, TensorSubclass, dynamic, inner, static
from tests.subclasses.subjects import MODES

aten = torch.ops.aten


class Pair(TensorSubclass, fallback="materialize"):
    a: Tensor = inner()
    b: Tensor = inner()
    axis: int = static(default=0)
    count: int = dynamic(default=0)

    def materialize(self):
        return self.a + self.b


class Mapped(TensorSubclass, fallback="map"):
    a: Tensor = inner()
    b: Tensor = inner()


class Alone(TensorSubclass):
    a: Tensor = inner()


def pair():
    return Pair(torch.ones(3, 4), torch.ones(3, 4))


# ---- construction --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "mend"),
    [
        ((3,), "got 3; pass it by keyword: axis=3"),
        ((3, 4), "got 4; pass it by keyword: axis=3, count=4"),
        ((torch.ones(2),), "got 3; and by keyword axis, count"),
        ((1, 2, 3), "got 5; and by keyword axis, count"),
    ],
)
def test_metadata_by_position_is_told_to_go_by_keyword(more, mend):
    with pytest.raises(TypeError) as caught:
        Pair(torch.ones(2), torch.ones(2), *more)
    assert str(caught.value) == f"Pair takes 2 inner tensors by position (a, b), {mend}"


class Labelled(TensorSubclass, fallback="map"):
    labels: Tensor = inner()
    classes: int = static()
    length: int = dynamic()
    tag: str = static(default="")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda t: Labelled(t, 6, 7),
            "Labelled takes 1 inner tensor by position (labels), got 3; pass it by keyword: classes=6, tag=7",
        ),
        (
            lambda t: Labelled(t, 6),
            "Labelled takes 1 inner tensor by position (labels), got 2; pass it by keyword: classes=6",
        ),
        (
            lambda t: Labelled(t),
            "Labelled is missing metadata without a default, 'classes' and 'length'; pass it by keyword: classes=..., "
            "length=...",
        ),
        (
            lambda t: Labelled(t, classes=6),
            "Labelled is missing metadata without a default, 'length'; pass it by keyword: length=...",
        ),
    ],
)
def test_required_metadata_is_told_to_go_by_keyword(make, text):
    with pytest.raises(TypeError) as caught:
        make(torch.ones(2))
    assert str(caught.value) == text


@pytest.mark.parametrize("mode", MODES)
def test_required_metadata_by_keyword(mode):
    x = MODES[mode](lambda t: Labelled(t, classes=6, length=t.shape[0]) * 2)(torch.ones(3))
    assert (x.labels.tolist(), x.classes, x.length, x.tag) == ([2, 2, 2], 6, 3, "")
    assert str(inspect.signature(Labelled.__new__)) == "(_cls, labels, *_more, classes, tag='', length)"


def test_a_class_without_metadata_has_python_s_own_message():
    assert "_more" not in Mapped.__source__
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        Mapped(torch.ones(2), torch.ones(2), 3)


MADE = {
    "Tensor.__new__": (
        lambda cls, a: Tensor.__new__(cls, a),
        "returned a Made without fields, which the generated",
    ),
    "_make_subclass": (lambda cls, a: Tensor._make_subclass(cls, a), "without fields, which the generated"),
    "as_subclass": (lambda cls, a: a.as_subclass(cls), "without fields, which the generated"),
    "an inner tensor": (
        lambda cls, a: a,
        "returned a tensor of torch.float32 and shape (2,), expected a Made",
    ),
    "None": (lambda cls, a: None if a.numel() else a, "returned None, expected a Made"),
    "another class": (lambda cls, a: Alone(a), "expected a Made"),
}


@pytest.mark.parametrize("case", MADE)
def test_a_constructor_that_does_not_end_with_the_generated_one(case):
    new, words = MADE[case]
    cls = type("Made", (Pair,), {"__new__": new})
    with pytest.raises(TypeError) as caught:
        cls(torch.ones(2))
    assert str(caught.value).startswith("Made.__new__ returned ") and words in str(caught.value)
    assert str(caught.value).endswith("; end it with `return super().__new__(cls, a, b)`")


def test_a_constructor_may_return_what_inherits_or_exists():
    class Base(TensorSubclass, fallback="map"):
        a: Tensor = inner()

        def __new__(cls, a):
            return a if isinstance(a, cls) else super().__new__(Derived if a.ndim == 2 else cls, a)

    class Derived(Base):
        def __new__(cls, a):
            return super().__new__(cls, a)

    x = Base(torch.ones(2))
    assert (
        Base(x) is x and type(Base(torch.ones(2, 2))) is Derived and type(Derived(torch.ones(2))) is Derived
    )
    for compiler in ("aot_eager", "desugar"):
        torch.compiler.reset()
        options = {"options": {"backend": "eager"}} if compiler == "desugar" else {}
        run = torch.compile(lambda t: Base(t) + 1, backend=compiler, fullgraph=True, **options)
        assert run(torch.ones(2)).a.tolist() == [2, 2]


def test_a_constructor_of_an_heir_calls_the_generated_one():
    """Of a base without a constructor of its own, also with a field that the base has not."""

    class Base(TensorSubclass, fallback="map"):
        low: Tensor = inner()
        high: Tensor = inner()

    class Checked(Base, fallback="map"):
        step: Tensor = inner()
        unit: str = static(default="m")

        def __new__(cls, low, high, step, **metadata):
            if low.shape != high.shape:
                raise ValueError("one shape")
            return super().__new__(cls, low, high, step, **metadata)

    class Same(Checked):
        def __new__(cls, low, unit):
            return super().__new__(cls, low, low, low, unit=unit)

    t = torch.ones(2)
    x, y = Checked(t, t * 2, t * 3, unit="k"), Same(t, "q")
    assert type(x) is Checked and (x.step.tolist(), x.unit) == ([3, 3], "k")
    assert type(x * 2) is Checked and (x * 2).unit == "k"
    assert type(y) is Same and y.unit == "q" and type(y[:1]) is Same
    with pytest.raises(ValueError, match="one shape"):
        Checked(t, torch.ones(3), t)
    assert type(Base(t, t)) is Base and list(inspect.signature(Base).parameters) == ["low", "high"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'high'"):
        Base(t)
    for compiler in ("aot_eager", "desugar"):
        torch.compiler.reset()
        options = {"options": {"backend": "eager"}} if compiler == "desugar" else {}
        run = torch.compile(
            lambda t: (Base(t, t) + 1).low + Checked(t, t, t).step,
            backend=compiler,
            fullgraph=True,
            **options,
        )
        assert run(t).tolist() == [3, 3]


def test_a_constructor_under_a_mode_returns_what_the_mode_does():
    class Counts(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return "made" if func.__name__ == "__new__" else func(*args, **(kwargs or {}))

    cls = type("Made", (Alone,), {"__new__": lambda cls, a: Alone.__new__(cls, a)})
    with Counts():
        assert cls(torch.ones(2)) == "made"


def test_an_init_that_passes_on_what_only_new_takes():
    def passes_on(self, a):
        super(cls, self).__init__(a)

    cls = type("Made", (Alone,), {"__init__": passes_on})
    with pytest.raises(TypeError) as caught:
        cls(torch.ones(2))
    assert (
        "write `super().__init__()`, or in place of __init__ a __new__ that ends with `return super().__new__(cls, a)`"
        in str(caught.value)
    )

    def fails(self, a):
        raise TypeError("not two")

    with pytest.raises(TypeError, match=r"\Anot two\Z"):
        type("Made", (Alone,), {"__init__": fails})(torch.ones(2))


def test_a_class_without_a_constructor_of_its_own_has_the_generated_one():
    assert inspect.unwrap(Pair.__new__) is Pair._new and "__init__" not in vars(Pair)


# ---- what rules return ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda func, x: 1.5, ["returned a float", "leave out .item()", "return torch.tensor(1.5)", "x.a"]),
        (lambda func, x: (x.a, x.b), ["returned a tuple of 2", "a value made of them, Ruled(a, b)"]),
        (lambda func, x: "text", ["returned a str", "or with `return NotImplemented`"]),
    ],
)
def test_what_is_no_tensor_is_told_what_to_return(rule, words):
    cls = type("Ruled", (Pair,), {})
    cls.implements(aten.abs.default)(rule)
    with pytest.raises(DispatchError) as caught:
        cls(torch.ones(2), torch.ones(2)).abs()
    assert all(word in str(caught.value) for word in ["aten.abs.default on a Ruled", *words]), caught.value


# ---- what rules are called with ------------------------------------------------------------------------------


class Tally(TensorSubclass):
    total: Tensor = inner()
    count: Tensor = inner()


@Tally.implements(aten.add.Tensor)
def add(func, x, y):
    return Tally(func(x.total, y.total), func(x.count, y.count))


@Tally.implements(torch.maximum)
def maximum(func, x, y):
    return Tally(func(x.unwrap("total"), y.total), x.count)


@Tally.implements(aten.neg.default)
def neg(func, x):
    return x.missing


@pytest.mark.parametrize(
    ("run", "op", "kind"),
    [
        (lambda x: x + 1, "aten.add.Tensor", "an int"),
        (lambda x: 2.5 + x, "aten.add.Tensor", "a float"),
        (lambda x: torch.ones(2) + x, "aten.add.Tensor", "a Tensor"),
        (lambda x: torch.maximum(x, torch.ones(2)), "torch.maximum", "a Tensor"),
    ],
)
def test_a_rule_that_reads_a_field_of_another_operand(run, op, kind):
    with pytest.raises(AttributeError, match="has no attribute 'total'") as caught:
        run(Tally(torch.ones(2), torch.ones(2)))
    (note,) = caught.value.__notes__
    assert note.startswith(f"{op} on a Tally: the rule ") and f"read .total of {kind}. An operand" in note
    assert note.endswith("test isinstance(y, Tally) first")


def test_another_attribute_error_of_a_rule_has_no_note():
    with pytest.raises(AttributeError, match="'Tally' object has no attribute 'missing'") as caught:
        -Tally(torch.ones(2), torch.ones(2))
    assert not hasattr(caught.value, "__notes__")


# ---- mapped ops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda x: x + torch.ones(3, 4), "aten.add.Tensor"),
        (lambda x: x[:, 1], "aten.select.int"),
        (lambda x: x.sum(1), "aten.sum.dim_IntList"),
        (lambda x: torch.cat([x, x], 1), "aten.cat.default"),
        (lambda x: x.add_(torch.ones(3, 4)), "aten.add_.Tensor"),
    ],
)
def test_a_mapped_op_names_the_inner_tensor_of_another_size(run, op):
    x = Mapped(torch.ones(3, 4), torch.ones(5))
    with pytest.raises(DispatchError) as caught:
        run(x)
    text = str(caught.value)
    assert text.startswith(
        f"{op} on a Mapped of size (3, 4), mapped over its inner tensors, of which 'b' of size (5,)"
    )
    assert text.endswith(
        f"give each the size of the value, or write a rule: @Mapped.implements(torch.ops.{op})"
    )
    assert torch.equal(x.a, torch.ones(3, 4))


def test_a_mapped_op_on_inner_tensors_of_one_size_raises_what_the_op_raises():
    with pytest.raises(RuntimeError) as caught:
        Mapped(torch.ones(3, 4), torch.ones(3, 4)) + torch.ones(5)
    assert str(caught.value).startswith("The size of tensor a (4) must match")


def test_an_error_of_a_rule_of_a_mapped_class_stays_as_it_is():
    cls = type("Refusing", (Mapped,), {})

    @cls.implements(aten.neg.default)
    def _(func, x):
        raise RuntimeError("no sign here")

    with pytest.raises(RuntimeError, match=r"\Ano sign here\Z"):
        -cls(torch.ones(3, 4), torch.ones(5))


# ---- derivatives ---------------------------------------------------------------------------------------------


class Viewed(TensorSubclass, fallback="views"):
    a: Tensor = inner()


@Viewed.implements(torch.sum)
def _(func, x, *args, **kwargs):
    return func(x.unwrap("a"), *args, **kwargs)


@pytest.mark.parametrize(
    ("view", "op"),
    [
        (lambda x: x.unbind()[0], "aten.stack.default"),
    ],
)
def test_an_op_that_a_derivative_needs_says_who_asks_for_it(view, op):
    leaf = torch.ones(1, 4, requires_grad=True)
    with pytest.raises(DispatchError) as caught:
        view(Viewed(leaf)).unwrap("a").sum().backward()
    assert f"add one with @Viewed.implements(torch.ops.{op}); autograd asks for it in a derivative" in str(
        caught.value
    )
    assert "a rule for a function, such as torch.sum, is not asked there" in str(caught.value)


def test_the_rule_that_the_message_asks_for_is_enough():
    cls = type("Summed", (Viewed,), {})

    @cls.implements(aten.sum.dim_IntList)
    def _(func, x, dim, keepdim=False, dtype=None):
        return cls(func(x.a, dim, keepdim, dtype=dtype))

    leaf = torch.ones(1, 4, requires_grad=True)
    (cls(leaf).expand(3, 4).unwrap("a") * torch.arange(3.0)[:, None]).sum().backward()
    assert torch.equal(leaf.grad, torch.full((1, 4), 3.0))


def test_an_op_outside_of_a_derivative_does_not_speak_of_autograd():
    with pytest.raises(DispatchError) as caught:
        Alone(torch.ones(2)).sum()
    assert "autograd" not in str(caught.value)


# ---- optimizers ----------------------------------------------------------------------------------------------


def test_a_parameter_that_an_optimizer_cannot_write_to_is_told_of_trainable():
    cls = type("Sum", (Pair,), {})

    @cls.implements(aten.add.Tensor)
    def _(func, x, y, alpha=1):
        x, y = (t.materialize() if isinstance(t, Pair) else t for t in (x, y))
        return func(x, y, alpha=alpha)

    weight = torch.nn.Parameter(cls(torch.ones(3), torch.ones(3)))
    weight.grad = torch.ones(3)
    with pytest.raises(
        DispatchError, match=r"aten\.add_\.Tensor: cannot write a plain.* declared with trainable=True"
    ):
        torch.optim.SGD([weight], lr=0.1, foreach=False).step()


# ---- random fills --------------------------------------------------------------------------------------------


class Factored(TensorSubclass, fallback="materialize", trainable=True):
    signs: Tensor = inner(dtype=torch.int8)
    left: Tensor = inner()
    right: Tensor = inner(differentiable=True)

    @staticmethod
    def outer(signs, left, right):
        return Outer(signs.shape, dtype=left.dtype)

    def materialize(self):
        return self.signs * (self.left @ self.right)


def factored(cls=Factored):
    signs = torch.ones(4, 5, dtype=torch.int8)
    return torch.nn.Parameter(cls(signs, torch.zeros(4, 3), torch.zeros(3, 5)))


INITIALIZERS = (
    "normal_ uniform_ xavier_normal_ xavier_uniform_ kaiming_normal_ kaiming_uniform_ trunc_normal_".split()
)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_a_random_fill_is_told_of_the_inner_tensors(name):
    x = factored()
    with pytest.raises(DispatchError) as caught:
        getattr(torch.nn.init, name)(x)
    fill = "uniform_" if "uniform" in name else "normal_"
    lines = f"torch.nn.init.{fill}(x.left) and torch.nn.init.{fill}(x.right)"
    assert f"fill its inner tensors under torch.no_grad(), as in {lines}, or add a rule" in str(caught.value)
    assert f"@Factored.implements(torch.ops.aten.{fill}.default)" in str(caught.value)
    assert "dropout" not in str(caught.value)
    with torch.no_grad():  # what the lines say
        for t in (x.left, x.right):
            getattr(torch.nn.init, fill)(t)
    assert x.materialize().count_nonzero() == 20


def test_an_optimizer_is_not_spoken_of_where_the_target_is_plain():
    class Box(TensorSubclass):
        held: Tensor = inner()

    x, plain = Box(torch.ones(3)), torch.zeros(3)
    with pytest.raises(DispatchError, match="trainable=True"):
        x.add_(plain)
    with pytest.raises(
        DispatchError, match=r"Box has no rule for aten.add_.Tensor\(Tensor\[3\], Box\[3\]\)"
    ) as caught:
        plain.add_(x)
    assert "trainable" not in str(caught.value)


@pytest.mark.parametrize("name", ["eye_", "orthogonal_"])
def test_a_fill_by_a_pattern_is_told_of_the_inner_tensors(name):
    x = factored()
    with pytest.raises(DispatchError) as caught:
        getattr(torch.nn.init, name)(x)
    assert f"as in torch.nn.init.{name}(x.left) and torch.nn.init.{name}(x.right)" in str(caught.value)


@pytest.mark.parametrize("name", INITIALIZERS[:-1])
def test_the_rule_for_a_random_fill_is_enough(name):
    cls = type("Filled", (Factored,), {})

    @cls.implements(aten.normal_.default, aten.uniform_.default)
    def _(func, x, *args, **kwargs):
        for t in (x.left, x.right):
            func(t, *args, **kwargs)
        return x

    x = factored(cls)
    assert getattr(torch.nn.init, name)(x) is x
    assert x.materialize().count_nonzero() == 20


def test_a_random_fill_that_no_initializer_has_and_a_class_of_integers():
    with pytest.raises(
        DispatchError, match=r"as in x\.left\.exponential_\(\.\.\.\) and x\.right\.exponential_\("
    ):
        factored().detach().exponential_()

    class Ints(TensorSubclass, fallback="materialize"):
        held: Tensor = inner(dtype=torch.int8)

        def materialize(self):
            return self.held * 1

    with pytest.raises(DispatchError, match=r"lost; add a rule that fills them.*aten\.random_\.default\)"):
        Ints(torch.ones(2, dtype=torch.int8)).random_()


def test_dropout_keeps_its_advice():
    with pytest.raises(
        DispatchError, match=r"F\.dropout.*call it on x\.materialize\(\).*implements\(torch\.dropout\)"
    ):
        torch.nn.functional.dropout(pair())


# ---- wrap_cotangent ------------------------------------------------------------------------------------------


def make_wrapping(wrap):
    return type("Wrapping", (Pair,), {"wrap_cotangent": wrap}, trainable=True)


@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize(
    ("wrap", "got"), [(lambda self, g: g, "a Tensor"), (lambda self, g: None, "a NoneType")]
)
def test_a_wrapped_cotangent_that_is_plain(wrap, got, is_parameter):
    cls = make_wrapping(wrap)
    x = cls(torch.ones(3, requires_grad=not is_parameter), torch.ones(3))
    x = torch.nn.Parameter(x) if is_parameter else x
    with pytest.raises(DispatchError) as caught:
        x.exp().sum().backward()
    assert str(caught.value) == (
        f"Wrapping.wrap_cotangent: expected a Wrapping with the derivatives by each inner tensor, got {got}; return "
        f"Wrapping(a, b) of those"
    )


def test_a_wrapped_cotangent_of_another_size_of_a_parameter():
    x = torch.nn.Parameter(
        make_wrapping(lambda self, g: type(self)(g[:1], g[:1]))(torch.ones(3), torch.ones(3))
    )
    with pytest.raises(
        DispatchError, match=r"expected a derivative of size \(3,\) by a, got one of size \(1,\)"
    ):
        x.exp().sum().backward()


# ---- a dtype without gradients -------------------------------------------------------------------------------


class Tagged(TensorSubclass, fallback="views"):
    ids: Tensor = inner(dtype=torch.int64)
    score: Tensor = inner(differentiable=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_value_of_integers_around_a_tensor_that_requires_grad(mode):
    score = torch.rand(3, requires_grad=True)
    make = MODES[mode](lambda ids, score: Tagged(ids, score * 2).score * 1)
    with pytest.raises(
        Exception, match=r"Tagged: score requires grad, and the value shows torch.int64.*dtype_from='score'"
    ):
        make(torch.arange(3), score)
    make(torch.arange(3), score.detach())
    with torch.no_grad():
        make(torch.arange(3), score)

    class Mended(Tagged, dtype_from="score"):
        pass

    (g,) = torch.autograd.grad(Mended(torch.arange(3), score * 2).score.sum(), score)
    assert g.tolist() == [2, 2, 2]


raw = torch.ones(2)  # named as the field below
gain = torch.ones(2)


def test_the_tensor_from_outside_is_named_and_no_field():
    class Gained(TensorSubclass, fallback="materialize"):
        raw: Tensor = inner()

        def materialize(self):
            return self.raw * gain

    with pytest.raises(Exception, match=r"computes with the tensor gain from outside of the class"):
        torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(Gained(torch.ones(2)))


def test_a_rule_without_func():
    class Held(TensorSubclass):
        held: Tensor = inner()

    Held.implements(torch.mean)(lambda x, dim=None, keepdim=False: x.unwrap("held").mean(dim))
    with pytest.raises(AttributeError) as caught:
        Held(torch.ones(2)).mean(0)
    assert "write `def rule(func, x, ...)`" in "".join(caught.value.__notes__)
