"""Attributes of a tensor subclass in a compiled function: properties, views, assignments to inner tensors."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from subclasses import TensorSubclass, inner, static
from tests.desugar.classes import Pair, Single, TwoTensor, make, plain_parts
from tests.desugar.judge import DOORS, assert_same_values, by_dynamo, by_pass, judge, leaves_of
from tests.doors import by_stock, by_torch
from tests.modules import Held

EVERY_DOOR = pytest.mark.parametrize("door", DOORS.values())


class Ends(TensorSubclass, fallback="map"):
    """Two tensors of one size, and properties that derive from them."""

    low: Tensor = inner()
    high: Tensor = inner()
    unit: str = static(default="m")
    width = property(lambda self: self.high - self.low)
    both = property(lambda self: (self.low, self.high))
    label = property(lambda self: f"in {self.unit}")
    rows = property(lambda self: self.low.shape[0])
    middle = property(lambda self: self.low + self.width / 2)
    recent = property(lambda self: self.noted)

    @property
    def absent(self):
        raise AttributeError("there is none")


def ends():
    return Ends(torch.arange(3.0), torch.arange(3.0) * 2 + 1)


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


@pytest.mark.sweep(18)
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
VIEW_FUNCTIONS = {
    "returned": lambda w, view: getattr(w, view),
    "written": lambda w, view: getattr(w, view).mul_(10),
    "an inner tensor written": lambda w, view: (getattr(w, view), w.twice.mul_(10))[0],
    "both written": lambda w, view: (getattr(w, view).mul_(10), w.twice.mul_(10))[0],
}


@pytest.mark.sweep(56)
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
    judge(
        lambda w: (getattr(w, view).mul_(10), getattr(w, view))[1],
        lambda: (Pair(torch.ones(1, 2), torch.ones(1, 2)),),
        way=door,
        around=torch.no_grad,
    )


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


@pytest.mark.sweep(36)
@EVERY_DOOR
@pytest.mark.parametrize("cls", [Tensor, Pair])
@pytest.mark.parametrize("asked", QUESTIONS)
def test_whether_a_tensor_is_a_parameter_or_a_buffer(asked, cls, door):
    fn = lambda x: x * (2 if isinstance(x, QUESTIONS[asked]) else 3)  # noqa: E731
    compiled = door(fn)
    for flag in (*FLAGGED, *reversed(FLAGGED)):
        x = FLAGGED[flag](make(cls, 2))
        assert_same_values([compiled(x).detach()], [fn(x).detach()])


# ---- assignments to a part of a tensor subclass --------------------------------------------------------------

ASSIGNING_WAYS = {"pass": by_pass, "dynamo": by_torch}


def of_an_argument(x):
    x.a = x.a * 3
    return x + 1


def after_a_use(x):
    y = x * 2
    x.a = x.a + 1
    return y, x * y


def of_an_intermediate(x):
    y = x * 2
    y.a = y.a + 1
    return y + 1


def without_gradients(x):
    with torch.no_grad():
        x.b = x.b.detach() * 2
    return x.sin()


ASSIGNING = {
    "of an argument": of_an_argument,
    "after a use": after_a_use,
    "of an intermediate": of_an_intermediate,
    "in a function of its own": lambda x: (of_an_argument(x), x * 2)[1],
    "by name": lambda x: (setattr(x, "a", x.a * 5), x.a, x + 1)[1:],
    "without gradients": without_gradients,
}


@pytest.mark.sweep(20)
@pytest.mark.parametrize("way", ASSIGNING_WAYS)
@pytest.mark.parametrize("cls", [TwoTensor, Pair])
@pytest.mark.parametrize("name", ASSIGNING)
def test_ops_after_it_see_the_new_tensor(name, cls, way):
    judge(ASSIGNING[name], lambda: (make(cls, 2, 6),), ASSIGNING_WAYS[way](ASSIGNING[name]))


@pytest.mark.parametrize("way", ASSIGNING_WAYS)
def test_of_a_nested_value(way):
    def fn(x):
        x.b.a = x.b.a * 3
        return x + 1

    judge(fn, lambda: (Pair(torch.ones(2), make(Pair, 2)),), way=ASSIGNING_WAYS[way], calls=2)


class Scaling(Held):
    def forward(self, x):
        self.weight.a = self.weight.a + 1
        return x * self.weight


def test_of_a_parameter_of_a_module():
    module = Scaling(weight=nn.Parameter(make(Pair, 6), requires_grad=False))
    compiled, first = by_torch(module), module.weight.a
    for count in (1, 2, 3):
        out = compiled(torch.ones(6))
        torch.testing.assert_close(module.weight.a, first + count)
        torch.testing.assert_close(plain_parts(out), plain_parts(module.weight))


def test_a_whole_graph_is_refused_with_the_reason():
    x = make(Pair, 3)
    kept = x.a
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"the next one sees the new[\s\S]*Pair\.a = "):
        by_dynamo(of_an_argument)(x)
    assert x.a is kept


def test_other_attributes_keep_one_graph():
    def marks(x):
        x.mark = 1
        return x + 1

    x = make(Pair, 3)
    assert by_dynamo(marks)(x).a.shape == (3,) and x.mark == 1


@pytest.mark.parametrize(("cls", "graphs"), [(Pair, 2), (TwoTensor, 1)])
def test_other_backends_end_the_graphs_of_declared_classes(cls, graphs):
    counter = CompileCounterWithBackend("eager")
    torch.compile(of_an_argument, backend=counter)(make(cls, 3))
    assert counter.frame_count == graphs


# ---- a class whose own dispatch assigns ----------------------------------------------------------------------


class Replacing(Single):
    """A class that writes by another inner tensor, as some quantized weights do."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.mul_.Tensor:
            return super().__torch_dispatch__(func, types, args, kwargs)
        args[0].a = args[0].a * args[1]
        return args[0]


