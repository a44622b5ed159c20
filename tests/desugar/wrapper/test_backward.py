"""What the forward saves and how a backward reads it; the text of a backward."""

from __future__ import annotations

import functools

import pytest
import torch

from desugar import DesugarError
from desugar.codegen.text import join_saved
from desugar.ir.values import Wrapper
from tests.desugar.classes import EVERY, HAND_WRITTEN, Int8Like, Nested, Pair, TwoTensor, make, plain_parts
from tests.desugar.judge import backward, by_pass, judge, versions
from tests.doors import by_torch


def text_of(fn, *args):
    """The text of the backward for all gradients, after one call."""
    compiled = by_pass(fn)
    backward(compiled(*args))
    (program,) = compiled.programs
    (text,) = program.variants.sources
    return text


DOORS = {"backend": by_torch, "desugar.compile": functools.partial(by_pass, strict=True)}
WRITES = {
    "to what lies in an argument": (torch.mul, lambda x, y, out: y.a.mul_(2)),
    "to an argument": (torch.mul, lambda x, y, out: y.add_(1)),
    "to what lies in a result": (lambda x, y: x.exp(), lambda x, y, out: out.b.mul_(2)),
}


@pytest.mark.parametrize("cls", [TwoTensor, Pair])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_what_is_saved_is_refused(name, door, cls):
    fn, write = WRITES[name]
    x, y = make(cls, 2, 3, grad=True), make(cls, 2, 3)
    out = DOORS[door](fn)(x, y)
    with torch.no_grad():
        write(x, y, out)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        backward(out)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cls", [TwoTensor, Pair])
@pytest.mark.parametrize("door", DOORS)
def test_an_assignment_to_an_argument_or_a_result_changes_no_gradient(cls, door):
    """Where a class maps its ops, PyTorch's formulas save the wrapper in eager mode, and do not see such a write."""
    x, y = make(cls, 2, 3, grad=True), make(cls, 2, 3)
    want = y.exp()
    out = DOORS[door](lambda x, y: (x * y.exp()).exp().log())(x, y)
    with torch.no_grad():
        y.a, out.b = y.a * 2, out.b * 3
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(want))
    torch.testing.assert_close([grad.a, grad.b], [want.a, want.b])


@pytest.mark.parametrize("cls", [TwoTensor, Pair])
def test_a_backward_that_runs_the_function_again_refuses_what_was_assigned(cls):
    x, y = make(cls, 2, 3, grad=True), make(cls, 2, 3)
    out = by_pass(lambda x, y: x.sin() * y)(x, y)
    with torch.no_grad():
        y.a = y.a * 2
    match = r"and 'a' of its argument, an? \w+ of size \(2, 3\), has been assigned"
    with pytest.raises(DesugarError, match=match):
        torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)


def test_a_saved_copy_serves_a_backward_that_runs_the_function_again():
    x, y = make(Pair, 2, 3, grad=True), make(Pair, 2, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = by_pass(lambda x, y: x.sin() * y)(x, y)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    torch.testing.assert_close(grad.a, x.a.cos() * y.a)


@pytest.mark.parametrize("door", DOORS)
def test_a_write_in_a_program_counts_for_what_lies_deep_inside(door):
    outer = make(Nested, 2, 3)
    before = versions(plain_parts(outer))
    DOORS[door](lambda x: x.mul_(2))(outer)
    assert all(t > old for t, old in zip(versions(plain_parts(outer)), before, strict=True))


def test_strides_of_gradients():
    """A dense gradient is not permuted; a transposed result wants a transposed gradient."""
    text = text_of(lambda x: x * 2, make(Pair, 2, 3, grad=True))
    assert "restride" not in text and text.count(".contiguous()") == 2
    text = text_of(lambda x: x.t().sin(), torch.randn(2, 3, requires_grad=True))
    assert "restride(" in text and "(1, 0)" in text
    judge(lambda x: x.t().sin(), lambda: (make(TwoTensor, 2, 3, grad=True),))


def test_what_has_no_gradient_is_shared_with_the_result():
    """int8 data of a gradient: compared by identity, then by value, and no input of the backward."""
    compiled = judge(torch.clone, lambda: (make(Int8Like, 2, 3, grad=True),))
    (program,) = compiled.programs
    (companion,) = program.variants.emitted.plan.companions
    assert isinstance(program.outputs[0], Wrapper) and companion.endswith(".qdata")
    assert len(program.variants.traced.tangent_items) == 1 and "equal(" in program.variants.sources[0]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cls", EVERY)
def test_the_check_of_a_gradient(cls):
    text = text_of(lambda x: x * 2, make(cls, 2, 6, grad=True))
    checks = text.split("if is_grad", 1)[1].split(":\n", 1)[0]
    assert checks.startswith("_enabled() or type(tangent0) is not ")
    assert ("_layout is not" in checks) == (cls not in HAND_WRITTEN)
    assert "isinstance" not in checks


# ---- saved tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "joined"),
    [
        (["saved[0]", "saved[1]", "saved[2]", "g0"], ["*saved", "g0"]),
        (["saved[0]", "saved[1]", "saved[2]", "saved[3].a", "g0"], ["*saved[:3]", "saved[3].a", "g0"]),
        (["saved[3]", "saved[1]", "saved[2]", "saved[3]"], ["saved[3]", "*saved[1:4]"]),
        (["saved[0]", "saved[1]"], ["saved[0]", "saved[1]"]),
        (["saved[2]", "saved[1]", "saved[0]"], ["saved[2]", "saved[1]", "saved[0]"]),
    ],
)
def test_saved_tensors_in_a_row_are_one_slice(arguments, joined):
    assert join_saved(arguments, 4 if "saved[3]" in " ".join(arguments) else 3) == joined


@pytest.mark.sweep(2)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    "build", [lambda t: t, lambda t: TwoTensor(t, torch.ones(3)), lambda t: Pair(t, torch.ones(3))]
)
def test_a_gradient_that_is_negated_lazily(build, backend):
    """As the backward of `torch.complex(...).conj()` gives: its memory holds the opposite."""
    x, gradient = build(torch.ones(3)).requires_grad_(), build(torch._neg_view(torch.arange(1.0, 4.0)))
    out = by_pass(lambda x: x * 2, backend=backend)(x)
    assert type(gradient) is Pair or plain_parts(gradient)[0].is_neg()
    (grad,) = torch.autograd.grad(out, x, gradient)
    torch.testing.assert_close(plain_parts(grad)[0], torch.tensor([-2.0, -4.0, -6.0]))
