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
from subclasses.testing import PATHS, examine
from tests.subclasses.testing import broken
from tests.subclasses.testing.byhand import Tagged
from tests.subclasses.testing.faults import (
    check_found,
    check_kept,
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


class Refusing(TensorSubclass):
    """No fallback."""

    held: Tensor = inner()

    def materialize(self):
        return self.held * 2


class Parts(Refusing):
    """Its rule runs ops on a value, which have no rules."""


Parts.implements(F.linear)(of_parts)


class KeepsTag(broken.ForgetsTag):
    """Its context has the tag."""

    __tensor_flatten__ = Tagged.__tensor_flatten__
    unflatten = staticmethod(lambda data_, tag: (data_, tag))


# ---- the test ----------------------------------------------------------------------------------------------


def values_of(cls):
    if issubclass(cls, Global):
        return lambda: cls(torch.randint(0, 16, (4, 6)), torch.rand(4, 1))
    if issubclass(cls, Shifted):
        return lambda: cls(torch.randn(4, 6), torch.randn(4, 6))
    return lambda: cls(torch.randn(4, 6))


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
        ruled(F.linear, of_fields, Refusing),
        ["rules_tried"],
        ["of_parts (", "Parts has no rule for aten.t.default", "compute with the inner tensors: x.unwrap()"],
    ),
    "a rule that writes": (
        ruled(aten.abs.default, writing),
        ruled(aten.abs.default, lambda func, x: Base(func(x.held))),
        ["arguments", "gradients"],
        ["writing (", "writes to its argument: compute into a new tensor"],
    ),
    "a rule for the left operand": (
        ruled(aten.mul.Tensor, left),
        ruled(aten.mul.Tensor, lambda func, x, y: func(plain(x), plain(y))),
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
    options = {"paths": PATHS, "skip": only(*promises) | {"readable"}}
    for found in outcomes(values_of(wrong), *promises, **options).values():
        if found.promise.name in promises:
            assert found.state == "broken" and all(word in found.mend for word in words), found
    check_kept(values_of(right), *promises, **options)


@pytest.mark.slow
def test_a_profiler_goes_on_where_the_kit_looks_for_the_rules_at_fault():
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        # The profiler; None since Python 3.12, where it is a tool of `sys.monitoring`.
        before = sys.getprofile()
        check_found(values_of(Detached), "inner_gradients", ["Detached"])
        assert sys.getprofile() is before
        functools.reduce(int.__add__, [1, 2])  # a call to see
    finally:
        profiler.disable()
    assert any("reduce" in name for _, _, name in pstats.Stats(profiler).stats)


def test_a_rule_that_was_not_tried_is_named_if_it_loses_gradients():
    report = examine(values_of(ruled(F.cosine_similarity, raw)), paths={}, skip=only("rules_tried"))
    (found,) = (o for o in report.outcomes if o.promise.name == "rules_tried")
    assert found.state == "skipped" and "raw (" in found.detail
    screen = " ".join(str(report).split())
    assert 'reads the raw .held above autograd, where it carries no gradient: x.unwrap("held") does' in screen
    assert "not called: cosine_similarity" in screen


@pytest.mark.slow
def test_an_op_whose_arguments_have_defaults_is_called_though_it_gives_a_view():
    wrong = ruled(aten.diagonal, lambda func, x, offset=0, *dims: func(plain(x), offset + 1, *dims))
    words = ["aten.diagonal.default(x) is not what its reference gives"]
    check_found(of_tensors(wrong, (4, 6)), "values", words)
    right = ruled(aten.diagonal, lambda func, x, *dims: func(x.held, *dims) * 2)
    check_kept(of_tensors(right, (4, 6)), "values", "rules_tried")


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


class Left(Tagged):
    """Reads the tag of the first operand."""

    @classmethod
    def run(cls, func, args, kwargs):
        return super().run(func, args, kwargs) if args[0].tag else None


def test_a_rule_written_by_hand_that_takes_a_plain_operand_for_its_own():
    check_found(of_tensors(Left, (4, 6)), "values", ["run (", "reads .tag of an operand without a test"])


def test_a_copy_that_is_lost_is_told_of_where_a_module_loads():
    words = ["a parameter after load_state_dict(assign=False): data_:", "calls weight.copy_(saved)"]
    check_found(of_tensors(broken.LoadsNothing, (4, 6)), "parameter", [*words, "aten.copy_"])


# ---- gradients of a class that stands for no plain tensor ---------------------------------------------------


class Ends(TensorSubclass):
    low: Tensor = inner()
    high: Tensor = inner()


def _turned_above(func, x):
    low, high = x.unwrap()
    return type(x)(-high, -low)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "rule", "words"),
    [
        (
            aten.neg,
            lambda func, x: type(x)(-x.high.detach(), -x.low),
            ["the gradient of low, high through -x is wrong", "<lambda> (", "uses detach, behind which"],
        ),
        (aten.neg, lambda func, x: type(x)(-x.high, -x.low), []),
        (torch.neg, _turned_above, []),
    ],
)
def test_gradients_without_a_reference_are_compared_with_differences(key, rule, words):
    cls = ruled(key, rule, Ends)
    make = lambda: cls(torch.rand(3, 4), torch.rand(3, 4) + 2)  # noqa: E731
    if words:
        check_found(make, "inner_gradients", words)
    else:
        check_kept(make, "inner_gradients")


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


