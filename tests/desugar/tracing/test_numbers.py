"""Numbers that change from call to call: indices that are tensors of one number, and floats of Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import desugar
from tests.desugar.classes import Pair, make
from tests.desugar.judge import by_pass, judge
from tests.desugar.refusing import BOTH_DOORS

INDEXED = {
    "select": lambda x, i: x[i] * 2,
    "a view": lambda x, i: x[i],
    "two dims": lambda x, i: x[i, 1] + 1,
    "second dim": lambda x, i: x[1:, i] + 1,
    "slice up to": lambda x, i: x[:i] * 2,
    "slice from": lambda x, i: x[i:] * 2,
    "two numbers": lambda x, i: x[i, i] * 2,
    "item": lambda x, i: x * i.item(),
    "full": lambda x, i: x.new_ones(i.item()),
}


scale_row = lambda x, i: (x[i].mul_(3), x * 2)[1]  # noqa: E731


def square(cls=Tensor, grad=False):
    return lambda: make(cls, 4, 4, grad=grad)


NUMBERS = {
    **{name: (fn, square(), (1, 3, 0, 2)) for name, fn in INDEXED.items()},
    **{f"{name}, with a gradient": (fn, square(grad=True), (1, 3, 0, 2)) for name, fn in INDEXED.items()},
    "a row is set": (lambda x, i: (x.__setitem__(i, 7.0), x * 2)[1], square(), (1, 3, 0, -1)),
    "a row is scaled": (scale_row, square(), (1, 3, 0, -1)),
    "a wrapper, select": (lambda x, i: x[i] * 2, square(Pair), (1, 3, 0)),
    "a wrapper, slice": (lambda x, i: x[:i] * 2, square(Pair), (1, 3, 0)),
    "a wrapper, a row is scaled": (scale_row, square(Pair), (1, 3, 0)),
    "a branch": (lambda x, i: x if i.item() > 2 else -x, square(), (3, 1, 3)),
    "an int": (lambda x, i: x * int(i), square(), (3, 1, 3)),
}


def call_with(fn, make_x, numbers, compiled, dtype=None):
    """Compares calls of one compiled function with ever new numbers, and returns it."""
    for number in numbers:
        judge(fn, lambda i=number: (make_x(), torch.tensor(i, dtype=dtype)), compiled)
    return compiled


@pytest.mark.sweep(5)
@BOTH_DOORS
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_tensors(name: str, door):
    fn, make_x, numbers = NUMBERS[name]
    call_with(fn, make_x, numbers, door(fn))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", INDEXED)
def test_programs_for_numbers_of_tensors(name):
    """Dynamo guards the number in an index."""
    fn = INDEXED[name]
    assert len(call_with(fn, square(), (1, 3, 0, 2, 1), by_pass(fn)).programs) <= 4


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["slice up to", "slice from", "item"])
def test_numbers_in_a_graph_make_no_more_programs_than_in_pytorch(name):
    counter, fn = CompileCounterWithBackend("aot_eager"), INDEXED[name]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call_with(fn, square(), (1, 3, 0, 2, 1), torch.compile(fn, backend=counter))
        torch.compiler.reset()
        compiled = call_with(fn, square(), (1, 3, 0, 2, 1), by_pass(fn))
    assert len(compiled.programs) <= counter.frame_count


@pytest.mark.sweep(2)
@BOTH_DOORS
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("cls", [Tensor, Pair])
def test_masks_of_bytes_where_dynamo_does_not_look(cls, door):
    inside = torch.compiler.disable(lambda x, m: x[m])
    fn = lambda x, m: inside(x, m) * 2  # noqa: E731
    call_with(fn, square(cls), ([1, 0, 2, 0], [1, 1, 1, 0]), door(fn), torch.uint8)


# ---- floats of Python that change, in programs that Inductor compiles ----------------------------------------

VALUES = (1.5, 2.0, 3.5, -0.5, 7.0, 1.5)


FUNCTIONS = {
    "product": (lambda x, t: x * t, 2),
    "quotient": (lambda x, t: t / x, 2),
    "comparison": (lambda x, t: torch.where(x > t, x, -x), 2),
    "in place": (lambda x, t: x.clone().mul_(t).add_(t), 2),
    "a number as a result": (lambda x, t: (x * t, t + 1.0), len(set(VALUES))),
    "an op of numbers": (lambda x, t: x.clamp(max=t), len(set(VALUES))),
    "a branch": (lambda x, t: x if t > 2 else x * t, 3),
}


def number(dtype, grad):
    return torch.tensor([-2.0, 0.25, 1.0, 3.0], dtype=dtype).requires_grad_(grad)


@pytest.mark.sweep(28)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_changing_float(backend, name, grad):
    fn, most = FUNCTIONS[name]
    compiled = desugar.compile(fn, backend=backend)
    for dtype in (torch.float32, torch.bfloat16)[: 1 if backend == "inductor" else 2]:
        for t in VALUES:
            judge(fn, lambda t=t, dtype=dtype: (number(dtype, grad), t), compiled)
        assert len(compiled.programs) <= most * (1 if dtype is torch.float32 else 2)


@pytest.mark.slow
def test_dynamic_from_the_first_call():
    fn = FUNCTIONS["product"][0]
    compiled = desugar.compile(fn, dynamic=True)
    for t in VALUES:
        judge(fn, lambda t=t: (number(torch.float32, grad=True), t), compiled)
    assert len(compiled.programs) == 1


@pytest.mark.slow
def test_second_derivative():
    compiled = desugar.compile(lambda x, t: (x * t) ** 2)
    for t in VALUES[:4]:
        x = torch.tensor([1.0, -2.0], requires_grad=True)
        (first,) = torch.autograd.grad(compiled(x, t).sum(), x, create_graph=True)
        second = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close((first, *second), (2 * x * t * t, torch.full_like(x, 2 * t * t)))
