"""Planted faults: the report names the true fix of each, and the promise is kept once the fix is made."""

from __future__ import annotations

import cProfile
import functools
import pstats
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, TensorSubclass, constant, inner, static
from subclasses.testing import PATHS, examine
from tests.subclasses.subjects import Pair, declare
from tests.subclasses.testing import broken
from tests.subclasses.testing.byhand import Tagged
from tests.subclasses.testing.faults import (
    check_found,
    check_kept,
    finding,
    of_tensors,
    only,
    outcome,
    outcomes,
    plain,
    ruled as with_rules,
)

aten = torch.ops.aten
TABLE = torch.linspace(-1, 1, 16)


# ---- materialize -------------------------------------------------------------------------------------------


# Reads a tensor of the module.
Global = declare(
    name="Global",
    keywords={"size_from": "index", "dtype_from": "scale", "fallback": "materialize"},
    index=inner(dtype=torch.int64),
    scale=inner(),
    materialize=lambda self: TABLE[self.index] * self.scale,
)
Constant = declare(
    Global,
    table=constant(torch.linspace(-1, 1, 16)),
    materialize=lambda self: self.table[self.index] * self.scale,
)
Base = declare(name="Base", keywords={"fallback": "materialize"}, materialize=lambda self: self.held * 2)


class Detached(Base):
    def materialize(self):
        return self.held.detach() * 2


class Data(Base):
    def materialize(self):
        return self.held.data * 2


class NoGrad(Base):
    def materialize(self):
        with torch.no_grad():
            return self.held * 2


# Two inner tensors, both with gradients.
Shifted = declare(Base, shift=inner(), materialize=lambda self: self.held.round() + self.shift)


# ---- rules that the report names ---------------------------------------------------------------------------


def detached(func, x, w, bias=None):
    return func(plain(x).detach(), plain(w).detach(), bias)


def detached_input(func, x, w, bias=None):
    x, w = (t if isinstance(t, Base) else t.detach() for t in (x, w))
    return of_fields(func, x, w, bias)


def raw(func, x, w, bias=None):
    return func(*(t.held * 2 if isinstance(t, Base) else t for t in (x, w)), bias)


def of_fields(func, x, w, bias=None):
    return func(*(t.unwrap("held") * 2 if hasattr(t, "held") else t for t in (x, w)), bias)


def of_parts(func, x, w, bias=None):
    return x @ w.t() if bias is None else x @ w.t() + bias


def writing(func, x):
    return Base(x.held.abs_())


def left(func, x, y):
    return func(x.held, y) * 2


def without_out(func, x, y):
    return torch.mul(plain(x), plain(y))


def with_out(func, x, y, *, out=None):
    made = torch.mul(plain(x), plain(y))
    return made if out is None else out.copy_(Base(made / 2))


def ruled(key, rule, base=Base):
    return with_rules(base, {key: rule})


# No fallback.
Refusing = declare(materialize=lambda self: self.held * 2)
# Its rule runs ops on a value, which have no rules.
Parts = declare(Refusing, name="Parts", rules={F.linear: of_parts})


class KeepsTag(broken.ForgetsTag):
    """Its context has the tag."""

    __tensor_flatten__ = Tagged.__tensor_flatten__
    unflatten = staticmethod(lambda data_, tag: (data_, tag))


# ---- the test ----------------------------------------------------------------------------------------------


def values_of(cls):
    if issubclass(cls, Global):
        return lambda: cls(torch.randint(0, 16, (4, 6)), torch.rand(4, 1))
    return of_tensors(cls, *[(4, 6)] * (2 if issubclass(cls, Shifted) else 1))


