"""Methods that an author's class body overrides: one that calls the generated one, an outer size, a joining rule."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from subclasses import Outer, SpecError, TensorSubclass, arithmetic, inner, static
from tests.doors import COMPILED as COMPILERS
from tests.subclasses.subjects import MODES, declare
from tests.tables import giving, raising

aten = torch.ops.aten


def plus_one(func, x):
    return type(x)(x.held + 1, **({"tag": x.tag} if isinstance(x, Counting) else {}))


Base = declare(keywords={"fallback": "map"}, rules={aten.sin.default: plus_one})


class Counting(Base):
    tag: str = static(default="none")
    met: ClassVar[list[str]] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.met.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Logged(TensorSubclass, fallback="map"):
    held: Tensor = inner()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@pytest.mark.parametrize("cls", [Counting, declare(Logged, tag=static(default="none"))])
def test_dispatch_may_be_wrapped(cls):
    x = cls(torch.ones(2), tag="q")
    for result in (x + 1, x.clone(), x[:1], torch.zeros_like(x), x.sin() if cls is Counting else x):
        assert type(result) is cls and result.tag == "q"
    assert (x + 1).held.tolist() == [2, 2] and type(Logged(torch.ones(2)) + 1) is Logged
    leaf = torch.ones(2, requires_grad=True)
    (cls(leaf, tag="q") * 3).unwrap("held").sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [3, 3]
    for compiler in COMPILERS.values():
        out = compiler(lambda x: x * 2)(x)
        assert type(out) is cls and out.tag == "q" and out.held.tolist() == [2, 2]


def test_the_wrapped_dispatch_is_called():
    Counting.met.clear()
    (Counting(torch.ones(2)) + 1).sin()
    assert Counting.met == ["aten.add.Tensor", "aten.sin.default"]


# ---- __torch_function__ --------------------------------------------------------------------------------------


# Has no rule until a class that inherits from it calls `super().__torch_function__`.
Plain = declare(keywords={"fallback": "materialize"}, materialize=lambda self: self.held * 2)


class Traced(Plain):
    met: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.met.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


class TracedOfPlain(Plain):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


for _cls in (Traced, TracedOfPlain):
    _cls.implements(torch.trace)(lambda func, x: x.unwrap("held").trace() + 100)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cls", [Traced, declare(Traced), TracedOfPlain])
@pytest.mark.parametrize("mode", MODES)
def test_rules_are_asked_through_an_own_torch_function(cls, mode):
    leaf = torch.ones(2, 2, requires_grad=True)
    traced, moved = MODES[mode](lambda x: (torch.trace(x) * x.shape[0], x.t() + 1))(cls(leaf))
    assert traced.item() == 204 and moved.tolist() == [[3, 3], [3, 3]]
    traced.backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [[2, 0], [0, 2]]


def test_an_own_torch_function_is_called_and_may_pass_on_none():
    Traced.met.clear()
    x = Traced(torch.ones(2, 2))
    assert torch.trace(x).item() == 102 and x.shape == (2, 2)
    assert Traced.met == ["trace", "__get__"]
    assert repr(x).startswith("Traced(held=")
    assert COMPILERS["desugar"](lambda x: x.requires_grad)(Traced(torch.ones(2))) is False


class Silent(TensorSubclass, fallback="map"):
    held: Tensor = inner()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def call_generated(cls, *given):
    return super(Indirect, cls).__torch_function__(*given)


class Indirect(TensorSubclass, fallback="map"):
    held: Tensor = inner()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return call_generated(cls, func, types, args, kwargs or {})


Disabled = declare(
    name="Disabled",
    held=inner(),
    __torch_function__=torch._C._disabled_torch_function_impl,
    keywords={"fallback": "map"},
)


@pytest.mark.parametrize("cls", [Silent, type("Child", (Silent,), {}), Indirect, Disabled])
@pytest.mark.parametrize("key", [torch.trace, aten.linear.default, aten.cos.default])
def test_a_rule_that_an_own_torch_function_never_asks_for_is_refused(cls, key):
    with pytest.raises(SpecError) as caught:
        cls.implements(key)(lambda func, *args: args[0])
    text = str(caught.value)
    assert text.startswith(f"{cls.__name__}.implements: torch never calls a rule for ")
    assert "return super().__torch_function__(func, types, args, kwargs)`, or remove it" in text
    assert not cls._has_function_rules


class Runs(TensorSubclass, fallback="map"):
    held: Tensor = inner()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(a.held if isinstance(a, cls) else a for a in args), **(kwargs or {}))


test_a_rule_that_an_own_torch_dispatch_never_asks_for_is_refused = raising(
    [
        (
            lambda key=key: Runs.implements(key)(lambda func, *args: args[0]),
            SpecError,
            r"Runs defines __torch_dispatch__ .*`return super\(\)\.__torch_dispatch__",
        )
        for key in (aten.cos.default, aten.cos, torch.Tag.pointwise, arithmetic)
    ]
)
TRACED = declare(Runs, rules={torch.trace: lambda func, x: x.unwrap("held").trace() + 1})
test_rules_beside_an_own_hook = giving(
    {
        "for a function, beside __torch_dispatch__": (
            lambda: torch.trace(TRACED(torch.ones(2, 2))).item(),
            3,
        ),
    }
)


def hook(self, func, types, args=(), kwargs=None): ...


test_a_hook_that_is_no_classmethod_is_refused = raising(
    {
        f"{name}, {where}": (
            lambda bases=bases, body=body: declare(bases, name="Bad", a=inner(), **body),
            SpecError,
            rf"Bad\.{name} is a plain method.*`@classmethod` above `def {name}",
        )
        for name in ("__torch_function__", "__torch_dispatch__")
        for where, bases, body in (
            ("its own", TensorSubclass, {name: hook}),
            ("of a base", (type("Mixin", (), {name: hook}), TensorSubclass), {}),
        )
    }
)


# ---- outer sizes and joining rules ---------------------------------------------------------------------------


# Its outer size is known from the numbers in a tensor alone.
Ragged = declare(
    name="Ragged",
    numbers=inner(),
    lengths=inner(dtype=torch.int64),
    outer=staticmethod(lambda numbers, lengths: Outer((lengths.shape[0], int(lengths.max())))),
    rules={aten.mul.Tensor: lambda func, x, y: type(x)(func(x.numbers, y), x.lengths)},
)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_outer_size_that_is_read_from_a_tensor(compiler):
    x = Ragged(torch.ones(5), torch.tensor([2, 3]))
    assert (x * 2).shape == (2, 3)
    with pytest.raises(
        Exception,
        match=r"Ragged\.outer reads the data of an inner tensor.*as a field, `length: int = dynamic\(\)`",
    ):
        COMPILERS[compiler](lambda x: x * 2)(x)


Viewed = declare(
    name="Viewed",
    keywords={"fallback": "views"},
    rules={aten.cat: lambda func, tensors, dim=0: Viewed(func([t.held for t in tensors], dim))},
)


@pytest.mark.parametrize(
    ("part", "expected"), [(lambda x: x.split(2)[0], [1, 1, 0, 0]), (lambda x: list(x)[1], [0, 1, 0, 0])]
)
def test_parts_without_a_gradient_have_zeros(part, expected):
    leaf = torch.arange(4.0).requires_grad_()
    part(Viewed(leaf)).unwrap("held").sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == expected


def test_an_attribute_error_of_a_rule_stays_as_it_is():
    with pytest.raises(AttributeError, match="held") as caught:
        torch.cat([Viewed(torch.ones(2)), torch.ones(2)])
    assert type(caught.value) is AttributeError and "derivative of split" not in "".join(
        caught.value.__notes__
    )


class Wrong(TensorSubclass, fallback="map"):
    held: Tensor = inner()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(cls, func, types, args, kwargs)


LEAVING = declare(__torch_dispatch__=classmethod(lambda cls, *args, **kwargs: NotImplemented))
test_what_an_own_dispatch_raises_below_an_operator = raising(
    [
        *(
            (
                lambda call=call: call(Wrong(torch.ones(2))),
                RuntimeError,
                r"Wrong\.__torch_dispatch__, called for aten\.\w+.*positional arguments but",
            )
            for call in (lambda x: x == x, lambda x: x != x, lambda x: x * 2, lambda x: 2 - x)
        ),
        (lambda: LEAVING(torch.ones(2)) + torch.ones(2), TypeError, "unsupported operand"),
    ]
)
