"""Indexing by tensors of one number, whose value changes from call to call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from tests.desugar.classes import Pair, make
from tests.desugar.judge import judge

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


def set_row(x: Tensor, i: Tensor) -> Tensor:
    x[i] = 7.0
    return x * 2


def scale_row(x: Tensor, i: Tensor) -> Tensor:
    x[i].mul_(3)
    return x * 2


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", INDEXED)
def test_numbers_of_tensors(name: str, grad: bool):
    fn = INDEXED[name]
    compiled = None
    for i in (1, 3, 0, 2):
        compiled = judge(fn, lambda i=i: (torch.randn(4, 4).requires_grad_(grad), torch.tensor(i)), compiled)
    assert len(compiled.programs) == 1


@pytest.mark.parametrize("fn", [set_row, scale_row])
def test_writes(fn):
    compiled = None
    for i in (1, 3, 0, -1):
        compiled = judge(fn, lambda i=i: (torch.randn(4, 4), torch.tensor(i)), compiled)


def test_a_wrapper():
    compiled = None
    for i in (1, 3, 0):
        compiled = judge(lambda x, i: x[i] * 2, lambda i=i: (make(Pair, 4, 4), torch.tensor(i)), compiled)


@pytest.mark.parametrize("fn", [lambda x, i: x if i.item() > 2 else -x, lambda x, i: x * int(i)])
def test_a_number_that_the_trace_would_have_to_know_is_refused(fn):
    with pytest.raises(desugar.DesugarError, match="depends on the data"):
        desugar.compile(fn, backend="eager")(torch.ones(2), torch.tensor(3))


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("fn", [lambda x, m: x[m] * 2, lambda x, m: x[m, 1:], lambda x, m: x[0, m]])
@pytest.mark.parametrize("cls", [Tensor, Pair])
def test_masks_of_bytes(cls, fn):
    compiled = None
    for mask in ([1, 0, 2, 0], [1, 1, 1, 0]):
        make_arguments = lambda mask=mask: (make(cls, 4, 4), torch.tensor(mask, dtype=torch.uint8))  # noqa: E731
        compiled = judge(fn, make_arguments, compiled)
