"""What a hole holds reaches no gradient; see holes.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import desugar
from subclasses.ragged import JaggedTensor

OFFSETS, LENGTHS = torch.tensor([0, 3, 6]), torch.tensor([2, 2])
HOLES = [2, 5]

OPS = {
    "exp": torch.exp,
    "log": torch.log,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "var": lambda x: x.var(1),
    "amax": lambda x: x.amax(-1),
    "prod": lambda x: x.prod(-1),
}


def poisoned(fill=float("nan")):
    values = torch.arange(1.0, 13.0, dtype=torch.float64).view(6, 2)
    values[HOLES] = fill
    return values.requires_grad_()


@pytest.mark.sweep(16)
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_is_that_of_the_rows(op, fill, compiled):
    def loss(values, offsets, lengths):
        return op(JaggedTensor(values, offsets, lengths=lengths, max_length=3)).sum()

    values = poisoned(fill)
    (desugar.compile(loss, backend="eager") if compiled else loss)(values, OFFSETS, LENGTHS).backward()
    rows = torch.cat([values.detach()[:2], values.detach()[3:5]]).requires_grad_()
    sum(op(r.unsqueeze(0)).sum() for r in rows.split(2)).backward()
    expected = torch.zeros_like(values)
    expected[[0, 1, 3, 4]] = rows.grad
    torch.testing.assert_close(values.grad, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bias_before_rows_are_cut(compiled):
    rows = [torch.tensor([[1.0, 1], [2, 2], [0, 0]]), torch.tensor([[3.0, 3], [0, 0]])]

    def loss(x, w):
        return (x * w)[:, :-1].log().sum()

    w = torch.ones(2, requires_grad=True)
    (desugar.compile(loss, backend="eager") if compiled else loss)(
        JaggedTensor.from_tensors(rows), w
    ).backward()
    torch.testing.assert_close(w.grad, torch.tensor([3.0, 3.0]))


def test_rows_of_numbers_need_a_dimension():
    with pytest.raises(ValueError, match="at least one dimension, and row 0 has none"):
        JaggedTensor.from_tensors([torch.tensor(1.0)])