CONSTANT = "uses a tensor that is neither an operand nor an inner tensor"
# The planted class, the same class after the fix, the promises that it breaks, words of the advice.
PLANTED = {
    "a global tensor": (
        Global,
        Constant,
        ["compiled_values", "compiled_views"],
        [CONSTANT, "declare it as a constant of the class, with constant(), or as a field, with inner()"],
    ),
    "detach in materialize": (
        Detached,
        Base,
        ["materialize_gradients"],
        ["Detached.materialize (", "not with .detach()"],
    ),
    "data in materialize": (Data, Base, ["materialize_gradients"], ["Data.materialize (", "or .data of it"]),
    "no_grad in materialize": (NoGrad, Base, ["materialize_gradients"], ["nor under no_grad"]),
    "detach of one of two in materialize": (
        declare(Shifted, materialize=lambda self: self.held + self.shift.detach()),
        Shifted,
        ["materialize_gradients"],
        ["compute with the tensor itself, not with .detach()", "skip={'materialize_gradients'}"],
    ),
    "a view by a rule for a function": (
        ruled(torch.t, lambda func, x: type(x)(x.unwrap()[0].t())),
        ruled(aten.t, lambda func, x: type(x)(x.held.t())),
        ["views"],
        ["give the rule to the op, as torch.ops.aten.t"],
    ),
    "an op on self": (
        declare(Base, materialize=lambda self: self * 2),
        Base,
        ["readable"],
        ["applies an op to a value of the class. Let it compute with inner tensors"],
    ),
    "a rule that detaches": (
        ruled(F.linear, detached),
        ruled(F.linear, lambda func, x, w, bias=None: func(plain(x), plain(w), bias)),
        ["gradients", "inner_gradients"],
        ["detached (", "sees none where the rule calls detach()"],
    ),
    "a rule that detaches what is no value of the class": (
        ruled(F.linear, detached_input),
        ruled(F.linear, of_fields),
        ["operand_gradients"],
        ["detached_input (", "not with operand.detach()"],
    ),
    "a rule with raw inner tensors": (
        ruled(F.linear, raw),
        ruled(F.linear, of_fields),
        ["gradients", "inner_gradients"],
        ["raw (", "reads fields in place of x.unwrap(name)"],
    ),
    "a rule made of parts": (
        Parts,
        ruled(F.linear, of_fields, Refusing),
        ["rules_tried"],
        ["of_parts (", "Parts has no rule for aten.t.default", "compute with the inner tensors: x.unwrap()"],
    ),
    "a rule that writes": (
        ruled(aten.abs.default, writing),
        ruled(aten.abs.default, lambda func, x: Base(func(x.held))),
        ["arguments"],
        ["writing (", "writes to its argument: compute into a new tensor"],
    ),
    "a rule for the left operand": (
        ruled(aten.mul.Tensor, left),
        ruled(aten.mul.Tensor, lambda func, x, y: func(plain(x), plain(y))),
        ["values"],
        ["left (", "checks isinstance(operand, cls) before it reads a field", "the right one too"],
    ),
    "a rule without out": (
        ruled(torch.mul, without_out),
        ruled(torch.mul, with_out),
        ["mutation"],
        ["unexpected keyword argument 'out'", "correct the parameters of that rule"],
    ),
    "a context without the tag": (
        broken.ForgetsTag,
        KeepsTag,
        ["round_trip"],
        ["the flatten context None loses tag ('t', afterwards 'lost')", "return it in the context"],
    ),
}


@pytest.mark.sweep(32)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_mended_by_what_the_report_says(fault):
    wrong, right, promises, words = PLANTED[fault]
    options = {"paths": PATHS, "skip": (only(*promises) | {"readable"}) - {*promises}}
    for found in outcomes(values_of(wrong), *promises, **options).values():
        if found.promise.name in promises:
            assert found.state == "broken" and all(word in str(found) for word in words), found
    check_kept(values_of(right), *promises, **options)


test_a_tensor_of_the_module_is_named = finding(
    {
        promise: (promise, values_of(Global), [CONSTANT], None, {"paths": PATHS})
        for promise in PLANTED["a global tensor"][2]
    }
)


@pytest.mark.slow
def test_a_profiler_goes_on_where_the_kit_looks_for_the_rules_at_fault():
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        # The profiler; None since Python 3.12, where it is a tool of `sys.monitoring`.
        before = sys.getprofile()
        check_found(values_of(Detached), "materialize_gradients", ["Detached"])
        assert sys.getprofile() is before
        functools.reduce(int.__add__, [1, 2])  # a call to see
    finally:
        profiler.disable()
    assert any("reduce" in name for _, _, name in pstats.Stats(profiler).stats)


