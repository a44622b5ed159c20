"""Messages to an author of a class: each names the class, the wrong value, and the code to write instead."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError, Outer, TensorSubclass, dynamic, inner, static
from subclasses.testing.errors import chain
from tests.subclasses.subjects import MODES, declare
from tests.tables import raising

aten = torch.ops.aten


Pair = declare(
    name="Pair",
    a=inner(),
    b=inner(),
    axis=static(default=0),
    count=dynamic(default=0),
    annotations={"axis": int},
    materialize=lambda self: self.a + self.b,
    keywords={"fallback": "materialize"},
)


Mapped = declare(name="Mapped", a=inner(), b=inner(), keywords={"fallback": "map"})
Alone = declare(name="Alone", a=inner())


def pair(cls=Pair):
    return cls(torch.ones(3, 4), torch.ones(3, 4))


Labelled = declare(
    name="Labelled",
    labels=inner(),
    classes=static(),
    length=dynamic(),
    tag=static(default=""),
    annotations={"classes": int, "tag": str},
    keywords={"fallback": "map"},
)


# ---- construction --------------------------------------------------------------------------------------------

T = torch.ones(2)
OF_PAIR = "Pair takes 2 inner tensors by position (a, b), "
OF_LABELLED = "Labelled takes 1 inner tensor by position (labels), "
MISSING = "Labelled is missing metadata without a default, "


test_metadata_is_told_to_go_by_keyword = raising(
    [
        (make, TypeError, f"^{re.escape(text)}$")
        for make, text in [
            (lambda: Pair(T, T, 3), f"{OF_PAIR}got 3; pass it by keyword: axis=3"),
            (lambda: Pair(T, T, 3, 4), f"{OF_PAIR}got 4; pass it by keyword: axis=3, count=4"),
            (lambda: Pair(T, T, T), f"{OF_PAIR}got 3; and by keyword axis, count"),
            (lambda: Pair(T, T, 1, 2, 3), f"{OF_PAIR}got 5; and by keyword axis, count"),
            (lambda: Labelled(T, 6, 7), f"{OF_LABELLED}got 3; pass it by keyword: classes=6, tag=7"),
            (lambda: Labelled(T, 6), f"{OF_LABELLED}got 2; pass it by keyword: classes=6"),
            (
                lambda: Labelled(T),
                f"{MISSING}'classes' and 'length'; pass it by keyword: classes=..., length=...",
            ),
            (lambda: Labelled(T, classes=6), f"{MISSING}'length'; pass it by keyword: length=..."),
        ]
    ]
)


@pytest.mark.parametrize("mode", MODES)
def test_required_metadata_by_keyword(mode):
    x = MODES[mode](lambda t: Labelled(t, classes=6, length=t.shape[0]) * 2)(torch.ones(3))
    assert (x.labels.tolist(), x.classes, x.length, x.tag) == ([2, 2, 2], 6, 3, "")
    assert str(inspect.signature(Labelled.__new__)) == "(_cls, labels, *_more, classes, tag='', length)"


WHOLE = {
    "stock": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
    "inside": lambda f: torch.compile(f, backend="desugar", fullgraph=True, options={"backend": "eager"}),
}
MADE = {
    "Tensor.__new__": (
        lambda cls, a: Tensor.__new__(cls, a),
        "a Made without fields, which the generated",
    ),
    "_make_subclass": (lambda cls, a: Tensor._make_subclass(cls, a), "without fields, which the generated"),
    "as_subclass": (lambda cls, a: a.as_subclass(cls), "without fields, which the generated"),
    "an inner tensor": (
        lambda cls, a: a,
        "a tensor of torch.float32 and shape (2,), expected a Made",
    ),
    "None": (lambda cls, a: None if a.numel() else a, "None, expected a Made"),
    "another class": (lambda cls, a: Alone(a), "expected a Made"),
}


test_a_constructor_that_does_not_end_with_the_generated_one = raising(
    {
        case: (
            lambda new=new: declare(Pair, __new__=new)(T),
            TypeError,
            rf"^Made\.__new__ returned .*{re.escape(words)}.*; "
            r"end it with `return super\(\)\.__new__\(cls, a, b\)`$",
        )
        for case, (new, words) in MADE.items()
    }
)


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
    for way in WHOLE.values():
        assert way(lambda t: Base(t) + 1)(torch.ones(2)).a.tolist() == [2, 2]


def test_a_constructor_of_an_heir_calls_the_generated_one():
    """Of a base without a constructor of its own, also with a field that the base has not."""
    Base = declare(low=inner(), high=inner(), keywords={"fallback": "map"})

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
    for way in WHOLE.values():
        assert way(lambda t: (Base(t, t) + 1).low + Checked(t, t, t).step)(t).tolist() == [3, 3]


def test_a_constructor_under_a_mode_returns_what_the_mode_does():
    class Counts(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return "made" if func.__name__ == "__new__" else func(*args, **(kwargs or {}))

    cls = declare(Alone, __new__=lambda cls, a: Alone.__new__(cls, a))
    with Counts():
        assert cls(torch.ones(2)) == "made"


def failing(error):
    def fails(*args):
        raise error

    return fails


test_an_init_or_a_rule_that_fails = raising(
    {
        "an init that passes on what only new takes": (
            lambda: declare(Alone, __init__=lambda self, a: super(type(self), self).__init__(a))(T),
            TypeError,
            r"write `super\(\)\.__init__\(\)`, or in place of __init__ a __new__ that ends with "
            r"`return super\(\)\.__new__\(cls, a\)`",
        ),
        "an error of an init": (
            lambda: declare(Alone, __init__=failing(TypeError("not two")))(T),
            TypeError,
            r"\Anot two\Z",
        ),
        "an error of a mapped op": (
            lambda: pair(Mapped) + torch.ones(5),
            RuntimeError,
            r"\AThe size of tensor a \(4\) must match",
        ),
        "an error of a rule of a mapped class": (
            lambda: (
                -declare(Mapped, rules={aten.neg.default: failing(RuntimeError("no sign here"))})(
                    torch.ones(3, 4), torch.ones(5)
                )
            ),
            RuntimeError,
            r"\Ano sign here\Z",
        ),
        "more than a class without metadata takes": (
            lambda: Mapped(T, T, 3),
            TypeError,
            "takes 3 positional arguments but 4 were given",
        ),
    }
)


def test_a_class_without_a_constructor_of_its_own_has_the_generated_one():
    assert inspect.unwrap(Pair.__new__) is Pair._new and "__init__" not in vars(Pair)
    assert "_more" not in Mapped.__source__


# ---- arguments of rules --------------------------------------------------------------------------------------


def add(func, x, y):
    return Tally(func(x.total, y.total), func(x.count, y.count))


Tally = declare(
    name="Tally",
    total=inner(),
    count=inner(),
    rules={
        aten.add.Tensor: add,
        torch.maximum: lambda func, x, y: Tally(func(x.unwrap("total"), y.total), x.count),
        aten.neg.default: lambda func, x: x.missing,
    },
)


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
    assert caught.value.code == "inner-size"
    assert str(caught.value).startswith(f"{op} on a Mapped of size (3, 4), ")
    assert "'b' of size (5,)" in str(caught.value)
    assert f"@Mapped.implements(torch.ops.{op})" in caught.value.hint
    assert torch.equal(x.a, torch.ones(3, 4))


# ---- derivatives ---------------------------------------------------------------------------------------------


Viewed = declare(
    name="Viewed",
    a=inner(),
    keywords={"fallback": "views"},
    rules={torch.sum: lambda func, x, *args, **kwargs: func(x.unwrap("a"), *args, **kwargs)},
)


def test_the_rule_that_the_message_asks_for_is_enough():
    def total(func, x, dim, keepdim=False, dtype=None):
        return cls(func(x.a, dim, keepdim, dtype=dtype))

    cls = declare(Viewed, rules={aten.sum.dim_IntList: total})
    leaf = torch.ones(1, 4, requires_grad=True)
    (cls(leaf).expand(3, 4).unwrap("a") * torch.arange(3.0)[:, None]).sum().backward()
    assert torch.equal(leaf.grad, torch.full((1, 4), 3.0))


# ---- random fills --------------------------------------------------------------------------------------------


Factored = declare(
    name="Factored",
    signs=inner(dtype=torch.int8),
    left=inner(),
    right=inner(differentiable=True),
    outer=staticmethod(lambda signs, left, right: Outer(signs.shape, dtype=left.dtype)),
    materialize=lambda self: self.signs * (self.left @ self.right),
    keywords={"fallback": "materialize", "trainable": True},
)


def factored(cls=Factored):
    signs = torch.ones(4, 5, dtype=torch.int8)
    return torch.nn.Parameter(cls(signs, torch.zeros(4, 3), torch.zeros(3, 5)))


INITIALIZERS = (
    "normal_ uniform_ xavier_normal_ xavier_uniform_ kaiming_normal_ kaiming_uniform_ trunc_normal_".split()
)


@pytest.mark.parametrize("name", [*INITIALIZERS, "eye_", "orthogonal_"])
def test_a_fill_is_told_of_the_inner_tensors(name):
    x = factored()
    with pytest.raises(DispatchError) as caught:
        getattr(torch.nn.init, name)(x)
    by_pattern = name in ("eye_", "orthogonal_")
    fill = name if by_pattern else "uniform_" if "uniform" in name else "normal_"
    lines = f"as in torch.nn.init.{fill}(x.left) and torch.nn.init.{fill}(x.right)"
    assert lines in caught.value.hint
    assert caught.value.code == ("write-misfit" if name == "orthogonal_" else "write-refused")
    if by_pattern:
        return
    assert "under torch.no_grad()" in caught.value.hint
    assert f"@Factored.implements(torch.ops.aten.{fill}.default)" in caught.value.hint
    assert "dropout" not in str(caught.value)
    with torch.no_grad():  # runs the advised lines
        for t in (x.left, x.right):
            getattr(torch.nn.init, fill)(t)
    assert x.materialize().count_nonzero() == 20


@pytest.mark.parametrize("name", INITIALIZERS[:-1])
def test_the_rule_for_a_random_fill_is_enough(name):
    def fill(func, x, *args, **kwargs):
        for t in (x.left, x.right):
            func(t, *args, **kwargs)
        return x

    x = factored(declare(Factored, rules=dict.fromkeys((aten.normal_.default, aten.uniform_.default), fill)))
    assert getattr(torch.nn.init, name)(x) is x
    assert x.materialize().count_nonzero() == 20


# ---- calls that are refused with advice ----------------------------------------------------------------------

INTS = declare(
    held=inner(dtype=torch.int8),
    materialize=lambda self: self.held * 1,
    keywords={"fallback": "materialize"},
)


def wrapping(wrap):
    return declare(Pair, name="Wrapping", wrap_cotangent=wrap, keywords={"trainable": True})


def backward(x):
    x.exp().sum().backward()


def returning(result):
    """Calls a rule with such a result."""
    return lambda: pair(
        declare(Pair, name="Ruled", rules={aten.abs.default: lambda func, x: result(x)})
    ).abs()


def wrapped(wrap, is_parameter):
    x = wrapping(wrap)(torch.ones(3, requires_grad=not is_parameter), torch.ones(3))
    return backward(torch.nn.Parameter(x) if is_parameter else x)


def adding(func, x, y, alpha=1):
    return func(*(t.materialize() if isinstance(t, Pair) else t for t in (x, y)), alpha=alpha)


def step():
    """Of an optimizer that cannot write to its Parameter."""
    weight = torch.nn.Parameter(pair(declare(Pair, rules={aten.add.Tensor: adding})))
    weight.grad = torch.ones(3, 4)
    torch.optim.SGD([weight], lr=0.1, foreach=False).step()


# A call, the code of its error, a pattern.
REFUSED = {
    "a number as a result": (
        returning(lambda x: 1.5),
        "rule-result",
        r"^(?=.*leave out \.item\(\))(?=.*return torch\.tensor\(1\.5\))(?=.*x\.a)"
        r"aten\.abs\.default on a Ruled.*returned a float",
    ),
    "inner tensors as a result": (
        returning(lambda x: (x.a, x.b)),
        "rule-result",
        r"aten\.abs\.default on a Ruled.*returned a tuple of 2.*a value made of them, Ruled\(a, b\)",
    ),
    "a text as a result": (
        returning(lambda x: "text"),
        "rule-result",
        r"aten\.abs\.default on a Ruled.*returned a str.*or with `return NotImplemented`",
    ),
    "a step of an optimizer": (
        step,
        "write-misfit",
        r"aten\.add_\.Tensor: cannot write a plain.*trainable=True",
    ),
    "a write to a plain tensor, where trainable would not help": (
        lambda: torch.zeros(2).add_(Alone(T)),
        "no-rule",
        r"(?s)^(?!.*trainable).*Alone has no rule for aten\.add_\.Tensor\(Tensor\[2\], Alone\[2\]\)",
    ),
    "an op outside of a derivative": (lambda: Alone(T).sum(), "no-rule", r"(?s)^(?!.*autograd)"),
    **{
        f"{got} as a wrapped cotangent{' of a Parameter' * is_parameter}": (
            lambda wrap=wrap, is_parameter=is_parameter: wrapped(wrap, is_parameter),
            "cotangent-wrapped",
            rf"^Wrapping\.wrap_cotangent: expected a Wrapping .*got {got}; .*Wrapping\(a, b\)",
        )
        for wrap, got in ((lambda self, g: g, "a Tensor"), (lambda self, g: None, "a NoneType"))
        for is_parameter in (False, True)
    },
    "a random fill that no initializer has": (
        lambda: factored().detach().exponential_(),
        "write-refused",
        r"as in x\.left\.exponential_\(\.\.\.\) and x\.right\.exponential_\(",
    ),
    "a random fill of integers": (
        lambda: INTS(torch.ones(2, dtype=torch.int8)).random_(),
        "write-refused",
        r"lost; add a rule that fills them.*aten\.random_\.default\)",
    ),
    "dropout": (
        lambda: torch.nn.functional.dropout(pair()),
        "write-refused",
        r"F\.dropout.*call it on x\.materialize\(\).*implements\(torch\.dropout\)",
    ),
    "a write to a value": (lambda: Alone(T).add_(torch.zeros(2)), "no-rule", "trainable=True"),
    "a wrapped cotangent of another size of a parameter": (
        lambda: backward(
            torch.nn.Parameter(
                wrapping(lambda self, g: type(self)(g[:1], g[:1]))(torch.ones(3), torch.ones(3))
            )
        ),
        "cotangent-wrapped",
        r"expected a derivative of size \(3,\) by a, got one of size \(1,\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_names_another(case):
    call, code, words = REFUSED[case]
    with pytest.raises(DispatchError, match=words) as caught:
        call()
    assert caught.value.code == code


# ---- a dtype without gradients -------------------------------------------------------------------------------


Tagged = declare(
    name="Tagged",
    ids=inner(dtype=torch.int64),
    score=inner(differentiable=True),
    keywords={"fallback": "views"},
)


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

    mended = declare(Tagged, keywords={"dtype_from": "score"})
    (g,) = torch.autograd.grad(mended(torch.arange(3), score * 2).score.sum(), score)
    assert g.tolist() == [2, 2, 2]


raw = torch.ones(2)  # named as the field below
gain = torch.ones(2)


def test_the_tensor_from_outside_is_named_and_no_field():
    cls = declare(raw=inner(), materialize=lambda self: self.raw * gain, keywords={"fallback": "materialize"})
    with pytest.raises(Exception, match=r"computes with a tensor from outside of the class") as caught:
        torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(cls(torch.ones(2)))
    assert any(getattr(error, "code", None) == "tensor-from-outside" for error in chain(caught.value))


def test_a_rule_without_func():
    cls = declare(rules={torch.mean: lambda x, dim=None, keepdim=False: x.unwrap("held").mean(dim)})
    with pytest.raises(AttributeError) as caught:
        cls(torch.ones(2)).mean(0)
    assert "write `def rule(func, x, ...)`" in "".join(caught.value.__notes__)
