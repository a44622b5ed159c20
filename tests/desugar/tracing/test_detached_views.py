"""Results that are detached views of an argument: `x[1:].detach()`, and what is a view of it."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import desugar
from desugar.errors import PackageError
from subclasses.int8 import Int8Tensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.desugar.classes import Nested, Pair
from tests.desugar.judge import STRICT_DOORS, by_pass, inside, judge, leaves_of
from tests.desugar.tracing.test_outputs import assert_plays_as_eager

DOORS = STRICT_DOORS


def after_a_write(x):
    part = x[1:]
    x.add_(1)
    x.mul_(2)
    return part.detach(), part


FUNCTIONS = {
    "rows": lambda x: x[1:].detach(),
    "a row": lambda x: x[0].detach(),
    "another shape": lambda x: (x.view(3, 2).detach(), x * 2),
    "transposed": lambda x: torch.detach(x.t()),
    "expanded": lambda x: x.expand(2, 2, 3).detach(),
    "a view of it": lambda x: x[:, 1:].detach()[0],
    "twice": lambda x: x[:, 1:].detach()[:1].detach(),
    "both, and the view": lambda x: (x[1:], x[1:].detach(), x[1:].detach()[0]),
    "the same one twice": lambda x: [x.t().detach()] * 2,
    "by the op": lambda x: torch.ops.aten.detach.default(x[1:]),
    "beside a result": lambda x: (x[1:].detach(), (x * 2).sum()),
    "after a write": after_a_write,
    "without gradients": torch.no_grad()(lambda x: (x[1:].detach(), x * 2)),
    "written to": lambda x: (lambda part: (part.mul_(2), part, x * 1)[1:])(x[1:].detach()),
}
ARGUMENTS = {
    "plain": lambda: torch.randn(2, 3),
    "by hand": lambda: TwoTensor(torch.randn(2, 3), torch.randn(2, 3)),
    "declared": lambda: Pair(torch.randn(2, 3), torch.randn(2, 3)),
    "nested": lambda: Nested(Pair(torch.randn(2, 3), torch.randn(2, 3)), torch.randn(2, 3)),
}
makers = pytest.mark.parametrize("make", [ARGUMENTS[name] for name in ("plain", "by hand", "declared")])


@pytest.mark.sweep(36)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("grad", ["none", "non-leaf"])
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_taken_again(name, argument, grad, door):
    def make():
        x = ARGUMENTS[argument]()
        return (x if grad == "none" else x.requires_grad_() * 1,)

    fn = FUNCTIONS[name]
    compiled = judge(fn, make, way=DOORS[door], calls=2)
    expected, got = ([t._is_view() for t in leaves_of(f(*make()))] for f in (fn, compiled))
    assert got == expected


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_write_to_the_result_reaches_the_argument(argument, door):
    fn = FUNCTIONS["a view of it"]
    assert_plays_as_eager(fn, lambda: (ARGUMENTS[argument](),), DOORS[door], "result", contextlib.nullcontext)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("build", "fn"),
    [
        (lambda rows: Int8Tensor.from_float(rows[0]), lambda x: x[1:].detach()),
        (lambda rows: Int8Tensor.from_float(rows[0]), lambda x: x.t().detach()),
        (JaggedTensor.from_tensors, lambda x: x.transpose(-1, -2).detach()),
        (PaddedTensor.from_tensors, lambda x: x[1:].detach()),
    ],
)
def test_the_classes_of_the_library(build, fn, door):
    x = build([torch.randn(n, 8) for n in (4, 0, 3)])
    got, expected = DOORS[door](fn)(x), fn(x)
    assert type(got) is type(expected) and got.shape == expected.shape
    for one, other in zip(leaves_of(got.unwrap()), leaves_of(expected.unwrap()), strict=True):
        assert one is other is None or one.equal(other)
        assert one is None or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.slow
def test_through_inductor():
    fn = FUNCTIONS["beside a result"]
    judge(fn, lambda: (torch.randn(3, 2).requires_grad_(),), desugar.compile(fn, strict=True))


@pytest.mark.slow
def test_a_package_refuses_it(tmp_path):
    with pytest.raises(PackageError, match="return a clone"):
        desugar.save(tmp_path / "views.pt2", lambda x: (x[1:].detach(), x * 2), desugar.call(torch.ones(3)))


# ---- written to with gradients, which PyTorch's own compiler loses -----------------------------------------------


def added_beside_it(x, y):
    base = x * 1
    return base, WRITTEN["it"](base, y)


WRITTEN = {
    "it": lambda x, y: x.detach().add_(y),
    "rows": lambda x, y: x[1:].detach().add_(y[1:]),
    "a view of it": lambda x, y: x.detach()[1].add_(y[1]),
    "below a result": lambda x, y: (lambda part: (part[1].add_(y[1]), part)[1])(x.detach()),
}


@pytest.mark.sweep(9)
@makers
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("strict", [True, False])
def test_a_result_that_would_lose_a_gradient_is_refused(name, make, strict):
    x, y = make().requires_grad_(), make().requires_grad_()
    before = x.detach().clone()
    for door in (by_pass, functools.partial(inside, backend="eager", strict=strict)):
        with pytest.raises(Exception, match=r"would lose the gradient of that write[\s\S]*clone\(\)"):
            door(WRITTEN[name])(x, y)
    assert all(map(torch.equal, leaves_of(x.detach()), leaves_of(before))), "nothing is written"
    # No write that autograd records: the second operand has no gradient.
    judge(WRITTEN[name], lambda: (make().requires_grad_(), make()))


@pytest.mark.sweep(3)
@makers
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x.detach().add_(y).clone(),
        lambda x, y: x.clone().detach().add_(y),
        lambda x, y: x.detach().add_(y) * 2,
    ],
)
def test_a_clone_of_it_keeps_the_gradient(make, fn):
    """As the error says, and where no result shares memory with an argument."""
    judge(fn, lambda: (make().requires_grad_(), make().requires_grad_()))


@makers
def test_beside_another_result_the_graph_goes_to_pytorch(make):
    args = make().requires_grad_(), make().requires_grad_()
    sides = [fn(*args) for fn in (by_pass(added_beside_it), added_beside_it)]
    assert sides[0][1].requires_grad == sides[1][1].requires_grad
    assert all(map(torch.equal, *(leaves_of([t.detach() for t in side]) for side in sides)))