# Functions of values of the class, and of how many.
REPLACING = {
    "doubles": (lambda x: (x.mul_(2), x + 1)[1], 1),
    "doubles twice": (lambda x, y: (x.mul_(2), y.mul_(5), x.mul_(3), x + y)[3], 2),
}


def adds(x, y):
    x.mul_(2)
    return x + y


def replacing(count):
    return tuple(Replacing(torch.arange(3.0) + n) for n in range(count))


def assert_same(got, want):
    torch.testing.assert_close([x.a for x in got], [x.a for x in want])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", ASSIGNING_WAYS)
@pytest.mark.parametrize(("fn", "count"), REPLACING.values(), ids=REPLACING)
def test_a_dispatch_that_replaces_inner_tensors(fn, count, way):
    compiled, mine, theirs = ASSIGNING_WAYS[way](fn), replacing(count), replacing(count)
    for _ in range(3):
        assert_same([compiled(*mine), *mine], [fn(*theirs), *theirs])


REFUSED = {
    "read": (
        lambda x: (x.mul_(2), x.a + 1)[1],
        lambda x: (x,),
        r"Dynamo reads \.a before the graph runs[\s\S]*instead: write to \.a with copy_",
    ),
    "an argument too": (
        adds,
        lambda x: (x, x.a),
        r"before the graph runs[\s\S]*pass a clone\(\) of \.a",
    ),
}


@pytest.mark.parametrize("way", ASSIGNING_WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_replaced_inner_tensor_that_is_used_is_refused(name, way):
    fn, arguments, said = REFUSED[name]
    (x,) = replacing(1)
    with pytest.raises(Exception, match=said):
        ASSIGNING_WAYS[way](fn)(*arguments(x))
    assert_same([x], replacing(1))


@pytest.mark.parametrize("way", ASSIGNING_WAYS)
def test_a_clone_of_a_replaced_inner_tensor_is_an_argument(way):
    ((x,), (same,)) = replacing(1), replacing(1)
    assert_same([ASSIGNING_WAYS[way](adds)(x, x.a.clone()), x], [adds(same, same.a.clone()), same])
