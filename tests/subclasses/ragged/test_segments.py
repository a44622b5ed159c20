"""Derivatives and dtypes of sums over rows and positions; tests of ops on ragged tensors judge their values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses.ragged.segments import Segments

OPERATIONS = {  # and the size of an argument, for rows of 3, 0 and 2 entries
    "pad": ("total", 2),
    "unpad": (3, 3, 2),
    "spread_rows": (3, 2),
    "spread_positions": (3, 2),
    "sum_rows": ("total", 2),
    "sum_positions": ("total", 2),
}


def make_segments(gaps: tuple[int, ...]) -> Segments:
    """Rows after each of which so many entries do not exist."""
    sizes = torch.tensor([3, 0, 2])
    offsets = F.pad((sizes + torch.tensor(gaps)).cumsum(0), (1, 0))
    return Segments(offsets, sizes if any(gaps) else None, int(offsets[-1]), 3)


@pytest.mark.parametrize("gaps", [(0, 0, 0), (0, 1, 2)], ids=["back to back", "holes"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients(operation, gaps):
    s = make_segments(gaps)
    size = [s.total if n == "total" else n for n in OPERATIONS[operation]]
    argument = torch.randn(size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(getattr(s, operation), [argument])
    assert torch.autograd.gradgradcheck(getattr(s, operation), [argument])


def test_a_cotangent_of_what_does_not_exist_goes_nowhere():
    s, per_row = make_segments((1, 0, 2)), torch.ones(3, requires_grad=True)
    s.spread_rows(per_row).backward(torch.where(s.exists, 1.0, float("nan")))
    assert per_row.grad.tolist() == [3, 0, 2]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bool, torch.int64), (torch.int32, torch.int64), (torch.complex64, torch.complex64)],
)
def test_sums_have_the_dtype_of_torch_sum(dtype, expected):
    found = make_segments((0, 0, 0)).sum_rows(torch.ones(5, dtype=dtype))
    assert found.dtype == expected and found.tolist() == [3, 0, 2]