class Views(TensorSubclass, fallback="views"):
    held: Tensor = inner()


def test_a_copy_in_place_of_a_view_may_be_kept():
    both = {"views", "writes_to_views"}
    check_found(of_tensors(Symmetric, (5,)), "views", ["skip={'views', 'writes_to_views'}"])
    report = examine(of_tensors(Symmetric, (5,)), paths={}, skip=only("views") | both)
    assert "views" not in report.broken


def test_a_declared_class_gets_no_advice_about_dispatch():
    cls = ruled(aten.slice.Tensor, lambda func, x, *args, **kwargs: type(x)(x.held[:]), Views)
    found = outcome(of_tensors(cls, (4, 8)), "views", reference=lambda x: x.held)
    assert found.state == "broken"
    assert "which ran" in found.mend and "__torch_dispatch__" not in found.mend


def test_a_plain_view_is_no_copy():
    """A row of the class is a plain view of its inner tensor."""
    cls = ruled(aten.select.int, lambda func, x, *args: func(x.held, *args), Views)
    assert "is a copy of type" not in outcome(of_tensors(cls, (4, 8)), "views").detail


def single(func, x, y):
    """Computes in single precision, whatever it is asked."""
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


class Marks(TensorSubclass, fallback="views", dtype_from="score"):
    """It represents no plain tensor."""

    start: Tensor = inner(dtype=torch.int64)
    score: Tensor = inner()


Copying = ruled(
    aten.slice.Tensor,
    lambda func, x, *args: type(x)(func(x.start, *args), func(x.score, *args).clone()),
    Marks,
)
TwiceHeld = with_rules(Base, {}, trainable=True)


