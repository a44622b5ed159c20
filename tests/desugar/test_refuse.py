"""What the pass does not take is refused with a reason, before anything is changed; the next call works."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import nn

import desugar
from desugar import DesugarError
from tests.desugar.classes import EVERY, Pair, TwoTensor, make, metadata, plain_parts
from tests.desugar.judge import by_dynamo, by_pass, judge, tensors_of, versions


def snapshot(args):
    """All that a refused call may not change."""
    tensors = tensors_of(args)
    parts = [part for tensor in tensors for part in plain_parts(tensor)]
    return (
        [metadata(t) for t in tensors],
        [(tuple(t.size()), tuple(t.stride()), t.requires_grad, t.grad is None) for t in tensors],
        versions(tensors),
        versions(parts),
        [id(part) for part in parts],
        [part.tolist() if part.layout != torch.sparse_coo else None for part in parts],
    )


def assert_refused(fn, args, match=None, *, works=None):
    """The call raises, leaves its arguments alone, and what is compiled still works on others."""
    before, modes = snapshot(args), (torch.is_grad_enabled(), torch._C._len_torch_dispatch_stack())
    compiled = by_pass(fn)
    for _ in range(2):
        with pytest.raises(DesugarError, match=match) as caught:
            compiled(*args)
        assert snapshot(args) == before
    assert (torch.is_grad_enabled(), torch._C._len_torch_dispatch_stack()) == modes
    assert compiled.programs == []
    if works is not None:
        judge(fn, works, compiled)
    assert "instead:" in str(caught.value)
    return caught.value


# ---- metadata -----------------------------------------------------------------------------------------------

META = {
    "resize_": lambda x, y: (y.resize_(5), x * 2)[1],
    "data": lambda x, y: (setattr(y, "data", y * 2), x * y)[1],
    "grad": lambda x, y: (setattr(y, "grad", None), x * 2)[1],
    "set_": lambda x, y: (y.set_(torch.zeros(3)), x * 2)[1],
}


@pytest.mark.parametrize("name", META)
def test_metadata_mutation(name):
    assert_refused(META[name], (make(TwoTensor, 2, 2), torch.ones(2, 3)))


# ---- what a trace cannot follow ------------------------------------------------------------------------------


@dataclasses.dataclass
class Holder:
    y: torch.Tensor


class Box:
    def __init__(self, y):
        self.y = y


OPAQUE = {
    "object": lambda x: Box(x * 2),
    "set": lambda x: {x * 2},
    "generator": lambda x: (x * n for n in (1, 2)),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_results(name):
    assert_refused(OPAQUE[name], (make(TwoTensor, 2, 3),))


def test_opaque_arguments_pass_through():
    holder = Holder(make(TwoTensor, 2, 3))
    judge(lambda h, x: h.y * x, lambda: (holder, torch.ones(3)))


DATA = {
    "branch": lambda x: x * 2 if x.sum() > 0 else x,
    "int": lambda x: x * int(x[0]),
    "equal": lambda x: x * 2 if torch.equal(x, x) else x,
    "size": lambda x: torch.ones(int((x > 0).sum())) * x.sum(),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("grad", [False, True])
def test_data_dependent(name, grad):
    error = assert_refused(DATA[name], (torch.ones(3, requires_grad=grad),), "depends on the data")
    assert error.where is not None and "test_refuse.py" in error.where and "lambda x:" in error.where


UNBACKED = {
    "item": lambda x: x * x.sum().item(),
    "nonzero": lambda x: x.nonzero() * 2,
    "mask": lambda x: x[x > 0] * 2,
    "tolist": lambda x: x * x.tolist()[0],
    "unique": lambda x: x.detach().round().unique() + 1,
}


@pytest.mark.parametrize("name", UNBACKED)
@pytest.mark.parametrize("grad", [False, True])
def test_sizes_and_numbers_that_only_data_tells(name, grad):
    judge(UNBACKED[name], lambda: (torch.randn(5, requires_grad=grad),), calls=3)


def test_backward_inside():
    def fn(x):
        (x * 2).sum().backward()
        return x * 3

    assert_refused(fn, (torch.ones(3, requires_grad=True),), "backward.* inside")


def test_requires_grad_inside():
    assert_refused(lambda x: (x.requires_grad_(), x * 2)[1], (make(TwoTensor, 2, 3),))


def test_a_function_of_another_structure_each_time():
    calls = []

    def fn(x):
        calls.append(1)
        return (x,) * len(calls)

    with pytest.raises(DesugarError, match="another structure"):
        desugar.trace(fn, torch.ones(2))


MADE_UNSEEN = {
    "frombuffer": lambda x: torch.frombuffer(bytearray(12), dtype=torch.float32) * x,
    "a subclass around it": lambda x: TwoTensor(x, torch.frombuffer(bytearray(12), dtype=torch.float32)) * 2,
}


@pytest.mark.parametrize("name", MADE_UNSEEN)
def test_tensors_made_where_torch_does_not_look(name):
    assert_refused(MADE_UNSEEN[name], (torch.ones(3),), "made inside the function")


@pytest.mark.parametrize("method", ["numpy", "data_ptr", "__array__"])
def test_what_needs_memory(method):
    assert_refused(lambda x: (getattr(x, method)(), x * 2)[1], (torch.ones(3),), f"Tensor.{method} is called")


def test_parameters_made_inside():
    assert_refused(
        lambda x: nn.Parameter(torch.ones(3)) * x, (torch.ones(3),), "tensor that the function makes"
    )


def test_a_tensor_from_outside_below_autograd():
    table = torch.randn(3)

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * table

    assert_refused(
        lambda x: Looks.apply(x), (torch.ones(3, requires_grad=True),), "from outside below autograd"
    )


def grow(d):
    d["y"] = d["x"] * 2
    return d["y"]


def swap(d):
    d["x"] = d["x"] * 2
    return d["x"]


CONTAINERS = {
    "new key": (grow, lambda: {"x": torch.ones(2)}),
    "other value": (swap, lambda: {"x": torch.ones(2)}),
    "append": (lambda xs: xs.append(1) or xs[0] * 2, lambda: [torch.ones(2)]),
    "pop": (lambda xs: xs.pop() * 2, lambda: [torch.ones(2), torch.ones(3)]),
    "nested": (lambda xs: xs[0].clear() or xs[1] * 2, lambda: [[torch.ones(2)], torch.ones(3)]),
    "dataclass": (lambda h: setattr(h, "y", h.y * 2) or h.y, lambda: Holder(torch.ones(2))),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_that_the_function_changes(name):
    fn, make_argument = CONTAINERS[name]
    argument, untouched = make_argument(), make_argument()
    with pytest.raises(DesugarError, match="changes a container"):
        by_pass(fn)(argument)
    assert repr(argument) == repr(untouched)


def test_keyword_arguments_may_be_popped():
    assert by_pass(lambda **named: named.pop("x") * 2)(x=torch.ones(2)).tolist() == [2, 2]


class Bypass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g, g


def test_a_gradient_that_would_be_lost():
    w = torch.ones(3, requires_grad=True)
    assert_refused(
        lambda x: Bypass.apply(x, w), (torch.ones(3, requires_grad=True),), "from outside.*gradient"
    )


# ---- odd arguments -------------------------------------------------------------------------------------------


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=layout)


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "sparse inside": lambda: Pair(torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments(name):
    with pytest.raises(DesugarError, match="expected strided tensors"):
        by_pass(lambda x: x * 2)(ODD[name]())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_torchs_nested_tensors(layout):
    with pytest.raises(DesugarError, match="nested tensor"):
        by_pass(lambda x: x * 2)(nested(layout))
    with pytest.raises(DesugarError, match="nested tensor"):
        by_pass(lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged))(torch.ones(3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_nested_tensors_go_to_aotautograd():
    x = nested(torch.jagged)
    assert torch.equal(by_dynamo(lambda x: x * 2)(x).values(), x.values() * 2)


# ---- the user's own errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", EVERY)
def test_an_error_in_the_function_passes_through(cls):
    def fn(x, y):
        z = y.clone().add_(1)
        if y.shape[0] == 3:
            raise LookupError("mine")
        return x.sin() + 0 * z.sum() if cls is TwoTensor else x.sin()

    compiled = by_pass(fn)
    args = make(cls, 2, 6, grad=True), torch.ones(3)
    before = snapshot(args)
    with pytest.raises(LookupError, match="mine") as caught:
        compiled(*args)
    assert any(
        entry.path.name == "test_refuse.py" and "mine" in str(entry.statement) for entry in caught.traceback
    )
    assert snapshot(args) == before and torch.is_grad_enabled()
    judge(fn, lambda: (make(cls, 2, 6, grad=True), torch.ones(4)), compiled)


@pytest.mark.parametrize("way", [by_pass, by_dynamo])
def test_torchs_errors_pass_through(way):
    with pytest.raises(RuntimeError, match="same reduction dim") as caught:
        way(lambda x: x @ torch.ones(7, 7))(make(Pair, 2, 3))
    assert not isinstance(caught.value, DesugarError)


def test_an_interrupt_leaves_everything_usable():
    def fn(x):
        if not done:
            raise KeyboardInterrupt
        return x * 2

    done: list[int] = []
    compiled = by_pass(fn)
    with pytest.raises(KeyboardInterrupt):
        compiled(torch.ones(2))
    done.append(1)
    judge(fn, lambda: (torch.ones(2, requires_grad=True),), compiled)


REPEATED = {
    "zero_": lambda x: x.expand(2, *x.shape).zero_(),
    "fill_ of a part": lambda x: x.expand(3, 2, *x.shape)[0].fill_(1),
    "an assignment": lambda x: x.expand(2, *x.shape).__setitem__(slice(None), 1.0),
    "an operator": lambda x: x.expand(2, *x.shape).__iadd__(1),
    "out": lambda x: torch.mul(x.expand(2, *x.shape), 2, out=x.expand(2, *x.shape)),
    "an op": lambda x: torch.ops.aten.add_.Tensor(x.expand(2, *x.shape), 1),
    "inplace": lambda x: torch.nn.functional.relu(x.expand(2, *x.shape), inplace=True),
    "windows with gaps": lambda x: x.unfold(0, 1, 2).zero_(),
    "one of the windows": lambda x: x.unfold(0, 2, 1)[0].add_(1),
}


@pytest.mark.parametrize("way", [by_pass, by_dynamo])
@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
@pytest.mark.parametrize("write", REPEATED.values(), ids=REPEATED)
def test_writes_that_come_back_to_one_element_several_times(write, cls, way):
    """Functionalization takes the sum of what the copies became, and PyTorch's own compiler with it."""
    x = make(cls, 3, 4)
    before = snapshot([x])
    with pytest.raises(RuntimeError, match=r"expanded|unfolded|more than one element") as caught:
        way(lambda x: (write(x), x * 1)[1])(x)
    assert snapshot([x]) == before
    assert way is by_dynamo or isinstance(caught.value, DesugarError)


