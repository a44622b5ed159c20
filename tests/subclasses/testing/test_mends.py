"""Planted faults: the report names the true mend of each, and the promise is kept once it is made."""

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
from subclasses.testing import examine
from subclasses.testing.runner import PROMISES
from tests.subclasses.testing import broken
from tests.subclasses.testing.byhand import Tagged

aten = torch.ops.aten
TABLE = torch.linspace(-1, 1, 16)


# ---- materialize -------------------------------------------------------------------------------------------


class Global(TensorSubclass, size_from="index", dtype_from="scale", fallback="materialize"):
    """Reads a tensor of the module."""

    index: Tensor = inner(dtype=torch.int64)
    scale: Tensor = inner()

    def materialize(self):
        return TABLE[self.index] * self.scale


class Constant(Global):
    table: Tensor = constant(torch.linspace(-1, 1, 16))

    def materialize(self):
        return self.table[self.index] * self.scale


class Base(TensorSubclass, fallback="materialize"):
    held: Tensor = inner()

    def materialize(self):
        return self.held * 2


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


class Shifted(Base):
    """Two inner tensors, both with gradients."""

    shift: Tensor = inner()

    def materialize(self):
        return self.held.round() + self.shift


class ShiftedDetached(Shifted):
    def materialize(self):
        return self.held + self.shift.detach()


class Whole(Base):
    def materialize(self):
        return self * 2


# ---- rules -------------------------------------------------------------------------------------------------


def plain(t):
    return t.materialize() if isinstance(t, TensorSubclass) else t


def detached(func, x, w, bias=None):
    return func(plain(x).detach(), plain(w).detach(), bias)


def detached_input(func, x, w, bias=None):
    x, w = (t if isinstance(t, Base) else t.detach() for t in (x, w))
    return of_fields(func, x, w, bias)


def raw(func, x, w, bias=None):
    return func(*(t.held * 2 if isinstance(t, Base) else t for t in (x, w)), bias)


def of_fields(func, x, w, bias=None):
    return func(*(t.unwrap("held") * 2 if isinstance(t, Base) else t for t in (x, w)), bias)


def of_parts(func, x, w, bias=None):
    return x @ w.t() if bias is None else x @ w.t() + bias


def writing(func, x):
    return Base(x.held.abs_())


def new(func, x):
    return Base(func(x.held))


def left(func, x, y):
    return func(x.held, y) * 2


def both(func, x, y):
    return func(plain(x), plain(y))


def without_out(func, x, y):
    return torch.mul(plain(x), plain(y))


def with_out(func, x, y, *, out=None):
    if out is None:
        return torch.mul(plain(x), plain(y))
    return out.copy_(Base(plain(x) * plain(y) / 2))


def ruled(key, rule, **keywords):
    """A class with one rule; ``fallback=None`` leaves it without any other op."""
    cls = type("Ruled", (Base,), {"__doc__": "One rule.", **keywords})
    cls.implements(key)(rule)
    return cls


class Refusing(TensorSubclass):
    """No fallback."""

    held: Tensor = inner()

    def materialize(self):
        return self.held * 2


class Parts(Refusing):
    """Its rule runs ops on a value, which have no rules."""


class Fields(Refusing):
    """Its rule computes with the inner tensors."""


Parts.implements(F.linear)(of_parts)


@Fields.implements(F.linear)
def _(func, x, w, bias=None):
    return func(*(t.unwrap("held") * 2 if isinstance(t, Fields) else t for t in (x, w)), bias)


# ---- flatten -----------------------------------------------------------------------------------------------


class KeepsTag(broken.ForgetsTag):
    """Its context has the tag."""

    def __tensor_flatten__(self):
        return ["data_"], self.tag

    @classmethod
    def __tensor_unflatten__(cls, inners, tag, size, stride):
        return cls.wrap(inners["data_"], tag)


# ---- the test ----------------------------------------------------------------------------------------------


def values_of(cls):
    if issubclass(cls, Global):
        return lambda: cls(torch.randint(0, 16, (4, 6)), torch.rand(4, 1))
    if issubclass(cls, Shifted):
        return lambda: cls(torch.randn(4, 6), torch.randn(4, 6))
    return lambda: cls(torch.randn(4, 6))


def outcomes(cls, *promises):
    """The outcomes of some promises."""
    others = {p.name for p in PROMISES}.difference(promises)
    report = examine(values_of(cls), skip=others)
    return [o for o in report.outcomes if o.promise.name in promises]


