"""`torch.cond` over declared tensor subclasses; a Python `if` is the judge.

Classes written by hand keep PyTorch's way: Dynamo cannot run the op on them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from desugar import DesugarError
from subclasses.ragged import JaggedTensor
from tests.desugar.classes import DECLARED, Pair, make, plain_parts
from tests.desugar.judge import by_pass, tensors_of

weight = torch.randn(4, requires_grad=True)
layer = nn.Linear(4, 4)


def python_cond(pred, true_fn, false_fn, operands=()):
    return true_fn(*operands) if pred else false_fn(*operands)


def closes_over_a_result(cond, pred, x):
    y = x * 2
    return cond(pred, lambda: y.sin(), lambda: y * x)


def nested(cond, pred, x):
    return cond(pred, lambda x: cond(pred, lambda x: x.sin(), lambda x: x.cos(), (x,)), lambda x: x * x, (x,))


PROGRAMS = {
    "one operand": lambda cond, pred, x: cond(pred, lambda x: x.sin(), lambda x: x * x, (x,)),
    "closes over a parameter": lambda cond, pred, x: cond(pred, lambda x: x * weight, lambda x: x + 1, (x,)),
    "closes over a result": closes_over_a_result,
    "in a chain": lambda cond, pred, x: cond(pred, lambda x: x.sin(), lambda x: x * x, (x * 2,)) * 3,
    "nested": nested,
    "two results": lambda cond, pred, x: cond(
        pred, lambda x: (x.sin(), x.cos()), lambda x: (x * x, x + 1), (x,)
    ),
    "the same twice": lambda cond, pred, x: cond(pred, lambda x, y: x * y, lambda x, y: x - y, (x, x)),
    "a plain operand": lambda cond, pred, x: cond(
        pred, lambda x, w: x * w, lambda x, w: x * w * w, (x, weight * 1)
    ),
    "operands in a dict": lambda cond, pred, x: cond(
        pred, lambda d: d["x"] * 2, lambda d: d["x"].sin(), ({"x": x},)
    ),
}


def compiled_cond(program, **options):
    return by_pass(lambda pred, *args: program(torch.cond, pred, *args), **options)


def gradients(result, leaves):
    """The plain parts of each gradient, or None."""
    total = sum(out.double().sum() for out in tensors_of(result) if out.requires_grad)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    # The engine gives zeros instead of None to the branch that did not run, of the class of the leaf.
    summed = [
        g if g is None else g + torch.zeros_like(x.detach()) for g, x in zip(found, leaves, strict=True)
    ]
    return [g if g is None else dense_parts(g) for g in summed]


def dense_parts(g):
    return [g.materialize()] if hasattr(g, "materialize") else plain_parts(g)


def check(program, compiled, make_args, leaves=()):
    """Results and gradients are those of a Python `if`, whichever branch runs."""
    for pred in (torch.tensor(True), torch.tensor(False)):
        args = make_args()
        want, got = program(python_cond, pred, *args), compiled(pred, *args)
        assert [type(t) for t in tensors_of(got)] == [type(t) for t in tensors_of(want)]
        for one, other in zip(tensors_of(got), tensors_of(want), strict=True):
            torch.testing.assert_close(plain_parts(one.detach()), plain_parts(other.detach()))
        wanted = [x for x in (*args, *leaves) if x.requires_grad]
        for ours, theirs in zip(*(gradients(y, wanted) for y in (got, want)), strict=True) if wanted else ():
            if theirs is None:
                assert ours is None or not any(part.any() for part in ours)
            else:
                torch.testing.assert_close(ours, theirs)


@pytest.mark.sweep(45)
@pytest.mark.parametrize("kind", [torch.Tensor, *DECLARED], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_branches(name, kind):
    program = PROGRAMS[name]
    compiled = compiled_cond(program)
    for _ in range(2):
        check(program, compiled, lambda: (make(kind, 3, 4, grad=True),), [weight])
    assert len(compiled.programs) == 1


@pytest.mark.parametrize("pred", [True, False])
def test_second_derivatives(pred):
    def program(cond, pred, x):
        return cond(pred, lambda x: x.sin() * x, lambda x: x * x * x, (x,))

    found = []
    for fn in (lambda *a: program(python_cond, *a), compiled_cond(program)):
        torch.manual_seed(0)
        x = make(Pair, 3, grad=True)
        y = fn(torch.tensor(pred), x)
        (first,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        (second,) = torch.autograd.grad(first, x, torch.ones_like(first))
        found.append([part for t in (y, first, second) for part in plain_parts(t.detach())])
    torch.testing.assert_close(*found)


def test_dynamic_sizes():
    def program(cond, pred, x):
        return cond(pred, lambda x: x.sin() * x.shape[0], lambda x: x * x, (x,))

    compiled = compiled_cond(program, dynamic=True)
    for rows in (3, 4, 5):
        check(program, compiled, lambda rows=rows: (make(Pair, rows, 4, grad=True),))
    assert len(compiled.programs) == 1


def test_branches_of_different_sizes():
    def program(cond, pred, x):
        return cond(pred, lambda x: x[:1] * 1, lambda x: x * 2, (x,))

    check(program, compiled_cond(program), lambda: (make(Pair, 3, 4),))


@pytest.mark.slow
def test_ragged_operands():
    def program(cond, pred, x, bias):
        return cond(pred, lambda x: (x + bias).sin().mean(1), lambda x: (x * bias).sum(1), (x,))

    bias = torch.randn(3, requires_grad=True)
    compiled = compiled_cond(program)
    for lengths in ([2, 4], [3, 1, 2]):
        values = torch.randn(sum(lengths), 3, requires_grad=True)
        x = JaggedTensor.from_tensors(values.split(lengths))
        for pred in (torch.tensor(True), torch.tensor(False)):
            want, got = program(python_cond, pred, x, bias), compiled(pred, x, bias)
            torch.testing.assert_close(got, want)
            found = [torch.autograd.grad(y.sum(), [values, bias], retain_graph=True) for y in (got, want)]
            torch.testing.assert_close(*found)


def test_parameters_of_modules_in_branches():
    x = torch.randn(3, 4)
    compiled = by_pass(lambda p, x: torch.cond(p, lambda x: layer(x), lambda x: x * 1, (x,)))
    for pred in (True, False):
        y = compiled(torch.tensor(pred), x)
        torch.testing.assert_close(y, layer(x) if pred else x)
        y.sum().backward()
        torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(4, 4))  # nothing added the second time
    layer.zero_grad()


def test_an_operand_written_afterwards_is_noticed():
    def fn(pred, x):
        y = x * 2
        z = torch.cond(pred, lambda y: y.sin(), lambda y: y * y, (y,))
        y.add_(1)
        return z

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        by_pass(fn)(torch.tensor(True), torch.randn(3, requires_grad=True))


@pytest.mark.slow
def test_through_inductor():
    program = PROGRAMS["one operand"]
    check(program, compiled_cond(program, backend="inductor"), lambda: (make(Pair, 3, 4, grad=True),))


TRUE = torch.tensor(True)
REFUSED = {
    "a subclass as predicate": (
        lambda x: torch.cond(x.sum() > 0, lambda x: x * 1, lambda x: -x, (x,)),
        "plain bool tensor of one element as the predicate, got a Pair",
    ),
    "a write": (
        lambda x: torch.cond(TRUE, lambda x: x.add_(1) * 1, lambda x: x * 2, (x * 2,)),
        "input mutation",
    ),
    "a write around it": (
        lambda x: torch.cond(TRUE, lambda: weight.detach().add_(1) * 1, lambda: weight.detach() * 2),
        "input mutation",
    ),
    "an operand as it is": (
        lambda x: torch.cond(TRUE, lambda x: x, lambda x: x * 2, (x,)),
        "do not support aliasing",
    ),
    "sizes, with a gradient": (
        lambda x: torch.cond(TRUE, lambda x: x[:1] * 1, lambda x: x * 2, (x,)),
        "Mismatch in shape",
    ),
    "types": (
        lambda x: torch.cond(TRUE, lambda x: x.a * 1, lambda x: x * 2, (x,)),
        "branches of torch.cond give different results",
    ),
    "structure": (
        lambda x: torch.cond(TRUE, lambda x: (x + 1, x * 2), lambda x: x * 2, (x,)),
        "branches of torch.cond give different results",
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """By Dynamo, by PyTorch's op or by the class; in either case nothing is changed."""
    fn, match = REFUSED[name]
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match=match):
        by_pass(fn)(make(Pair, 3, 4, grad=True))
    assert torch.equal(weight, before)


def test_random_numbers_with_gradients_are_refused():
    """The backward would draw others; stock does, silently."""
    fn = by_pass(lambda x: torch.cond(TRUE, lambda x: torch.rand_like(x) * x, lambda x: x * 2, (x,)))
    with pytest.raises(DesugarError, match="draws random numbers"):
        fn(torch.ones(3, requires_grad=True))