# The values, the promise, words of the report.
FOUND = {
    "a dim and a dtype dropped": (
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
        "keyword_arguments",
        ["torch.cat([x, x], -1)", "x.double() * 2"],
    ),
    "a tuple for one tensor": (
        of_tensors(
            ruled(
                aten.mul.Tensor, lambda func, x, y: (Base(func(*(getattr(t, "held", t) for t in (x, y)))),)
            ),
            (4, 6),
        ),
        "values",
        ["returned", "one tensor"],
    ),
    "what the constructor refuses of a rule": (
        of_tensors(Planes, (4, 6, 3), (4, 6)),
        "values",
        ["x[::2] raised ValueError: normal of (2, 6, 3), offset of (4, 6)"],
    ),
    "a step ignored": (
        of_tensors(
            ruled(
                aten.slice.Tensor,
                lambda func, x, dim=0, start=None, end=None, step=1: type(x)(func(x.held, dim, start, end)),
            ),
            (4, 6),
        ),
        "values",
        ["x[::2]"],
    ),
    "an embedding without the arguments of a module": (
        of_tensors(ruled(F.embedding, lambda func, i, w: func(i, w.unwrap("held") * 2), TwiceHeld), (6, 4)),
        "values",
        ["nn.Embedding"],
    ),
    "one inner tensor of a view copied, without reference": (
        lambda: Copying(torch.randint(0, 9, (4,)), torch.rand(4)),
        "writes_to_views",
        ["copy_"],
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_it_is_found(case):
    make, promise, words = FOUND[case]
    check_found(make, promise, words)


@pytest.mark.slow
def test_an_embedding_that_trains_its_padding():
    wrong = ruled(F.embedding, lambda func, i, w, *args, **kwargs: func(i, w.unwrap("held") * 2), TwiceHeld)
    right = ruled(
        F.embedding,
        lambda func, i, w, *args, **kwargs: func(i, w.unwrap("held") * 2, *args, **kwargs),
        TwiceHeld,
    )
    check_found(of_tensors(wrong, (6, 4)), "inner_gradients", ["padding_idx"])
    assert outcome(of_tensors(right, (6, 4)), "inner_gradients").state != "broken"


class Unit(TensorSubclass):
    """Refuses by a ValueError, as the guide says, and has no methods of its own."""

    held: Tensor = inner()


@Unit.implements(aten.add.Tensor)
def _(func, x, y):
    if not (isinstance(x, Unit) and isinstance(y, Unit)):
        raise ValueError("expected values of one unit")
    return Unit(func(x.held, y.held))


def test_a_rule_that_refuses_by_a_value_error_keeps_its_promises():
    assert outcome(of_tensors(Unit, (4, 6)), "values").state != "broken"


class Both(TensorSubclass, fallback="map"):
    a: Tensor = inner()
    b: Tensor = inner()


@pytest.mark.slow
@pytest.mark.parametrize("last", [(7, 6), (7, 8)])
def test_sizes_that_vary_in_another_dim_at_last_are_no_fault(last):
    """A plain tensor makes a new program for them too."""
    first, second, third = (of_tensors(Both, size, size) for size in ((4, 6), (5, 6), last))
    assert "dynamic_shapes" not in examine(first, sizes=[second, third]).broken


class Ranked(TensorSubclass, fallback="materialize"):
    """Inner tensors of unlike rank."""

    gray: Tensor = inner()
    color: Tensor = inner()

    @staticmethod
    def outer(gray, color):
        return Outer((gray.shape[0], 3, *gray.shape[1:]))

    def materialize(self):
        return torch.cat([self.gray[:, None], self.color], 1)


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


class WithStatic(TensorSubclass, fallback="materialize"):
    held: Tensor = inner()
    temperature: float = static(default=2.0)

    def materialize(self):
        return self.held * self.temperature


class WithAttribute(TensorSubclass, fallback="materialize"):
    """Sets what ops do not carry on."""

    held: Tensor = inner()

    def __init__(self, held):
        self.temperature = 2.0

    materialize = WithStatic.materialize


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
        of_tensors(WithAttribute, (4, 6)),
        of_tensors(WithStatic, (4, 6)),
        ["x.detach().materialize() raised AttributeError", "`temperature: float = static()`"],
    ),
    "sizes that materialize() does not fit": (
        of_tensors(PerColumn, (4, 6), (4,)),
        of_tensors(PerRow, (4, 6), (4,)),
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
    promises = only("values", "round_trip", "clone_and_detach")
    assert examine(right, paths={}, skip=promises).broken == []


# ---- one cause that several promises meet --------------------------------------------------------------------


@pytest.mark.slow
def test_a_rule_that_lacks_a_parameter_is_told_so_whichever_promise_meets_it():
    def mean(func, x, dim=None, *, dtype=None):
        return func(plain(x), *([] if dim is None else [dim]), dtype=dtype)

    report = examine(of_tensors(ruled(aten.mean, mean), (4, 6)), paths={})
    mends = [o.mend for o in report.of("broken") if "rule takes" in o.detail]
    words = ("correct the parameters of that rule: a rule takes the arguments of its op", "keepdim")
    assert mends and all(word in mend for mend in mends for word in words)


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
