"""Advice in an error is never refused by the next one: each test makes the mistake, then does what the error says."""

from __future__ import annotations

import functools
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses import DispatchError, Outer, SpecError, TensorSubclass, inner, static
from tests.subclasses.subjects import MODES, Pair, declare
from tests.tables import raising

aten = torch.ops.aten

# ---- declarations: the code that an error shows replaces the wrong line, or is added ------------------------

HEADER = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, ClassVar, Final
import torch
from torch import Tensor
from subclasses import Outer, TensorSubclass, constant, dynamic, inner, static
from tests.subclasses.subjects import Int8Weight, Pair

"""


def declare_in(path: Path, head: str, body: list[str]) -> type:
    """Runs a class statement from a file of its own, as a user's module is run."""
    text = HEADER + f"class Made({head}):\n" + "".join(f"    {line}\n" for line in body)
    path.write_text(text)
    return runpy.run_path(str(path))["Made"]


def advised(error: Exception, name: str) -> list[str]:
    """The declarations of a name in an error's text, with something in place of the dots."""
    found = re.findall(rf"`({name}(?:: [^`]*?)? = [^`]*)`", str(error))
    found = [
        line.replace("= ...", "= None").replace("default=...", "default=None").replace("[...]", "[1.0]")
        for line in found
    ]
    return [line for line in found if re.search("ClassVar|constant|inner|static|dynamic", line)]