CONSTANT = "(TABLE, which Global.materialize ("
# What is planted, what it is after the mend, the promises that it breaks, words of the mend.
PLANTED = {
    "a global tensor": (
        Global,
        Constant,
        ["compiled_values", "compiled_views"],
        [CONSTANT, "with constant()"],
    ),
    "detach in materialize": (Detached, Base, ["inner_gradients"], ["Detached.materialize (", "uses detach"]),
    "data in materialize": (Data, Base, ["inner_gradients"], ["Data.materialize (", "uses data, behind"]),
    "no_grad in materialize": (NoGrad, Base, ["inner_gradients"], ["uses no_grad, behind", "leave it out"]),
    "detach of one of two in materialize": (
        ShiftedDetached,
        Shifted,
        ["materialize_gradients"],
        ["compute with the tensor itself, not with .detach()", "skip={'materialize_gradients'}"],
    ),
    "a view by a rule for a function": (
        ruled(torch.t, lambda func, x: type(x)(x.unwrap()[0].t())),
        ruled(aten.t, lambda func, x: type(x)(x.held.t())),
        ["views"],
        ["give the rule to the op, as torch.ops.aten.t", "reads as x.held"],
    ),
    "an op on self": (Whole, Base, ["round_trip", "deepcopy"], ["compute with the fields (self.held)"]),
    "a rule that detaches": (
        ruled(F.linear, detached),
        ruled(F.linear, lambda func, x, w, bias=None: func(plain(x), plain(w), bias)),
        ["gradients", "inner_gradients"],
        ["detached (", "uses detach"],
    ),
    "a rule that detaches what is no value of the class": (
        ruled(F.linear, detached_input),
        ruled(F.linear, of_fields),
        ["operand_gradients"],
        ["detached_input (", "uses detach"],
    ),
    "a rule with raw inner tensors": (
        ruled(F.linear, raw),
        ruled(F.linear, of_fields),
        ["gradients", "inner_gradients"],
        ["raw (", "reads the raw .held above autograd", 'x.unwrap("held") does'],
    ),
    "a rule made of parts": (
        Parts,
        Fields,
        ["rules_tried"],
        ["of_parts (", "Parts has no rule for aten.t.default", "compute with the inner tensors: x.unwrap()"],
    ),
    "a rule that writes": (
        ruled(aten.abs.default, writing),
        ruled(aten.abs.default, new),
        ["arguments", "gradients"],
        ["writing (", "writes to its argument: compute into a new tensor"],
    ),
    "a rule for the left operand": (
        ruled(aten.mul.Tensor, left),
        ruled(aten.mul.Tensor, both),
        ["values"],
        ["left (", "reads .held of an operand without a test", "the right one too"],
    ),
    "a rule without out": (
        ruled(torch.mul, without_out),
        ruled(torch.mul, with_out),
        ["mutation"],
        ["without_out (", "takes no out=", "write with out.copy_(result)"],
    ),
    "a context without the tag": (
        broken.ForgetsTag,
        KeepsTag,
        ["round_trip"],
        ["the flatten context None loses tag ('t', afterwards 'lost')", "return it in the context"],
    ),
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_mended_by_what_the_report_says(fault):
    wrong, right, promises, words = PLANTED[fault]
    for outcome in outcomes(wrong, *promises):
        assert outcome.state == "broken", outcome
        assert all(word in outcome.mend for word in words), outcome.mend
    for outcome in outcomes(right, *promises):
        assert outcome.state == "kept", outcome


@pytest.mark.slow
def test_a_profiler_goes_on_where_the_kit_looks_for_the_rules_at_fault():
    wrong, _, promises, _ = next(planted for planted in PLANTED.values() if planted[0] is Detached)
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        before = (
            sys.getprofile()
        )  # the profiler; None since Python 3.12, where it is a tool of `sys.monitoring`
        (outcome, *_) = outcomes(wrong, *promises)
        assert sys.getprofile() is before
        functools.reduce(int.__add__, [1, 2])  # a call to see
    finally:
        profiler.disable()
    assert outcome.state == "broken" and "Detached" in outcome.mend
    assert any("reduce" in name for _, _, name in pstats.Stats(profiler).stats)


def test_a_rule_that_was_not_tried_is_named_if_it_loses_gradients():
    (outcome,) = outcomes(ruled(F.cosine_similarity, raw), "rules_tried")
    assert outcome.state == "skipped" and "raw (" in outcome.detail
    assert "reads the raw .held above autograd, where it carries no gradient" in outcome.detail


def test_the_screen_names_a_rule_that_was_not_tried_and_loses_gradients():
    others = {p.name for p in PROMISES} - {"rules_tried"}
    cls = ruled(F.cosine_similarity, raw)
    screen = " ".join(str(examine(lambda: cls(torch.randn(4, 6)), paths={}, skip=others)).split())
    assert 'reads the raw .held above autograd, where it carries no gradient: x.unwrap("held") does' in screen
    assert "not called: cosine_similarity" in screen


@pytest.mark.slow
def test_an_op_whose_arguments_have_defaults_is_called_though_it_gives_a_view():
    def second_diagonal(func, x, offset=0, dim1=0, dim2=1):
        return func(plain(x), offset + 1, dim1, dim2)

    (found,) = outcomes(ruled(aten.diagonal, second_diagonal), "values")
    assert "aten.diagonal.default(x) is not what its reference gives" in found.detail
    (found,) = outcomes(ruled(aten.diagonal, lambda func, x, *dims: func(x.held, *dims) * 2), "values")
    assert found.state == "kept"
    (found,) = outcomes(ruled(aten.diagonal, lambda func, x, *dims: func(x.held, *dims) * 2), "rules_tried")
    assert found.state == "kept"


@pytest.mark.slow
def test_an_inner_tensor_of_ints_is_not_said_to_carry_gradients():
    class OneHot(TensorSubclass, fallback="materialize"):
        index: Tensor = inner(dtype=torch.int64)

        @staticmethod
        def outer(index):
            return Outer((*index.shape, 4), dtype=torch.float32)

        def materialize(self):
            return F.one_hot(self.index, 4).float()

    @OneHot.implements(torch.matmul)
    def _(func, x, w):
        return OneHot.unruled(func, x, w) if isinstance(w, OneHot) else F.embedding(x.index, w)

    report = examine(lambda: OneHot(torch.tensor([1, 0, 2])), paths={})
    assert all('x.unwrap("index")' not in (outcome.mend or "") for outcome in report.of("broken"))
    assert "the gradient of x @ x.mT is wrong" in str(report)


def test_a_rule_written_by_hand_that_takes_a_plain_operand_for_its_own():
    class Left(Tagged):
        """Reads the tag of the first operand."""

        @classmethod
        def run(cls, func, args, kwargs):
            return super().run(func, args, kwargs) if args[0].tag else None

    (outcome,) = outcomes(Left, "values")
    assert "Left.run (" in outcome.mend or "run (" in outcome.mend
    assert "reads .tag of an operand without a test" in outcome.mend


def test_a_copy_that_is_lost_is_told_of_where_a_module_loads():
    class Lost(Tagged):
        """Copies into a copy."""

        @classmethod
        def run(cls, func, args, kwargs):
            return args[0] if func is aten.copy_.default else super().run(func, args, kwargs)

    (outcome,) = outcomes(Lost, "parameter")
    assert "a parameter after load_state_dict(assign=False): data_:" in outcome.detail
    assert "calls weight.copy_(saved)" in outcome.mend and "aten.copy_" in outcome.mend


# ---- gradients of a class that stands for no plain tensor ---------------------------------------------------


def _interval(key, rule):
    class Ends(TensorSubclass):
        low: Tensor = inner()
        high: Tensor = inner()

    Ends.implements(key)(functools.partial(rule, Ends))
    return lambda: Ends(torch.rand(3, 4), torch.rand(3, 4) + 2)


def _turned(cls, func, x):
    return cls(-x.high, -x.low)


def _half_detached(cls, func, x):
    return cls(-x.high.detach(), -x.low)


def _turned_above(cls, func, x):
    low, high = x.unwrap()
    return cls(-high, -low)


def _inner_gradients(make):
    outcomes = examine(make, paths={}).outcomes
    return next(o for o in outcomes if o.promise.name == "inner_gradients")


@pytest.mark.slow
def test_a_gradient_that_differences_do_not_confirm_is_told_without_a_reference():
    found = _inner_gradients(_interval(torch.ops.aten.neg, _half_detached))
    assert found.state == "broken"
    assert "the gradient of low, high through -x is wrong" in found.detail
    assert "calls detach()" in found.mend and "x.unwrap()" in found.mend


@pytest.mark.slow
def test_a_rule_for_an_op_is_confirmed_by_differences():
    assert _inner_gradients(_interval(torch.ops.aten.neg, _turned)).state == "kept"


@pytest.mark.slow
def test_a_rule_above_autograd_is_confirmed_by_differences():
    assert _inner_gradients(_interval(torch.neg, _turned_above)).state == "kept"


# ---- advice for declared classes ---------------------------------------------------------------------------


class Symmetric(TensorSubclass, fallback="materialize"):
    """A matrix of sums; its transpose is a copy."""

    column: Tensor = inner()

    @staticmethod
    def outer(column):
        return Outer((column.shape[0], column.shape[0]))

    def materialize(self):
        return self.column[:, None] + self.column


@Symmetric.implements(torch.transpose, torch.t)
def _(func, x, *dims):
    return Symmetric(x.unwrap("column").clone())


class ShiftedView(TensorSubclass, fallback="views"):
    """Its rule for slices returns too much."""

    held: Tensor = inner()


@ShiftedView.implements(aten.slice.Tensor)
def _(func, x, *args, **kwargs):
    return ShiftedView(x.held[:])


class Series(TensorSubclass, fallback="views"):
    """A row of it is a plain view of its inner tensor."""

    held: Tensor = inner()


@Series.implements(aten.select.int)
def _(func, x, *args):
    return func(x.held, *args)


def broken_by(make, promise, *, skip=frozenset(), **options):
    others = {p.name for p in PROMISES} - {promise, "readable"}
    report = examine(make, paths={}, skip=others | skip, **options)
    return next((o for o in report.outcomes if o.promise.name == promise and o.state == "broken"), None)


def test_a_copy_in_place_of_a_view_may_be_kept():
    found = broken_by(lambda: Symmetric(torch.randn(5)), "views")
    assert "skip={'views', 'writes_to_views'}" in found.mend
    assert broken_by(lambda: Symmetric(torch.randn(5)), "views", skip={"views", "writes_to_views"}) is None


def test_a_declared_class_gets_no_advice_about_dispatch():
    found = broken_by(lambda: ShiftedView(torch.randn(4, 8)), "views", reference=lambda x: x.held)
    assert "use all arguments of the op" in found.mend and "__torch_dispatch__" not in found.mend


def test_a_plain_view_is_no_copy():
    found = broken_by(lambda: Series(torch.randn(4, 8)), "views")
    assert found is None or "is a copy of type" not in found.detail


class Narrow(TensorSubclass, fallback="materialize"):
    """Its rules join along the first dim, and compute in single precision, whatever they are asked."""

    held: Tensor = inner()

    def materialize(self):
        return self.held * 2


@Narrow.implements(aten.cat)
def _(func, tensors, dim=0):
    return Narrow(func([t.held for t in tensors]))


@Narrow.implements(aten.mul.Tensor)
def _(func, x, y):
    if isinstance(x, Narrow) and not isinstance(y, Tensor):
        return Narrow(func(x.held.float(), y))
    return func(*(t.materialize() if isinstance(t, Narrow) else t for t in (x, y)))


def test_a_dropped_dim_and_a_lost_dtype_are_found():
    found = broken_by(
        lambda: Narrow(torch.randn(4, 6)), "keyword_arguments", reference=lambda x: x.materialize()
    )
    assert "torch.cat([x, x], -1)" in found.detail and "x.double() * 2" in found.detail


class Tupled(Base):
    pass


@Tupled.implements(aten.mul.Tensor)
def _(func, x, y):
    return (Tupled(func(*(t.held if isinstance(t, Tupled) else t for t in (x, y)))),)


def test_a_rule_that_returns_a_tuple_is_no_refusal():
    found = broken_by(lambda: Tupled(torch.randn(4, 6)), "values")
    assert "returned" in found.detail and "one tensor" in found.detail


class Unit(TensorSubclass):
    """Refuses by a ValueError, as the guide says, and has no methods of its own."""

    held: Tensor = inner()


@Unit.implements(aten.add.Tensor)
def _(func, x, y):
    if not (isinstance(x, Unit) and isinstance(y, Unit)):
        raise ValueError("expected values of one unit")
    return Unit(func(x.held, y.held))


def test_a_rule_that_refuses_by_a_value_error_keeps_its_promises():
    assert broken_by(lambda: Unit(torch.randn(4, 6)), "values") is None


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


@Planes.implements(aten.neg)
def _(func, x):
    return Planes(func(x.normal), func(x.offset))


def test_what_the_constructor_refuses_of_a_rule_is_no_refusal():
    found = broken_by(lambda: Planes(torch.randn(4, 6, 3), torch.randn(4, 6)), "values")
    assert "x[::2] raised ValueError: normal of (2, 6, 3), offset of (4, 6)" in found.detail


class Both(TensorSubclass, fallback="map"):
    a: Tensor = inner()
    b: Tensor = inner()


@pytest.mark.slow
@pytest.mark.parametrize("last", [(7, 6), (7, 8)])
def test_sizes_that_vary_in_another_dim_at_last_are_no_fault(last):
    """A plain tensor makes a new program for them too."""

    def make(*size):
        return lambda: Both(torch.randn(size), torch.randn(size))

    report = examine(make(4, 6), sizes=[make(5, 6), make(*last)])
    assert "dynamic_shapes" not in report.broken


class Ranked(TensorSubclass, fallback="materialize"):
    """Inner tensors of unlike rank."""

    gray: Tensor = inner()
    color: Tensor = inner()

    @staticmethod
    def outer(gray, color):
        return Outer((gray.shape[0], 3, *gray.shape[1:]))

    def materialize(self):
        return torch.cat([self.gray[:, None], self.color], 1)


@pytest.mark.parametrize("convert", ["to", "clone", "empty_like"])
def test_a_memory_format_that_an_inner_tensor_cannot_have(convert):
    x = Ranked(torch.rand(2, 4, 5), torch.rand(2, 2, 4, 5))
    run = {
        "to": lambda x: x.to(torch.float64, memory_format=torch.channels_last),
        "clone": lambda x: x.clone(memory_format=torch.channels_last),
        "empty_like": lambda x: torch.empty_like(x, memory_format=torch.channels_last),
    }[convert]
    got = run(x)
    assert type(got) is Ranked and got.shape == (2, 3, 4, 5)
    if convert != "empty_like":
        torch.testing.assert_close(got.materialize(), x.materialize().to(got.dtype))


@pytest.mark.slow
def test_what_is_no_fault_of_a_class():
    class Local(TensorSubclass, fallback="materialize"):
        """Not picklable; and its materialize() has other strides than the value."""

        raw: Tensor = inner()

        def materialize(self):
            return (self.raw * 1).t().contiguous().t()

    report = examine(lambda: Local(torch.randn(4, 6)), paths={}, reference=lambda x: x.materialize())
    assert not {"serialization", "own_memory"} & {*report.broken}
    skipped = next(o for o in report.outcomes if o.promise.name == "serialization")
    assert "declare it in a module" in skipped.detail


class Larger(TensorSubclass, fallback="materialize"):
    """Its materialize() returns another size than the value shows."""

    gray: Tensor = inner()
    color: Tensor = inner()

    def materialize(self):
        return torch.cat([self.gray[:, None], self.color], 1)


def test_a_materialize_of_another_size_has_one_mend():
    report = examine(lambda: Larger(torch.randn(4, 3), torch.randn(4, 2, 3)), paths={})
    mends = {o.mend for o in report.of("broken") if "materialize: expected" in o.detail}
    assert len(mends) == 1 and "correct materialize()" in mends.pop()


# ---- a value that cannot be read ---------------------------------------------------------------------------


class WithAttribute(TensorSubclass, fallback="materialize"):
    """Sets what ops do not carry on."""

    held: Tensor = inner()

    def __init__(self, held):
        self.temperature = 2.0

    def materialize(self):
        return self.held * self.temperature


class WithStatic(TensorSubclass, fallback="materialize"):
    held: Tensor = inner()
    temperature: float = static(default=2.0)

    def materialize(self):
        return self.held * self.temperature


class PerColumn(TensorSubclass, fallback="materialize"):
    """Multiplies along the wrong dim."""

    held: Tensor = inner()
    scale: Tensor = inner()

    def materialize(self):
        return self.held * self.scale


class PerRow(PerColumn):
    def materialize(self):
        return self.held * self.scale[:, None]


UNREADABLE = {
    "an attribute that is no field": (
        lambda: WithAttribute(torch.randn(4, 6)),
        lambda: WithStatic(torch.randn(4, 6)),
        ["x.detach().materialize() raised AttributeError", "`temperature: float = static()`"],
    ),
    "sizes that materialize() does not fit": (
        lambda: PerColumn(torch.randn(4, 6), torch.rand(4)),
        lambda: PerRow(torch.randn(4, 6), torch.rand(4)),
        ["correct PerColumn.materialize (", "inner tensors held of size [4, 6], scale of size [4]"],
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
    others = {p.name for p in PROMISES} - {"readable", "values", "round_trip", "clone_and_detach"}
    assert examine(right, paths={}, skip=others).broken == []


# ---- calls that authors forget ------------------------------------------------------------------------------


class Steps(TensorSubclass, fallback="materialize"):
    """Its rule for a slice takes every entry."""

    held: Tensor = inner()

    def materialize(self):
        return 2 * self.held


@Steps.implements(aten.slice.Tensor)
def _(func, x, dim=0, start=None, end=None, step=1):
    return Steps(func(x.held, dim, start, end))


def test_a_slice_that_ignores_its_step():
    assert "x[::2]" in broken_by(lambda: Steps(torch.randn(4, 6)), "values").detail


def table(rule):
    class Table(TensorSubclass, fallback="materialize", trainable=True):
        held: Tensor = inner()

        def materialize(self):
            return 2 * self.held

    Table.implements(F.embedding)(rule)
    return lambda: Table(torch.randn(6, 4))


def test_an_embedding_without_the_arguments_of_a_module():
    found = broken_by(table(lambda func, i, w: func(i, w.unwrap("held") * 2)), "values")
    assert "nn.Embedding" in found.detail


@pytest.mark.slow
def test_an_embedding_that_trains_its_padding():
    rule = lambda func, i, w, *args, **kwargs: func(i, w.unwrap("held") * 2)  # noqa: E731
    assert "padding_idx" in broken_by(table(rule), "inner_gradients").detail
    right = lambda func, i, w, *args, **kwargs: func(i, w.unwrap("held") * 2, *args, **kwargs)  # noqa: E731
    assert broken_by(table(right), "inner_gradients") is None


class Marks(TensorSubclass, fallback="views", dtype_from="score"):
    """A view of it holds a copy of the scores; it represents no plain tensor."""

    start: Tensor = inner(dtype=torch.int64)
    score: Tensor = inner()


@Marks.implements(aten.slice.Tensor)
def _(func, x, *args):
    return Marks(func(x.start, *args), func(x.score, *args).clone())


def test_a_view_that_copies_one_inner_tensor_of_a_class_without_reference():
    make = lambda: Marks(torch.randint(0, 9, (4,)), torch.rand(4))  # noqa: E731
    assert "copy_" in broken_by(make, "writes_to_views").detail


class Averaged(TensorSubclass, fallback="materialize"):
    """Its rule for a mean takes no keepdim."""

    held: Tensor = inner()

    def materialize(self):
        return 2 * self.held


@Averaged.implements(aten.mean)
def _(func, x, dim=None, *, dtype=None):
    y = x.materialize()
    return func(y, dtype=dtype) if dim is None else func(y, dim, dtype=dtype)


@pytest.mark.slow
def test_a_rule_that_lacks_a_parameter_is_told_so_whichever_promise_meets_it():
    found = [
        o
        for o in examine(lambda: Averaged(torch.randn(4, 6)), paths={}).of("broken")
        if "rule takes" in o.detail
    ]
    assert found
    for outcome in found:
        assert "correct the parameters of that rule: a rule takes the arguments of its op" in outcome.mend
        assert "keepdim" in outcome.mend


@pytest.mark.slow
def test_a_materialize_that_writes_is_one_cause():
    class Shifted(TensorSubclass, fallback="materialize"):
        raw: Tensor = inner()

        def materialize(self):
            return self.raw.add_(1)

    report = examine(lambda: Shifted(torch.randn(4, 6)), paths={})
    mends = {o.mend for o in report.of("broken")}
    assert (
        len(mends) == 1
        and "Shifted.materialize (" in (mend := mends.pop())
        and ") writes to raw: let it" in mend
    )
    assert len(report.of("broken")) > 5 and str(report).count("mend:") == 1


@pytest.mark.slow
def test_a_size_that_outer_does_not_compute():
    class Fixed(TensorSubclass, fallback="materialize"):
        held: Tensor = inner(ndim=2)

        @staticmethod
        def outer(held):
            return Outer((4, 3))

        def materialize(self):
            return self.held * 2

    report = examine(
        lambda: Fixed(torch.randn(4, 3)),
        paths={},
        sizes=[lambda: Fixed(torch.randn(5, 3)), lambda: Fixed(torch.randn(7, 3))],
    )
    (found,) = [o for o in report.of("broken") if o.promise.name == "sizes"]
    assert "of a value of size [4, 3]" in found.detail and "got one of size (5, 3)" in found.detail
    assert "or `outer` what the value shows" in found.mend