# ---- advice for declared classes ---------------------------------------------------------------------------


OneHot = declare(
    keywords={"fallback": "materialize"},
    index=inner(dtype=torch.int64),
    outer=staticmethod(lambda index: Outer((*index.shape, 4), dtype=torch.float32)),
    materialize=lambda self: F.one_hot(self.index, 4).float(),
    rules={
        torch.matmul: lambda func, x, w: (
            type(x).unruled(func, x, w) if isinstance(w, type(x)) else F.embedding(x.index, w)
        )
    },
)


# Reads the tag of the first operand.
Left = broken.made(
    "Left",
    Tagged,
    run=classmethod(
        lambda cls, func, args, kwargs: Tagged.run.__func__(cls, func, args, kwargs) if args[0].tag else None
    ),
)


# A class that represents no plain tensor.
Ends = declare(low=inner(), high=inner())


def _turned_above(func, x):
    low, high = x.unwrap()
    return type(x)(-high, -low)


def ends(key, rule):
    cls = ruled(key, rule, Ends)
    return lambda: cls(torch.rand(3, 4), torch.rand(3, 4) + 2)


# A matrix of sums; its transpose is a copy.
Symmetric = declare(
    keywords={"fallback": "materialize"},
    column=inner(),
    outer=staticmethod(lambda column: Outer((column.shape[0], column.shape[0]))),
    materialize=lambda self: self.column[:, None] + self.column,
    rules=dict.fromkeys(
        (torch.transpose, torch.t), lambda func, x, *dims: type(x)(x.unwrap("column").clone())
    ),
)
Views = declare(keywords={"fallback": "views"})


def test_a_plain_view_is_no_copy():
    """A row of the class is a plain view of its inner tensor."""
    cls = ruled(aten.select.int, lambda func, x, *args: func(x.held, *args), Views)
    assert "is a copy of type" not in outcome(of_tensors(cls, (4, 8)), "views").detail


def single(func, x, y):
    """Computes in single precision, whatever the dtype of the arguments."""
    if isinstance(x, Base) and not isinstance(y, Tensor):
        return type(x)(func(x.held.float(), y))
    return func(plain(x), plain(y))


class Planes(TensorSubclass, size_from="offset"):
    """Its constructor compares the fields, and a rule of it forgets one of them."""

    normal: Tensor = inner(shape="... 3")
    offset: Tensor = inner()

    def __new__(cls, normal, offset):
        if normal.shape[:-1] != offset.shape:
            raise ValueError(f"normal of {tuple(normal.shape)}, offset of {tuple(offset.shape)}")
        return super().__new__(cls, normal, offset)


@Planes.implements(aten.slice)
def _(func, x, dim=0, start=None, end=None, step=1):
    return Planes(func(x.normal, dim - (dim < 0), start, end, step), func(x.offset, dim, start, end))


Planes.implements(aten.neg)(lambda func, x: Planes(func(x.normal), func(x.offset)))
Copying = ruled(
    aten.slice.Tensor,
    lambda func, x, *args: type(x)(func(x.start, *args), func(x.score, *args).clone()),
    # It represents no plain tensor.
    declare(
        keywords={"fallback": "views", "dtype_from": "score"}, start=inner(dtype=torch.int64), score=inner()
    ),
)


def of_rule(key, rule, base=Base):
    return of_tensors(ruled(key, rule, base), (4, 6))


# Another tensor that an optimizer steps apart from the first, and one that is computed from it.
Cached = declare(
    name="Cached",
    keywords={"fallback": "materialize", "trainable": True},
    held=inner(),
    cached=inner(optional=True),
    materialize=lambda self: (self.held.exp() if self.cached is None else self.cached) * 1,
)
Derived = declare(
    Base, cached=inner(derived=lambda x: x.held.exp()), materialize=lambda self: self.cached * 1
)


def of_cached(cls, *more):
    return lambda: cls(held := torch.randn(4, 6), *(make(held) for make in more))