@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
def test_writes_to_each_element_once(cls):
    def fn(x):
        x.expand(2, *x.shape)[0].add_(1)
        x.expand(1, *x.shape).mul_(3)
        x.expand(2, *x.shape).requires_grad_(False)
        x.view(-1)[::2].zero_()
        return x * 1

    judge(fn, lambda: (make(cls, 3, 4),))


def test_retain_grad_inside():
    def fn(x):
        y = x * 2
        y.retain_grad()
        return (y * y).sum(), y

    with pytest.raises(DesugarError, match="retain_grad") as caught:
        desugar.compile(fn, backend="eager")(torch.ones(3, requires_grad=True))
    assert caught.value.where is not None and "y.retain_grad()" in caught.value.where


@pytest.mark.parametrize("size", [(0,), (7,), (3, 2)])
def test_an_out_that_would_get_another_size(size):
    out = torch.zeros(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on resizing
        with pytest.raises(DesugarError, match="another size"):
            desugar.compile(lambda x, out: torch.mul(x, 2, out=out), backend="eager")(torch.ones(2, 3), out)
    assert out.shape == size


class Named(torch.Tensor):
    """No wrapper: a tensor with memory of its own whose class sees every torch function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        return out + 100 if func is torch.Tensor.mul else out


class PlainParameter(nn.Parameter):
    """A class that changes nothing."""


def test_a_class_that_sees_torch_functions_and_is_no_wrapper():
    x = torch.ones(3).as_subclass(Named)
    for fn, args in ((lambda x: x * 2, (x,)), (lambda y: y * x, (torch.ones(3),))):
        with pytest.raises(DesugarError, match=r"got a Named.*no __tensor_flatten__"):
            desugar.compile(fn, backend="eager")(*args)
    judge(lambda x: x * 2, lambda: (PlainParameter(torch.ones(3)),))


def test_a_tensor_of_a_transform_that_has_ended():
    kept = []

    def squares(x):
        kept.append(x)
        return (x * x).sum()

    torch.func.grad(squares)(torch.rand(3))
    compiled = desugar.compile(torch.sin, backend="eager")
    with pytest.raises(DesugarError, match="transform that has ended"):
        compiled(kept[0])
    torch.testing.assert_close(compiled(kept[0].clone()), kept[0].sin())


def test_an_iterator_among_the_arguments():
    tensors = [torch.ones(2), torch.zeros(2)]
    for iterator in (iter(tensors), (t for t in tensors), map(torch.sin, tensors)):
        with pytest.raises(DesugarError, match="gone through once"):
            desugar.compile(lambda ts: sum(ts), backend="eager")(iterator)
        assert len(list(iterator)) == 2, "it is untouched"