KEPT = "kept: Tensor = inner()"
MISTAKES = {
    "no inner tensor": ("TensorSubclass", ["pass"], "values"),
    "tensor": ("TensorSubclass", ["x: Tensor"], "x"),
    "optional tensor": ("TensorSubclass", [KEPT, "x: Tensor | None"], "x"),
    "optional tensor, None": ("TensorSubclass", [KEPT, "x: Tensor | None = None"], "x"),
    "either tensor": ("TensorSubclass", [KEPT, "x: Pair | Int8Weight"], "x"),
    "a tensor": ("TensorSubclass", [KEPT, "x: Tensor = torch.ones(2)"], "x"),
    "int": ("TensorSubclass", [KEPT, "x: int"], "x"),
    "default": ("TensorSubclass", [KEPT, "x: int = -3"], "x"),
    "final": ("TensorSubclass", [KEPT, "x: Final[int]"], "x"),
    "final of a string": ("TensorSubclass", [KEPT, "x: 'Final[str]'"], "x"),
    "list": ("TensorSubclass", [KEPT, "x: list[int] = [1]"], "x"),
    "dict": ("TensorSubclass", [KEPT, "x: dict"], "x"),
    "not at run time": ("TensorSubclass", [KEPT, "x: Unknown"], "x"),
    "no annotation": ("TensorSubclass", ["x = inner()"], "x"),
    "half optional": ("TensorSubclass", [KEPT, "x: Tensor = inner(optional=True)"], "x"),
    "float count": ("TensorSubclass", [KEPT, "x: float = dynamic()"], "x"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_each_declaration_that_an_error_shows_is_accepted(case, tmp_path):
    head, body, name = MISTAKES[case]
    with pytest.raises(SpecError) as caught:
        declare_in(tmp_path / "wrong.py", head, body)
    lines = [line for line in advised(caught.value, name) if line not in body]
    assert lines, caught.value
    rest = [line for line in body if not line.startswith(name)]
    for line in lines:
        made = declare_in(tmp_path / "mended.py", head, [*rest, line, *[KEPT] * (not rest)])
        assert ("ClassVar" in line or "constant" in line) == (name not in made.__spec__.names)


@pytest.mark.parametrize("name", ["data", "shape", "to", "unwrap", "_own", "isinstance"])
def test_another_name_that_is_proposed_is_free(name):
    with pytest.raises(SpecError) as caught:
        declare(**{name: inner()})
    assert declare(**{str(caught.value).rpartition("such as ")[2]: inner()})


# ---- rules: a user can register the rule that an error advises, and dispatch calls it ------------------------


Bare = declare(name="Bare")


Dense = declare(name="Dense", keywords={"fallback": "materialize"}, materialize=lambda self: self.held)


Views = declare(held=inner(), scale=inner(), keywords={"fallback": "views"})


Ints = declare(held=inner(dtype=torch.int64), keywords={"fallback": "map"})
Tagged = declare(held=inner(), tag=static(default=""), keywords={"fallback": "map"})
Shown = declare(
    held=inner(),
    shown=static(default=torch.float64),
    outer=staticmethod(lambda held, shown: Outer(held.shape, dtype=shown)),
    keywords={"fallback": "map"},
)


CALLS = {
    "no rule": (Bare, lambda c: c(torch.ones(2)) * 2),
    "no rule in place": (Bare, lambda c: c(torch.ones(2)).mul_(2)),
    "no rule, a list": (Bare, lambda c: torch.cat([c(torch.ones(2))])),
    "no view": (Views, lambda c: c(torch.ones(2, 2), torch.ones(2, 1)).t()),
    "computes": (Views, lambda c: c(torch.ones(2), torch.ones(2)).exp()),
    "writes what would be lost": (Dense, lambda c: c(torch.ones(2)).add_(1)),
    "dtype of a field": (Ints, lambda c: c(torch.ones(2, dtype=torch.int64)) / 2),
    "other metadata": (Tagged, lambda c: c(torch.ones(2)) + c(torch.ones(2), tag="b")),
    "strides": (Views, lambda c: c(torch.ones(2, 3), torch.ones(2, 1)).as_strided((2,), (1,))),
    "dtype of the class": (Shown, lambda c: c(torch.ones(2)).half()),
    "dtype that is declared": (Ints, lambda c: c(torch.ones(2, dtype=torch.int64)).float()),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_rule_that_an_error_advises_is_called(case):
    base, call = CALLS[case]
    cls = declare(base)
    with pytest.raises(DispatchError) as caught:
        call(cls)
    (advice,) = re.findall(r"@Made\.implements\(torch\.ops\.([\w.]+)\)", str(caught.value))
    op, seen = functools.reduce(getattr, advice.split("."), torch.ops), []

    @cls.implements(op)
    def rule(func, *args, **kwargs):
        seen.append(func)
        return (args[0] if isinstance(args[0], cls) else args[0][0]).detach()

    call(cls)
    assert seen == [op]


REGISTRATIONS = {
    "a rule in place of an op": (
        lambda cls: cls.implements(_named_rule),
        r"write `@Made\.implements\(torch\.add\)` above `def rule\(func, \*args",
        lambda cls: cls.implements(torch.add)(_named_rule) and cls(torch.ones(2)) + 1,
    ),
    "a module": (
        lambda cls: cls.implements(nn.Linear(2, 2)),
        r"such as F\.linear",
        lambda cls: cls.implements(F.linear)(_named_rule) and nn.Linear(2, 2)(cls(torch.ones(2))),
    ),
    "a name": (
        lambda cls: cls.implements("mul"),
        r"\(torch\.ops\.aten\.mul\.Tensor\).*torch\.ops\.aten\.mul\).*Tag\.pointwise",
        lambda cls: [
            cls.implements(k)(_named_rule) for k in (aten.mul.Tensor, aten.cos, torch.Tag.pointwise)
        ],
    ),
    "a composite op that no function calls": (
        lambda cls: cls.implements(aten.mT.default)(lambda func, x: x),
        "write rules for the ops that it decomposes to",
        lambda cls: (
            cls.implements(aten.transpose.int)(lambda func, x, *dims: cls(func(x.held, *dims)))
            and cls(torch.ones(2, 3)).mT.held.shape == (3, 2)
        ),
    ),
    "the parameters of a hook": (
        lambda cls: cls.implements(aten.neg)(lambda func, types, args=(), kwargs=None: args[0]),
        r"above `def rule\(func, \*args, \*\*kwargs\)`",
        lambda cls: cls.implements(aten.neg)(lambda func, x: x) and (-cls(torch.ones(1))).held,
    ),
    **{
        f"{name}, which compilers answer from the size": (
            lambda cls, name=name: cls.implements(getattr(Tensor, name))(lambda func, x, *args: 7),
            rf"compiled code calls no rule for Tensor\.{name}, .*`outer`",
            lambda cls: True,
        )
        for name in ("numel", "__len__", "dim", "size", "stride", "is_contiguous")
    },
}


def _named_rule(func, *args, **kwargs):
    return torch.tensor(7)


@pytest.mark.parametrize("case", REGISTRATIONS)
def test_what_a_registration_advises(case):
    mistake, words, mended = REGISTRATIONS[case]
    with pytest.raises(SpecError, match=words):
        mistake(declare(Bare))
    assert mended(declare(Bare))


def wide(cls):
    return cls(torch.rand(2, 3), torch.rand(2, 1))


def slice_both(cls):
    """Has a rule for slices, which leaves an inner tensor of one column as it is."""
    return cls.implements(aten.slice)(
        lambda func, x, dim=0, *args: cls(func(x.a, dim, *args), x.b if dim else func(x.b, dim, *args))
    )


def timed(fallback):
    return lambda: declare(n=inner(), times=inner(dtype=torch.int64), keywords={"fallback": fallback})


def random_like(cls):
    return torch.rand_like(cls(torch.ones(2), torch.arange(2)))


def step(cls, make):
    x = make(cls(torch.ones(2)))
    x.exp().sum().backward()
    return torch.optim.SGD([x], lr=0.1).step() is None


# The class, a refused call, the error, and a call that follows its advice.
REFUSED_CALLS = {
    "a slice of a shorter inner tensor": (
        lambda: declare(Pair),
        lambda cls: wide(cls)[:, 1:2],
        DispatchError,
        r"'b' of size \(2, 1\) has fewer .*@Made\.implements",
        lambda cls: slice_both(cls) and wide(cls)[:, 1:2].b.shape == (2, 1),
    ),
    "other slices of it are not refused": (
        lambda: declare(Pair),
        lambda cls: wide(cls)[:, 1:2],
        DispatchError,
        "has fewer",
        lambda cls: (wide(cls)[1:].b.shape, wide(cls)[:, :].b.shape) == ((1, 1), (2, 1)),
    ),
    **{
        f"a factory that an inner dtype has not, {fallback}": (
            timed(fallback),
            random_like,
            NotImplementedError,
            r"(?s)times'? .*torch\.int64.*@Made\.implements",
            lambda cls: (
                cls.implements(aten.rand_like)(lambda func, x, **kwargs: cls(func(x.n, **kwargs), x.times))
                and random_like(cls).times.tolist() == [0, 1]
            ),
        )
        for fallback in ("views", "map")
    },
    "an optimizer that is given no Parameter": (
        lambda: declare(Dense, keywords={"trainable": True}),
        lambda cls: step(cls, lambda x: x.requires_grad_()),
        DispatchError,
        r"optimizer is given torch\.nn\.Parameter\(x\), and not x",
        lambda cls: step(cls, nn.Parameter),
    ),
}


@pytest.mark.parametrize("case", REFUSED_CALLS)
def test_what_a_refused_call_advises(case):
    make, mistake, error, words, mended = REFUSED_CALLS[case]
    cls = make()
    with pytest.raises(error, match=words):
        mistake(cls)
    assert mended(cls)


def test_the_rules_that_an_assignment_to_an_index_advises():
    cls = declare(Dense)
    x = cls(torch.zeros(3))
    with pytest.raises(DispatchError, match="add rules for select, slice, copy_ and, for a number, fill_"):
        x[0] = 1.0
    cls.implements(aten.select.int, aten.slice.Tensor)(
        lambda func, x, *args, **kw: cls(func(x.held, *args, **kw))
    )
    cls.implements(aten.copy_.default)(lambda func, x, source, *args: func(x.held, source))
    x[0] = torch.tensor(1.0)
    cls.implements(aten.fill_)(lambda func, x, number: func(x.held, number))
    x[1:] = torch.tensor([2.0, 3.0])
    assert x.held.tolist() == [1, 2, 3]
    x[:2] = 0.25
    assert x.held.tolist() == [0.25, 0.25, 3]


# ---- gradients, attributes, construction ---------------------------------------------------------------------


def held_gradient(cls, backward):
    held = torch.ones(3, requires_grad=True)
    backward(cls(held))
    return held.grad.tolist()


SUM_BY_OP = {aten.sum: lambda func, x: type(x)(func(x.held))}

# The members of the class, the refused backward, the advice, and the members or the call that follow it.
COTANGENTS = {
    "a method": (
        {},
        lambda x: x.backward(torch.ones(3)),
        r"wrap_cotangent\(self, cotangent\)",
        {"wrap_cotangent": lambda self, cotangent: type(self)(cotangent)},
        lambda x: x.backward(torch.ones(3)),
    ),
    "a rule": (
        {},
        lambda x: x.backward(torch.ones(3)),
        r"wrap_cotangent\(self, cotangent\)",
        {"rules": {torch.sum: lambda func, x: func(x.unwrap("held"))}},
        lambda x: x.sum().backward(),
    ),
    "unwrap, for a value that represents no plain tensor": (
        {"rules": SUM_BY_OP},
        lambda x: x.sum().backward(),
        r"where backward\(\) of a value calls it, .* that x\.unwrap\(\) or a method",
        {"rules": SUM_BY_OP},
        lambda x: x.sum().unwrap("held").backward(),
    ),
}


@pytest.mark.parametrize("case", COTANGENTS)
def test_what_a_plain_cotangent_needs(case):
    declared, refused, words, mended, backward = COTANGENTS[case]
    with pytest.raises(DispatchError, match=words):
        held_gradient(declare(Bare, **declared), refused)
    assert held_gradient(declare(Bare, **mended), backward) == [1, 1, 1]


# ---- ops of PyTorch that a user did not write ------------------------------------------------------------------


Halved = declare(
    n=inner(),
    materialize=lambda self: self.n * 2,
    keywords={"fallback": "materialize"},
    rules={torch.matmul: lambda func, x, y: func(x.unwrap("n"), y) * 2},
)


def test_a_complex_value_in_a_derivative():
    t, v = torch.rand(2, 2, requires_grad=True), torch.rand(2, dtype=torch.complex64)
    with pytest.raises(DispatchError, match=r"\(ToCopyBackward0\) calls it: .*, or with x\.materialize\(\)"):
        (Halved(t).to(torch.complex64) @ v).abs().sum().backward()
    (got,) = torch.autograd.grad((Halved(t).materialize().to(torch.complex64) @ v).abs().sum(), t)
    (want,) = torch.autograd.grad(((2 * t).to(torch.complex64) @ v).abs().sum(), t)
    assert torch.allclose(got, want)


def summed_cotangent():
    cls = declare(
        wrap_cotangent=lambda self, cotangent: cls(cotangent.sum()),
        rules={aten.neg: lambda func, x: cls(-x.held)},
    )
    (-cls(torch.ones(2, requires_grad=True))).backward(torch.ones(2))


def without_its_class(base):
    class Made(base):
        held: Tensor = inner()

        def __new__(cls, held):
            return super().__new__(held)

    Made(torch.ones(2))


REFUSED = {
    "an outer size that is a number": (
        lambda: declare(Bare, outer=staticmethod(lambda held: Outer(held.shape[0])))(torch.ones(2)),
        ValueError,
        r"expected a tuple of ints as the size, such as \(2,\)",
    ),
    "a cotangent of another size": (
        summed_cotangent,
        DispatchError,
        r"wrap_cotangent: expected a derivative of size \(2,\) by held, got one of size \(\)",
    ),
    **{
        f"a constructor of a {base.__name__} without its class": (
            lambda base=base: without_its_class(base),
            TypeError,
            r"expected the class first, .*`super\(\)\.__new__\(cls, \.\.\.\)`",
        )
        for base in (TensorSubclass, Bare)
    },
    **{
        f"a {base.__name__}": (
            lambda bases=bases: type(TensorSubclass)("Made", bases, {}),
            SpecError,
            f"Made cannot inherit from {base.__name__} too; ",
        )
        for base, bases in {
            nn.Module: (TensorSubclass, nn.Module),
            nn.Parameter: (nn.Parameter, TensorSubclass),
        }.items()
    },
    "a field that is deleted": (
        lambda: delattr(declare(a=inner(differentiable=True))(torch.ones(2)), "a"),
        AttributeError,
        r"Made\.a is a field",
    ),
}


test_what_is_refused_with_advice = raising(REFUSED)


# ---- functions of several ops ------------------------------------------------------------------------------


SQUARE = torch.ones(2, 2)


OF_SEVERAL_OPS = {
    "torch.matmul": lambda x: x @ SQUARE,
    "torch.matmul, from the left": lambda x: SQUARE @ x,
    "torch.nn.functional.linear": lambda x: F.linear(x, SQUARE),
    "torch.reshape": lambda x: x.reshape(-1),
    "torch.flatten": lambda x: x.flatten(),
    "torch.layer_norm": lambda x: F.layer_norm(x, (2,)),
    "torch.tile": lambda x: x.tile(2, 2),
    "torch.linalg.norm": lambda x: torch.linalg.norm(x),
    "torch.softmax": lambda x: x.softmax(-1),
    "torch.chunk": lambda x: x.chunk(2),
    "torch.Tensor.mT.__get__": lambda x: x.mT,
    "torch.Tensor.mH.__get__": lambda x: x.mH,
    "torch.nn.functional.scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("door", ["eager", "stock", "desugar"])
@pytest.mark.parametrize("name", OF_SEVERAL_OPS)
def test_the_function_that_asks_for_an_op_is_named_too(name, door):
    """A product of batches calls a view first, which the caller did not write."""
    cls, call = declare(Bare, rules={torch.sin: lambda func, x: x}), OF_SEVERAL_OPS[name]
    with pytest.raises(DispatchError, match=r"add one with .*torch\.ops\.aten\..*; or for") as found:
        call(cls(torch.ones(3, 2, 2)))
    (advised,) = re.findall(
        r"or for \S+, of which it is a part: @Made\.implements\((.*?)\)", str(found.value)
    )
    assert advised == name.partition(",")[0]
    cls.implements(eval(advised, {"torch": torch}))(lambda func, *args, **kwargs: torch.full((), 7.0))
    assert MODES[door](lambda x: call(x))(cls(torch.ones(3, 2, 2))) == 7


test_an_op_that_is_asked_for_itself_names_no_function = raising(
    [
        (
            lambda call=call: call(declare(Bare, rules={torch.sin: lambda func, x: x})(SQUARE)),
            "(?s)^(?!.*of which it is a part)",
        )
        for call in (lambda x: x + 1, lambda x: x.transpose(0, 1), lambda x: x.sum())
    ]
)


def test_a_rule_for_a_function_whose_callers_write_more():
    with pytest.raises(TypeError) as found:
        declare(Bare, rules={torch.reshape: lambda func, x, size: x})(torch.ones(2, 2)).reshape(4, 1)
    text = f"{found.value} {getattr(found.value, '__notes__', '')}"
    assert "takes all arguments that its callers write" in text