def inverting(transpose):
    cls = declare(
        Base, materialize=lambda self: self.held * 1, inverse=lambda self: type(self)(transpose(self))
    )
    return lambda: cls(torch.linalg.qr(torch.randn(4, 4)).Q)


def scaling(is_plain):
    def scale(func, x, y):
        x, y = (x, y) if isinstance(x, Represented) else (y, x)
        return type(x)(func(x.held, y)) if is_plain(y) else NotImplemented

    return of_tensors(with_rules(Represented, {aten.mul.Tensor: scale}), (4, 6))


Represented = declare(materialize=lambda self: self.held * 1)
Around = declare(
    name="Around",
    keywords={"fallback": "materialize"},
    inside=inner(),
    rest=inner(),
    annotations={"inside": Base},
    materialize=lambda self: self.inside.materialize() + self.rest,
)
test_silent_until_a_second_look = finding(
    {
        "an inner tensor that repeats another": (
            "cached_inners",
            of_cached(Cached, torch.exp),
            ["computes with cached, which repeats other inner tensors", "inner(derived=function)"],
            of_cached(Derived),
        ),
        "a method that hands on its operand": (
            "own_memory",
            inverting(lambda self: self.held.mT),
            ["y = x.inverse()", "changed x: held"],
            inverting(lambda self: self.unwrap("held").mT.clone()),
        ),
        "a question for the exact type": (
            "plain_operands",
            scaling(lambda y: type(y) in (Tensor, int)),
            ["plain * x with Parameters for plain operands", "not type(operand) is torch.Tensor"],
            scaling(lambda y: not isinstance(y, Represented)),
        ),
        "a value of another class inside is right": (
            *("inner_gradients", None, []),
            lambda: Around(Base(torch.randn(4, 6)), torch.randn(4, 6)),
        ),
    }
)


# The promise, the values, words of the report.
test_it_is_found = finding(
    {
        "a product whose gradient is lost, of integers": (
            "gradients",
            lambda: OneHot(torch.tensor([1, 0, 2])),
            ["the gradient of x @ x.mT is wrong"],
        ),
        "a dim and a dtype dropped": (
            "keyword_arguments",
            of_tensors(
                with_rules(
                    Base,
                    {
                        aten.cat: lambda func, tensors, dim=0: Base(func([t.held for t in tensors])),
                        aten.mul.Tensor: single,
                    },
                ),
                (4, 6),
            ),
            ["torch.cat([x, x], -1)", "x.double() * 2"],
        ),
        "a tuple for one tensor": (
            "values",
            of_rule(
                aten.mul.Tensor, lambda func, x, y: (Base(func(*(getattr(t, "held", t) for t in (x, y)))),)
            ),
            ["returned", "one tensor"],
        ),
        "what the constructor refuses of a rule": (
            "values",
            of_tensors(Planes, (4, 6, 3), (4, 6)),
            ["x[::2] raised ValueError: normal of (2, 6, 3), offset of (4, 6)"],
        ),
        "a step ignored": (
            "values",
            of_rule(
                aten.slice.Tensor,
                lambda func, x, dim=0, start=None, end=None, step=1: type(x)(func(x.held, dim, start, end)),
            ),
            ["x[::2]"],
        ),
        "an embedding without the arguments of a module": (
            "values",
            of_tensors(
                with_rules(
                    Base,
                    {F.embedding: lambda func, i, w: func(i, w.unwrap("held") * 2)},
                    trainable=True,
                ),
                (6, 4),
            ),
            ["nn.Embedding"],
        ),
        "one inner tensor of a view copied, without reference": (
            "writes_to_views",
            lambda: Copying(torch.randint(0, 9, (4,)), torch.rand(4)),
            ["copy_"],
        ),
        "a copy in place of a view": (
            "views",
            of_tensors(Symmetric, (5,)),
            ["skip={'views', 'writes_to_views'}"],
        ),
        "a rule written by hand that takes a plain operand for its own": (
            "values",
            of_tensors(Left, (4, 6)),
            ["object has no attribute 'tag'", "checks isinstance(operand, cls)"],
        ),
        "a copy that is lost where a module loads": (
            "parameter",
            of_tensors(broken.LoadsNothing, (4, 6)),
            [
                "a parameter after load_state_dict(assign=False): data_:",
                "calls weight.copy_(saved)",
                "aten.copy_",
            ],
        ),
    }
)
test_it_is_found_and_mended = pytest.mark.slow(
    finding(
        {
            "a view by an op whose arguments have defaults": (
                "values",
                of_rule(aten.diagonal, lambda func, x, offset=0, *dims: func(plain(x), offset + 1, *dims)),
                ["aten.diagonal.default(x) is not what its reference gives"],
                of_rule(aten.diagonal, lambda func, x, *dims: func(x.held, *dims) * 2),
            ),
            "its right rule is tried": (
                "rules_tried",
                None,
                [],
                of_rule(aten.diagonal, lambda func, x, *dims: func(x.held, *dims) * 2),
            ),
            # Without a reference, gradients are compared with differences.
            "the gradient of one of two lost": (
                "inner_gradients",
                ends(aten.neg, lambda func, x: type(x)(-x.high.detach(), -x.low)),
                [
                    "the gradient of low, high through -x is wrong",
                    "<lambda> (",
                    "where the rule calls detach()",
                ],
                ends(aten.neg, lambda func, x: type(x)(-x.high, -x.low)),
            ),
            "its right rule above autograd": ("inner_gradients", None, [], ends(torch.neg, _turned_above)),
        }
    )
)


