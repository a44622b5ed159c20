"""Properties of a tensor subclass in a compiled function: eager mode is the judge, after writes as well."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from subclasses import TensorSubclass, inner, static
from tests.desugar.classes import Pair, Single
from tests.desugar.idioms.running import DOORS
from tests.desugar.judge import assert_same_values, judge, leaves_of
from tests.doors import by_stock

EVERY_DOOR = pytest.mark.parametrize("door", DOORS.values())


class Ends(TensorSubclass, fallback="map"):
    """Two tensors of one size, and what follows from them."""

    low: Tensor = inner()
    high: Tensor = inner()
    unit: str = static(default="m")

    @property
    def width(self):
        return self.high - self.low

    @property
    def both(self):
        return self.low, self.high

    @property
    def label(self):
        return f"in {self.unit}"

    @property
    def rows(self):
        return self.low.shape[0]

    @property
    def middle(self):
        return self.low + self.width / 2

    @property
    def absent(self):
        raise AttributeError("there is none")

    @property
    def recent(self):
        return self.noted


def ends(rows=3, grad=False):
    return Ends(torch.arange(float(rows)), torch.arange(float(rows)) * 2 + 1).requires_grad_(grad)


FUNCTIONS = {
    "alone": lambda x: x.width * 1,
    "after a write": lambda x: (x.mul_(3), x.width * 1)[1],
    "after a write to an inner tensor": lambda x: (x.low.mul_(3), x.width * 1)[1],
    "after a write through a view": lambda x: (x[1:].mul_(3), x.width * 1)[1],
    "before and after a write": lambda x: (x.width * 1, x.mul_(3), x.width * 1)[::2],
    "of another property": lambda x: (x.mul_(3), x.middle * 1)[1],
    "a tuple": lambda x: (x.mul_(3), x.both[0] * x.both[1])[1],
    "a text": lambda x: x * 2 if x.label == "in m" else x + 1,
    "a size": lambda x: x * x.rows,
    "of an intermediate": lambda x: (x * 3).width * 1,
    "of an intermediate, a text": lambda x: x * 2 if (x * 3).label == "in m" else x + 1,
    "absent": lambda x: x * getattr(x, "absent", 5),
    "hasattr": lambda x: (x * hasattr(x, "width"), x + hasattr(x, "absent")),
    "as it is": lambda x: (x.both, x.width),
}


@pytest.mark.sweep(9)
@EVERY_DOOR
@pytest.mark.parametrize("name", FUNCTIONS)
def test_properties(name, door):
    judge(FUNCTIONS[name], lambda: (ends(),), way=door, calls=3)


@EVERY_DOOR
def test_an_attribute_that_a_property_reads_may_change(door):
    fn, x = lambda x: x * x.recent, ends()
    compiled = door(fn)
    for noted in (1, 2, 5):
        x.noted = noted
        assert compiled(x).equal(fn(x))


# ---- views that are attributes of a tensor -------------------------------------------------------------------


class Half(TensorSubclass, fallback="materialize"):
    twice: Tensor = inner()

    def materialize(self):
        return self.twice / 2


class HalfWithRules(Half):
    """A class whose torch functions are intercepted."""


@HalfWithRules.implements(torch.nn.functional.linear)
def _(func, x, w, bias=None):
    return func(x, w.twice, bias) / 2


class HalfByHand(Single):
    """A materializing class that is written by hand."""

    @property
    def twice(self):
        return self.a

    def plain(self):
        return self.a / 2

    @classmethod
    def wrap(cls, out):
        return out


VIEWS = ("T", "mT", "H", "mH")


def write_and_return(w, view):
    transposed = getattr(w, view)
    transposed.mul_(10)
    return transposed


VIEW_FUNCTIONS = {
    "returned": lambda w, view: getattr(w, view),
    "written": write_and_return,
    "an inner tensor written": lambda w, view: (getattr(w, view), w.twice.mul_(10))[0],
    "both written": lambda w, view: (write_and_return(w, view), w.twice.mul_(10))[0],
}


@pytest.mark.sweep(28)
@pytest.mark.parametrize("door", [*DOORS.values(), by_stock])
@pytest.mark.parametrize("name", VIEW_FUNCTIONS)
@pytest.mark.parametrize("cls", [Half, HalfWithRules, HalfByHand])
def test_views_that_are_attributes(cls, name, door):
    if cls is HalfByHand and door is by_stock:
        pytest.skip("PyTorch's own Dynamo reads the attribute after the graph")
    for view in VIEWS:
        torch.compiler.reset()
        fn = functools.partial(VIEW_FUNCTIONS[name], view=view)
        with torch.no_grad():
            wanted, got = (f(cls(torch.tensor([[2.0, 4.0]]))) for f in (fn, door(fn)))
        assert_same_values(leaves_of(got), leaves_of(wanted))


@pytest.mark.sweep(2)
@EVERY_DOOR
@pytest.mark.parametrize("view", [*VIEWS, "real"])
def test_a_view_of_a_mapped_class_is_written(view, door):
    def fn(w):
        getattr(w, view).mul_(10)
        return getattr(w, view)

    with torch.no_grad():
        judge(fn, lambda: (Pair(torch.ones(1, 2), torch.ones(1, 2)),), way=door)


# ---- Parameters and buffers --------------------------------------------------------------------------------

FLAGGED = {
    "plain": lambda x: x,
    "with a gradient": lambda x: x.requires_grad_(),
    "parameter": nn.Parameter,
    "frozen parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "buffer": nn.Buffer,
}
QUESTIONS = {
    "parameter": nn.Parameter,
    "buffer": nn.Buffer,
    "both": (nn.Parameter, nn.Buffer),
    "union": nn.Parameter | nn.Buffer,
}


@pytest.mark.sweep(18)
@EVERY_DOOR
@pytest.mark.parametrize("cls", [Tensor, Pair])
@pytest.mark.parametrize("asked", QUESTIONS)
def test_whether_a_tensor_is_a_parameter_or_a_buffer(asked, cls, door):
    def fn(x):
        return x * (2 if isinstance(x, QUESTIONS[asked]) else 3)

    compiled = door(fn)
    for flag in (*FLAGGED, *reversed(FLAGGED)):
        x = torch.ones(2) if cls is Tensor else Pair(torch.ones(2), torch.ones(2))
        x = FLAGGED[flag](x)
        assert_same_values([compiled(x).detach()], [fn(x).detach()])
