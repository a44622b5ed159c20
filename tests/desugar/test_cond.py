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
}


def gradients(result, leaves):
    total = sum(part.double().sum() for out in tensors_of(result) for part in [out] if out.requires_grad)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    # Which branch ran is not known when a gradient is None, so a compiled one is zero instead.
    like = [torch.zeros_like(x.detach()) for x in leaves]
    summed = [
        None if g is None else g + zeros for g, zeros in zip(found, like, strict=True)
    ]  # as the engine would
    return [None if g is None else dense_parts(g) for g in summed]


def dense_parts(g):
    return [g.materialize()] if hasattr(g, "materialize") else plain_parts(g)


@pytest.mark.sweep(45)
@pytest.mark.parametrize("kind", [torch.Tensor, *DECLARED], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_branches(name, kind):
    program = PROGRAMS[name]
    compiled = by_pass(lambda pred, x: program(torch.cond, pred, x))
    for _ in range(2):
        for pred in (torch.tensor(True), torch.tensor(False)):
            x = torch.randn(3, 4, requires_grad=True) if kind is torch.Tensor else make(kind, 3, 4, grad=True)
            want, got = program(python_cond, pred, x), compiled(pred, x)
            assert [type(t) for t in tensors_of(got)] == [type(t) for t in tensors_of(want)]
            for one, other in zip(tensors_of(got), tensors_of(want), strict=True):
                for part, wanted in zip(plain_parts(one), plain_parts(other), strict=True):
                    torch.testing.assert_close(part, wanted)
            found, wanted = gradients(got, [x, weight]), gradients(want, [x, weight])
            for ours, theirs in zip(found, wanted, strict=True):
                if theirs is None:
                    assert ours is None or not any(part.any() for part in ours)
                else:
                    assert ours is not None
                    torch.testing.assert_close(ours, theirs)
    assert len(compiled.programs) == 1


@pytest.mark.parametrize("kind", [Pair], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("pred", [True, False])
def test_second_derivatives(kind, pred):
    def program(cond, pred, x):
        return cond(pred, lambda x: x.sin() * x, lambda x: x * x * x, (x,))

    found = []
    for fn in (lambda *a: program(python_cond, *a), by_pass(lambda *a: program(torch.cond, *a))):
        torch.manual_seed(0)
        x = make(kind, 3, grad=True)
        y = fn(torch.tensor(pred), x)
        (first,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        (second,) = torch.autograd.grad(first, x, torch.ones_like(first))
        found.append([part for t in (y, first, second) for part in plain_parts(t.detach())])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", [Pair], ids=lambda kind: kind.__name__)
def test_dynamic_sizes(kind):
    def program(cond, pred, x):
        return cond(pred, lambda x: x.sin() * x.shape[0], lambda x: x * x, (x,))

    compiled = by_pass(lambda pred, x: program(torch.cond, pred, x), dynamic=True)
    for rows in (3, 4, 5):
        for pred in (torch.tensor(True), torch.tensor(False)):
            x = make(kind, rows, 4, grad=True)
            want, got = program(python_cond, pred, x), compiled(pred, x)
            torch.testing.assert_close(plain_parts(got.detach()), plain_parts(want.detach()))
            torch.testing.assert_close(gradients(got, [x]), gradients(want, [x]))
    assert len(compiled.programs) == 1


@pytest.mark.slow
def test_ragged_operands():
    def program(cond, pred, x, bias):
        return cond(pred, lambda x: (x + bias).sin().mean(1), lambda x: (x * bias).sum(1), (x,))

    bias = torch.randn(3, requires_grad=True)
    compiled = by_pass(lambda *a: program(torch.cond, *a))
    for lengths in ([2, 4], [3, 1, 2]):
        for pred in (torch.tensor(True), torch.tensor(False)):
            values = torch.randn(sum(lengths), 3, requires_grad=True)
            x = JaggedTensor.from_tensors(values.split(lengths))
            want, got = program(python_cond, pred, x, bias), compiled(pred, x, bias)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(*(torch.autograd.grad(y.sum(), [values, bias]) for y in (got, want)))


def test_parameters_of_modules_in_branches():
    x, compiled = (
        torch.randn(3, 4),
        by_pass(lambda p, x: torch.cond(p, lambda x: layer(x), lambda x: x * 1, (x,))),
    )
    torch.testing.assert_close(compiled(torch.tensor(True), x), layer(x))
    compiled(torch.tensor(True), x).sum().backward()
    assert layer.weight.grad is not None
    compiled(torch.tensor(False), x).sum().backward()
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
    compiled = by_pass(lambda pred, x: program(torch.cond, pred, x), backend="inductor")
    x = make(Pair, 3, 4, grad=True)
    for pred in (torch.tensor(True), torch.tensor(False)):
        want, got = program(python_cond, pred, x), compiled(pred, x)
        torch.testing.assert_close(plain_parts(got.detach()), plain_parts(want.detach()))
        torch.testing.assert_close(gradients(got, [x]), gradients(want, [x]))


def test_compiled_functions_inside_run_as_they_are():
    inside = torch.compile(lambda x: x.sin() * 2, backend="eager")
    x = make(Pair, 3, grad=True)
    got = by_pass(lambda x: inside(x) + 1)(x)
    torch.testing.assert_close(plain_parts(got.detach()), plain_parts((x.sin() * 2 + 1).detach()))
    assert torch._dynamo.eval_frame._stance.stance == "default"


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


@pytest.mark.parametrize("pred", [True, False])
def test_operands_in_a_dict(pred):
    x = make(Pair, 3, 4, grad=True)
    compiled = by_pass(
        lambda pred, x: torch.cond(pred, lambda d: d["x"] * 2, lambda d: d["x"].sin(), ({"x": x},))
    )
    want = x * 2 if pred else x.sin()
    got = compiled(torch.tensor(pred), x)
    assert type(got) is Pair
    torch.testing.assert_close(plain_parts(got.detach()), plain_parts(want.detach()))


@pytest.mark.parametrize("pred", [True, False])
def test_branches_of_different_sizes(pred):
    x = make(Pair, 3, 4)
    compiled = by_pass(lambda pred, x: torch.cond(pred, lambda x: x[:1] * 1, lambda x: x * 2, (x,)))
    want = x[:1] if pred else x * 2
    got = compiled(torch.tensor(pred), x)
    assert type(got) is Pair and got.shape == want.shape
    torch.testing.assert_close(plain_parts(got), plain_parts(want))


def test_random_numbers_with_gradients_are_refused():
    """The backward would draw others; stock does, silently."""

    def fn(x):
        return torch.cond(TRUE, lambda x: torch.rand_like(x) * x, lambda x: x * 2, (x,))

    with pytest.raises(DesugarError, match="draws random numbers"):
        by_pass(fn)(torch.ones(3, requires_grad=True))