def of_one_unit(func, x, y):
    """Refuses by a ValueError, as the guide says."""
    if not (hasattr(x, "held") and hasattr(y, "held")):
        raise ValueError("expected values of one unit")
    return type(x)(func(x.held, y.held))


test_a_rule_that_refuses_by_a_value_error_keeps_its_promises = finding(
    {
        "which has no methods of its own": (
            *("values", None, []),
            of_tensors(declare(rules={aten.add.Tensor: of_one_unit}), (4, 6)),
            {"reference": lambda x: x.held},
        )
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("last", [(7, 6), (7, 8)])
def test_sizes_that_vary_in_another_dim_at_last_are_no_fault(last):
    """A plain tensor makes a new program for them too."""
    first, *sizes = (of_tensors(Pair, size, size) for size in ((4, 6), (5, 6), last))
    assert "dynamic_shapes" not in examine(first, sizes=sizes).broken


# Its materialize() returns another size than the value shows.
Larger = declare(
    name="Larger",
    keywords={"fallback": "materialize"},
    gray=inner(),
    color=inner(),
    materialize=lambda self: torch.cat([self.gray[:, None], self.color], 1),
)
# Inner tensors of unlike rank.
Ranked = declare(Larger, outer=staticmethod(lambda gray, color: Outer((gray.shape[0], 3, *gray.shape[1:]))))


@pytest.mark.parametrize(
    "convert",
    [
        lambda x, **format: x.to(torch.float64, **format),
        lambda x, **format: x.clone(**format),
        torch.empty_like,
    ],
)
def test_a_memory_format_that_an_inner_tensor_cannot_have(convert):
    x = Ranked(torch.rand(2, 4, 5), torch.rand(2, 2, 4, 5))
    got = convert(x, memory_format=torch.channels_last)
    assert type(got) is Ranked and got.shape == (2, 3, 4, 5)
    if convert is not torch.empty_like:
        torch.testing.assert_close(got.materialize(), x.materialize().to(got.dtype))


@pytest.mark.slow
def test_what_is_no_fault_of_a_class():
    """Not picklable; and its materialize() has other strides than the value."""
    transposed = lambda self: (self.held * 1).t().contiguous().t()  # noqa: E731
    Local = declare(keywords={"fallback": "materialize"}, materialize=transposed)
    report = examine(lambda: Local(torch.randn(4, 6)), paths={}, reference=lambda x: x.materialize())
    assert not {"serialization", "own_memory"} & {*report.broken}
    skipped = next(o for o in report.outcomes if o.promise.name == "serialization")
    assert "declare it in a module" in skipped.detail


# ---- a value that cannot be read ---------------------------------------------------------------------------


def times_temperature(self):
    return self.held * self.temperature


WithStatic = declare(
    keywords={"fallback": "materialize"},
    held=inner(),
    temperature=static(default=2.0),
    materialize=times_temperature,
)
# Its constructor sets an attribute that ops do not carry on.
WithAttribute = declare(
    keywords={"fallback": "materialize"},
    materialize=times_temperature,
    __init__=lambda self, held: setattr(self, "temperature", 2.0),
)


# Multiplies along the wrong dim.
PerColumn = declare(
    keywords={"fallback": "materialize"},
    held=inner(),
    scale=inner(),
    materialize=lambda self: self.held * self.scale,
)
PerRow = declare(PerColumn, materialize=lambda self: self.held * self.scale[:, None])


# ---- a value that cannot be read ---------------------------------------------------------------------------


UNREADABLE = {
    "an attribute that is no field": (
        of_tensors(WithAttribute, (4, 6)),
        of_tensors(WithStatic, (4, 6)),
        [
            "x.detach().materialize() raised AttributeError",
            "no attribute 'temperature'",
            "declare all that materialize()",
        ],
    ),
    "sizes that materialize() does not fit": (
        of_tensors(PerColumn, (4, 6), (4,)),
        of_tensors(PerRow, (4, 6), (4,)),
        ["x.materialize() raised RuntimeError: The size of tensor a (6) must match", "Fit the sizes"],
    ),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_a_value_that_cannot_be_read_is_one_entry(fault):
    wrong, right, words = UNREADABLE[fault]
    report = examine(wrong, paths={})
    assert report.broken == ["readable"] and not report.of("kept")
    (outcome,) = report.of("broken")
    assert all(word in str(outcome) for word in words), str(outcome)
    assert "see the promise `readable`" in " ".join(str(report).split())
    promises = only("values", "round_trip", "clone_and_detach")
    assert examine(right, paths={}, skip=promises).broken == []


# ---- one cause that several promises meet --------------------------------------------------------------------


Adding = declare(keywords={"fallback": "materialize"}, raw=inner(), materialize=lambda self: self.raw.add_(1))
# Values, the least number of promises with this one fix, a part of their details, and words of the fix.
ONE_CAUSE = {
    "a materialize() of another size": (
        lambda: Larger(torch.randn(4, 3), torch.randn(4, 2, 3)),
        *(1, "materialize: expected", ["correct materialize()"]),
    ),
    "a materialize() that writes": (
        lambda: Adding(torch.randn(4, 6)),
        *(1, "x.materialize() changed x: raw", ["correct the named fault"]),
    ),
    "a rule that lacks a parameter": (
        of_rule(
            aten.mean,
            lambda func, x, dim=None, *, dtype=None: func(
                plain(x), *([] if dim is None else [dim]), dtype=dtype
            ),
        ),
        *(
            1,
            "rule takes",
            ["correct the parameters of that rule: a rule takes the arguments of its op", "keepdim"],
        ),
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("cause", ONE_CAUSE)
def test_one_cause_has_one_mend_whichever_promise_meets_it(cause):
    make, least, detail, words = ONE_CAUSE[cause]
    report = examine(make, paths={})
    mends = [o.mend for o in report.of("broken") if detail in o.detail]
    assert len(mends) >= least and len({*mends}) == 1 == " ".join(str(report).split()).count(words[0])
    assert all(word in mends[0] for word in words)


Fixed = declare(Base, held=inner(ndim=2), outer=staticmethod(lambda held: Outer((4, 3))))


@pytest.mark.slow
def test_a_size_that_outer_does_not_compute():
    first, *sizes = (of_tensors(Fixed, (rows, 3)) for rows in (4, 5, 7))
    report = examine(first, paths={}, sizes=sizes)
    (found,) = [o for o in report.of("broken") if o.promise.name == "sizes"]
    assert (
        "expected a tensor of the outer size (4, 3)" in found.detail
        and "got one of size (5, 3)" in found.detail
    )
    assert "Or declare the outer size and dtype" in found.mend
