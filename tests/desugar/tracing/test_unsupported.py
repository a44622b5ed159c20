"""Graphs that desugar refuses go to PyTorch's AOTAutograd with a warning.

If AOTAutograd's result would be wrong, and with `strict`, the call raises an error and leaves everything as it was. The
next call works.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import desugar
from desugar import DesugarError
from desugar.tracing.modes import tracing_modes
from tests.desugar.classes import EVERY, Pair, TwoTensor, autograd_function, make
from tests.desugar.judge import (
    BOTH_DOORS,
    DOORS,
    EVERY_DOOR,
    assert_handed_over,
    assert_refused,
    assert_same_values,
    assert_wrong_everywhere,
    by_dynamo,
    by_pass,
    judge,
    snapshot,
    strictly,
    unlooked_at,
    warned,
)
from tests.doors import by_stock
from tests.tables import raising

# ---- writes that functionalization replays wrongly -----------------------------------------------------------


def rows(x):
    return x.expand(2, *x.shape)


REPEATED = {
    "zero_": lambda x: rows(x).zero_(),
    "fill_ of a part": lambda x: x.expand(3, 2, *x.shape)[0].fill_(1),
    "windows with gaps": lambda x: x.unfold(0, 1, 2).zero_(),
    "one of the windows": lambda x: x.unfold(0, 2, 1)[0].add_(1),
}
REFUSED_BY_TORCH = {
    "an assignment": lambda x: rows(x).__setitem__(slice(None), 1.0),
    "an operator": lambda x: rows(x).__iadd__(1),
    "an op": lambda x: torch.ops.aten.add_.Tensor(rows(x), 1),
    "inplace": lambda x: torch.nn.functional.relu(rows(x), inplace=True),
}


if torch.__version__ >= "2.15":  # which fills where a number is assigned to
    REPEATED["an assignment"] = REFUSED_BY_TORCH.pop("an assignment")


@pytest.mark.sweep(18)
@pytest.mark.parametrize("cls", [Tensor, TwoTensor, Pair])
@pytest.mark.parametrize("write", REPEATED.values(), ids=REPEATED)
def test_writes_that_come_back_to_one_element_several_times(write, cls):
    """Functionalization, and so PyTorch's own compiler, wrongly adds up the written copies of the element."""
    error = assert_wrong_everywhere(
        lambda x: (write(x), x * 1)[1], lambda: (make(cls, 3, 4),), "expanded|unfolded"
    )
    assert error.where is not None and "test_unsupported.py" in error.where


@pytest.mark.sweep(4)
@pytest.mark.parametrize("cls", [Tensor, TwoTensor, Pair])
@pytest.mark.parametrize("write", REFUSED_BY_TORCH.values(), ids=REFUSED_BY_TORCH)
def test_writes_that_eager_mode_refuses_as_well(write, cls):
    """PyTorch's own compiler takes them."""
    fn, x = lambda x: (write(x), x * 1)[1], make(cls, 3, 4)
    before = snapshot([x])
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor") as caught:
        fn(x)
    assert snapshot([x]) == before and not isinstance(caught.value, DesugarError)
    assert_wrong_everywhere(fn, lambda: (make(cls, 3, 4),), "writes to an expanded tensor")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cls", [Tensor, TwoTensor, Pair])
@BOTH_DOORS
def test_writes_to_each_element_once(cls, door):
    def fn(x):
        x.expand(2, *x.shape)[0].add_(1)
        x.expand(1, *x.shape).mul_(3)
        x.expand(2, *x.shape).requires_grad_(False)
        x.view(-1)[::2].zero_()
        return x * 1

    judge(fn, lambda: (make(cls, 3, 4),), way=door, calls=2)


# ---- code that AOTAutograd compiles --------------------------------------------------------------------------


def data_assigned(x, y):
    y.data = y * 2
    return x * y


@pytest.mark.parametrize("cls", [Tensor, TwoTensor])
@pytest.mark.parametrize("door", [*DOORS.values(), by_stock])
def test_data_of_an_argument_assigned(cls, door, caplog):
    """The version counter alone is not eager's, as in PyTorch's own compiler."""
    assert_refused(
        data_assigned,
        lambda: (make(cls, 2, 3), torch.ones(2, 3)),
        "another size, stride or inner tensor in place",
    )
    compiled, x = door(data_assigned), make(cls, 2, 3)
    for _ in range(2):
        assert_same_values(
            *[(fn(x, y), y) for fn in (compiled, data_assigned) for y in [torch.full((2, 3), 3.0)]]
        )
    said = any("another size, stride or inner tensor" in message for message in warned(caplog))
    assert said is (door is not by_stock)


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=layout)


