"""Rows as plain tensors inside of one graph: the lengths are extents that the compiler leaves open."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import desugar
from subclasses.ragged import JaggedTensor

DOORS = {
    "stock": lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True),
    "ours": lambda fn: desugar.compile(fn, backend="eager", fullgraph=True, strict=True),
    "behind Dynamo": lambda fn: torch.compile(
        fn, backend="desugar", options={"backend": "eager", "strict": True}, fullgraph=True
    ),
}


def dense(lengths, width=3):
    torch.manual_seed(sum(lengths))
    return JaggedTensor.from_tensors([torch.randn(n, width) for n in lengths])


def with_holes(lengths):
    torch.manual_seed(sum(lengths))
    ends = (torch.tensor(lengths) + 1).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    return JaggedTensor(torch.randn(int(ends[-1]), 3), offsets, lengths=torch.tensor(lengths))


def features_first(lengths):
    torch.manual_seed(sum(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return JaggedTensor(torch.randn(3, sum(lengths)), offsets, ragged_dim=2)


def unbound(x):
    return list(x.unbind())


def of_results(x):
    return [row.t() for row in (x * 2).unbind()]


def looped(x):
    return [sum((row.softmax(0) * 2).sum() for row in x)]


def selected(x):
    return [x[1] * 2, x[-1]]


def lengths_read(x):
    return [row.shape[0] * row.sum() for row in x.unbind()]


FUNCTIONS = [unbound, of_results, looped, selected, lengths_read]
CALLS = {
    "lengths": (dense, [(2, 4), (3, 5), (7, 1)]),
    "empty rows": (dense, [(2, 4), (0, 3), (5, 0), (0, 0)]),
    "one entry": (dense, [(2, 4), (0, 1), (1, 0)]),
    "no entry first": (dense, [(0, 0), (2, 1), (3, 4)]),
    "holes": (with_holes, [(2, 4), (3, 1), (1, 0)]),
    "features first": (features_first, [(2, 4), (3, 1), (1, 7)]),
}


@pytest.mark.sweep(84)
@pytest.mark.parametrize(
    ("door", "case"),
    [*(("ours", case) for case in CALLS), ("stock", "lengths"), ("behind Dynamo", "holes")],
)
@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_rows(door, case, fn, grad):
    compiled, (make, calls) = DOORS[door](fn), CALLS[case]
    for lengths in calls:
        x, y = (make(lengths).requires_grad_(grad) for _ in range(2))
        expected, got = fn(x), compiled(y)
        torch.testing.assert_close(got, expected)
        assert [t.requires_grad for t in got] == [grad] * len(expected)
        if grad:
            for leaves in (expected, got):
                sum(t.square().sum() for t in leaves).backward()
            torch.testing.assert_close(y.grad.values, x.grad.values)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_one_program_for_all_lengths(fn):
    compiled = DOORS["ours"](fn)
    for lengths in ((2, 4), (3, 5), (9, 2), (4, 4), (2, 8)):
        compiled(dense(lengths))
    assert len(compiled.programs) == 1


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_parts_of_an_unwrapped_field_have_gradients(door):
    def parts(x) -> list[Tensor]:
        return [*x.unwrap("values").split([2, 4]), *x.values.chunk(3), x.values[1:3]]

    x, y = (dense((2, 4)).requires_grad_() for _ in range(2))
    expected, got = parts(x), door(parts)(y)
    for leaves in (expected, got):
        sum(n * t.sum() for n, t in enumerate(leaves)).backward()
    torch.testing.assert_close(y.grad.values, x.grad.values)


# ---- parts of rows ---------------------------------------------------------------------------------------------

PARTS = {
    "first entry": lambda x: x[:, :1].mean(1),
    "all but the first": lambda x: x[:, 1:].to_dense().sum(1),
    "all but the last": lambda x: x[:, :-1] * 2,
    "last two": lambda x: x[:, -2:].values.sum(),
    "in the middle": lambda x: x[:, -4:-1].sum(1),
    "the greatest": lambda x: x.topk(1, 1).values.sum(1),
    "narrow": lambda x: x.narrow(1, 0, 2) + 1,
}


@pytest.mark.sweep(18)
@pytest.mark.parametrize("door", ["stock", "desugar"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_rows_of_any_lengths_are_one_program(name, door):
    f, counter = PARTS[name], CompileCounter()
    compiled = torch.compile(f, backend=counter) if door == "stock" else desugar.compile(f, backend="eager")
    for lengths in ([3, 7, 2], [4, 6, 9, 5], [2, 2, 5, 8, 3], [11, 6], [5, 3, 12]):
        x = JaggedTensor.from_tensors([torch.randn(n, 4) for n in lengths])
        found, expected = compiled(x), f(x)
        assert found.shape == expected.shape
        torch.testing.assert_close(
            *(t.values if isinstance(t, JaggedTensor) else t for t in (found, expected))
        )
    assert (counter.frame_count if door == "stock" else len(compiled.programs)) == 1
