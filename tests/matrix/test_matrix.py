"""The differential matrix: class x op x way to run it x mode, judged by plain tensors.

The tests compare values, types of results, aliasing, and first and second gradients by the inner tensors. `REFUSED`
lists each pair of class and op that is refused, with the words of the error. A listed pair that works fails, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError
from tests.doors import DOORS
from tests.matrix.ops import OPS, Op
from tests.matrix.subjects import SUBJECTS, Plain, Subject

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}

CASES = [(s, op) for s in SUBJECTS for op in OPS if s.has(op)]
# By class and op: a part of the error.
REFUSED = {
    (s.name, op.name): "would be lost"
    for s, op in CASES
    if s.copies and op.kind in ("write", "pointwise write") and op.name != "copy_"
}

# The formula for a view, taken by AOTAutograd from its base, makes zeros of the class.
REFUSED_BY_STOCK = {
    ("log probability", "x[0]"): "no rule for aten.new_zeros",
    ("log probability", "reshape"): "no rule for aten.new_zeros",
}


def outs_of(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def on_plain(subject: Subject, op: Op, x: Plain, y: Plain) -> list[Tensor]:
    """Runs an op on the plain tensors that two values represent."""
    if subject.own:
        return outs_of(subject.own[op.name](*x, *y))
    results = [outs_of(op.run(p, q)) for p, q in zip(subject.plain(*x), subject.plain(*y), strict=True)]
    return [part for each in zip(*results, strict=True) for part in each]


def plain_results(subject: Subject, result: Any) -> list[Tensor]:
    """Returns the plain tensors for which the results of an op stand."""
    return [part for out in outs_of(result) for part in subject.read(out)]


def gradients(outs: list[Tensor], leaves: Plain, *, twice: bool) -> list[Tensor]:
    """Returns the gradients of a weighted sum of results, and the gradients of the sum of their squares."""
    weighted = [
        (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().double()
        for out in outs
        if out.requires_grad
    ]
    if not weighted:
        return []
    first = torch.autograd.grad(
        sum(weighted), leaves, create_graph=twice, allow_unused=True, materialize_grads=True
    )
    if not twice or not any(g.requires_grad for g in first):
        return list(first)
    squares = sum(g.square().sum() for g in first)
    return [
        *first,
        *torch.autograd.grad(squares, leaves, allow_unused=True, materialize_grads=True),
    ]


def leaves_of(subject: Subject) -> tuple[Plain, Plain]:
    return subject.inners(1), subject.inners(2)


def check(subject: Subject, op: Op, way: str, mode: str) -> None:
    """Compares an op on values with the op on plain tensors, in one mode."""
    mine, theirs = leaves_of(subject), leaves_of(subject)
    with MODES[mode]():
        expected = on_plain(subject, op, *theirs)
        # A backward that is derived again runs the function again, on values that are still there.
        values = [subject.build(*inners) for inners in mine]
        got = plain_results(subject, DOORS[way](op.run, fullgraph=True)(*values))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    if mode == "grad":
        assert [t.requires_grad for t in got] == [t.requires_grad for t in expected]
        for one, other in zip(
            gradients(got, sum(mine, ()), twice=way != "stock"),
            gradients(expected, sum(theirs, ()), twice=way != "stock"),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def check_aliasing(subject: Subject, op: Op, way: str) -> None:
    """Writes to the results, and compares what became of the operands."""
    mine, theirs = (tuple(t.detach().clone() for t in subject.inners(1)) for _ in range(2))
    value, other = subject.build(*mine), subject.build(*mine)
    plain = subject.plain(*theirs)
    for result in outs_of(DOORS[way](op.run, fullgraph=True)(value, other)):
        result.mul_(3)
    for p in plain:
        for result in outs_of(op.run(p, p.clone())):
            result.mul_(3)
    if subject.copies:
        plain = subject.plain(*(t.detach() for t in subject.inners(1)))
    for one, wanted in zip(subject.read(value), plain, strict=True):
        torch.testing.assert_close(one, wanted)


def id_of(case: tuple[Subject, Op]) -> str:
    return f"{case[0].name}: {case[1].name}"


@pytest.mark.sweep(28)
@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_in_eager_mode(case):
    subject, op = case
    if (words := REFUSED.get((subject.name, op.name))) is not None:
        for mode in MODES.values():
            with mode(), pytest.raises(DispatchError, match=words):
                op.run(*(subject.build(*inners) for inners in leaves_of(subject)))
        return
    for mode in MODES:
        check(subject, op, "eager", mode)
    if op.kind in ("view", "copy") and not subject.own:
        check_aliasing(subject, op, "eager")


@pytest.mark.sweep(2880)
@pytest.mark.parametrize("way", ["stock", "desugar", "inside"])
@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_compiled(case, way):
    subject, op = case
    refused = REFUSED | (REFUSED_BY_STOCK if way == "stock" else {})
    if (words := refused.get((subject.name, op.name))) is not None:
        leaves = leaves_of(subject)
        values = [subject.build(*inners) for inners in leaves]
        with pytest.raises(Exception, match=words):
            gradients(
                plain_results(subject, DOORS[way](op.run, fullgraph=True)(*values)),
                sum(leaves, ()),
                twice=False,
            )
        return
    check(subject, op, way, "grad")
    torch.compiler.reset()
    check(subject, op, way, "no_grad")
    if op.kind in ("view", "copy") and not subject.own:
        torch.compiler.reset()
        check_aliasing(subject, op, way)