NESTED = {
    "an argument": (lambda x: x * 2, lambda: nested(torch.jagged)),
    "made inside": (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), lambda: torch.ones(3)),
    "without a layout": (lambda x: x * 2, lambda: nested(torch.strided)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("door", DOORS.values())
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_of_pytorch(name, door, caplog):
    fn, make_x = NESTED[name]
    x = make_x()
    if x.layout is torch.strided and x.is_nested:
        assert all(map(torch.equal, strictly(fn)(x).unbind(), fn(x).unbind()))
    else:
        with pytest.raises(DesugarError, match="nested tensor"):
            strictly(fn)(x)
    assert all(map(torch.equal, door(fn)(x).unbind(), fn(x).unbind()))
    assert any("nested tensor" in message for message in warned(caplog)) is (name != "without a layout")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cls", [Tensor, TwoTensor, Pair])
@pytest.mark.parametrize("door", DOORS.values())
def test_gradients_left_off(cls, door, caplog):
    left_off = lambda x: (x * 3, torch.set_grad_enabled(False))[0]  # noqa: E731
    make_args = lambda: (make(cls, 2, 3, grad=True),)  # noqa: E731
    assert_refused(left_off, make_args, "leaves gradients turned off")
    compiled = door(left_off)
    for _ in range(2):
        with torch.enable_grad():
            assert compiled(*make_args()).requires_grad and not torch.is_grad_enabled()
    assert ["leaves gradients turned off" in message for message in warned(caplog)].count(True) == 1


@pytest.mark.sweep(3)
@pytest.mark.parametrize("cls", [Tensor, TwoTensor, Pair])
def test_gradients_turned_on_where_they_are_off(cls, caplog):
    fn = torch.enable_grad()(lambda x: (lambda y: (y, y * 3))(x * 2))
    match, make_args = "requires grad although gradients are off", lambda: (make(cls, 2, 3, grad=True),)
    assert_handed_over(fn, make_args, match, caplog, around=torch.no_grad)


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("way", [by_pass, by_dynamo])
def test_a_zero_gradient_whose_size_would_be_a_constant(grad, way, caplog):
    """The zero gradient of `sgn` is recorded with numbers, so a program whose sizes are symbols has none."""
    fn = lambda x: (torch.sgn(x.sin()) * 2).sum()  # noqa: E731
    compiled = way(fn, dynamic=True)
    for size in (4, 5, 6):
        judge(fn, lambda size=size: (torch.randn(size, 3, requires_grad=grad),), compiled)
    assert bool(warned(caplog)) is grad
    torch.compiler.reset()
    with pytest.raises(DesugarError, match="dynamic=False") if grad else contextlib.nullcontext():
        by_pass(fn, dynamic=True, strict=True)(torch.randn(4, 3, requires_grad=grad))


def retains_grad(x):
    y = x * 2
    y.retain_grad()
    return (y * y).sum()


outside = torch.ones(3, requires_grad=True)


bypass = autograd_function(lambda ctx, x, w: x.clone(), lambda ctx, g: (g, g))


UNLOOKED_AT = {
    "grad": (lambda x: x * 2 if x.grad is None else x, r"\.grad of a tensor is used"),
    "retain_grad": (retains_grad, r"retain_grad\(\) is called"),
    "a buffer": (
        lambda x: torch.frombuffer(bytearray(12), dtype=torch.float32) + x,
        "made inside the function by code",
    ),
    "a parameter": (lambda x: bypass(x, outside), "reaches an autograd.Function directly"),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", UNLOOKED_AT)
def test_functions_that_dynamo_does_not_look_at(name, caplog):
    fn, match = UNLOOKED_AT[name]
    inside = unlooked_at(fn)
    outside.grad = None
    error = assert_handed_over(
        lambda x: inside(x) + 1, lambda: (torch.ones(3, requires_grad=True),), match, caplog
    )
    assert error.where is not None
    assert name != "a parameter" or outside.grad is not None


def test_data_assigned_where_dynamo_does_not_look():
    def fn(x):
        y = x.clone()
        y.data = y * 2
        return y

    inside = unlooked_at(fn)
    error = assert_wrong_everywhere(lambda x: inside(x) + 1, lambda: (torch.ones(3),), r"\.data of a tensor")
    assert error.where is not None and error.where.endswith("y.data = y * 2")


@pytest.mark.sweep(3)
@EVERY_DOOR
def test_a_function_that_fills_a_cache_where_dynamo_does_not_look(door):
    """The cache then holds what has no data, behind PyTorch's own compiler as well."""
    table: list[Tensor] = []
    inside = unlooked_at(lambda x: (table or table.append(torch.arange(3.0) * 2), x + table[0])[1])
    for way in (by_stock, door):
        torch.compiler.reset()
        table.clear()
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            way(lambda x: inside(x) * 1)(torch.ones(3))
    assert door is not strictly or "keeps a tensor of size (3,) for its next call" in str(caught.value)


class Assigns(TwoTensor):
    """Its dispatch assigns `.data` of an inner tensor."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mul.Tensor:
            args[0].a.data = args[0].a.data + 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return Assigns(inner["a"], inner["b"])


def test_data_that_a_dispatch_assigns():
    """Where no torch function is seen; PyTorch's own compiler loses the assignment."""
    assert_wrong_everywhere(
        lambda x: x * 2,
        lambda: (Assigns(torch.ones(3), torch.ones(3)),),
        "is assigned by a rule or __torch_dispatch__",
    )


class Misbuilt(TwoTensor):
    """Inherits how it is rebuilt, as another class."""


@EVERY_DOOR
def test_a_class_that_is_rebuilt_as_another(door):
    x = Misbuilt(torch.ones(3), torch.ones(3))
    refused = (DesugarError, AssertionError, torch._dynamo.exc.BackendCompilerFailed)
    with pytest.raises(refused, match=r"Misbuilt\.__tensor_unflatten__ returns a TwoTensor|got .*Misbuilt"):
        door(lambda x: x * 2)(x)


# ---- odd arguments -------------------------------------------------------------------------------------------

LAZY = {
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "conjugated, in a wrapper": lambda: Pair(*(torch.randn(3, dtype=torch.complex64).conj() for _ in "ab")),
}


@BOTH_DOORS
@pytest.mark.parametrize("name", LAZY)
def test_lazily_conjugated_and_negated_arguments(name, door):
    judge(lambda x: (x * 2, x.sin() + 1), lambda: (LAZY[name](),), way=door, calls=2)


class Named(torch.Tensor):
    """No wrapper: a tensor with memory of its own whose class sees every torch function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        return out + 100 if func is torch.Tensor.mul else out


class PlainParameter(torch.nn.Parameter):
    """A class that changes nothing."""


@pytest.mark.sweep(3)
@EVERY_DOOR
def test_a_class_that_sees_torch_functions_and_is_no_wrapper(door):
    """Right or refused, or as in PyTorch's own compiler, which refuses it before 2.15, and after loses the class."""
    x = torch.ones(3).as_subclass(Named)
    for fn, args in ((lambda x: x * 2, (x,)), (lambda y: y * x, (torch.ones(3),))):
        is_lost = torch.__version__ >= "2.15" and door is not strictly
        want = (by_stock(fn) if is_lost else fn)(*args)
        torch.compiler.reset()
        with contextlib.suppress(DesugarError, TypeError, torch._dynamo.exc.BackendCompilerFailed):
            assert_same_values([door(fn)(*args)], [want])
    judge(lambda x: x * 2, lambda: (PlainParameter(torch.ones(3)),), way=door)


# ---- the error -----------------------------------------------------------------------------------------------


def test_strict_by_the_environment(monkeypatch):
    fn, x = NESTED["an argument"][0], nested(torch.jagged)
    monkeypatch.setenv("DESUGAR_STRICT", "1")
    for door in DOORS.values():
        with pytest.raises((DesugarError, torch._dynamo.exc.BackendCompilerFailed), match="nested tensor"):
            door(fn)(x)
    monkeypatch.setenv("DESUGAR_STRICT", "0")
    torch.compiler.reset()
    assert torch.equal(by_pass(fn)(x).values(), x.values() * 2)


test_trace_raises_what_the_pass_does_not_take = raising(
    [
        (
            lambda: desugar.trace(lambda x: rows(x).zero_(), torch.ones(3)),
            *(DesugarError, "writes to an expanded tensor"),
        ),
        (lambda: desugar.trace(lambda x: x * 2, nested(torch.jagged)), DesugarError, "nested tensor"),
    ]
)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("cls", EVERY)
def test_a_refusal_and_a_call_that_is_taken(cls):
    """One function, whose next call gets another graph."""
    refused, taken = (lambda n=n: (make(cls, 2, 6, grad=True), torch.ones(n)) for n in (3, 4))
    assert_refused(
        lambda x, y: (y.expand(2, 3).zero_() if y.shape[0] == 3 else None, x * 2, y)[1:],
        refused,
        "writes to an expanded tensor",
        works=taken,
    )


# ---- a trace -------------------------------------------------------------------------------------------------


UNKNOWN = {
    "a branch": (lambda x: bool(x.sum() > 0), "depends on the data of a tensor"),
    "a list": (lambda x: x.tolist(), "depends on the data|numbers in a tensor are read"),
    "memory": (lambda x: x.data_ptr(), "the memory of a tensor is read"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_a_trace_cannot_know_is_named(name):
    """Dynamo finds such reads in the user's code; class code, and code that Dynamo skips, may do them in a trace."""
    read, match = UNKNOWN[name]
    with pytest.raises(DesugarError, match=match) as caught, tracing_modes(FakeTensorMode()):
        read(torch.ones(3))
    assert caught.value.instead and caught.value.where is not None
