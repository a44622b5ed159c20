"""Sums over rows and positions, and derivatives; ops on ragged tensors judge the values of the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from subclasses.ragged.segments import Segments

ROWS = [[3, 0, 2], [1], [0, 0], [], [4, 4, 1, 0]]
OPERATIONS = ["pad", "unpad", "spread_rows", "spread_positions", "sum_rows", "sum_positions"]


def make_segments(lengths: list[int], gaps: list[int] | None = None) -> Segments:
    """Rows of these lengths; with gaps, that many entries after each row do not exist."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    held = sizes if gaps is None else sizes + torch.tensor(gaps, dtype=torch.int64)
    offsets = torch.cat([held.new_zeros(1), held.cumsum(0)])
    return Segments(offsets, None if gaps is None else sizes, int(offsets[-1]), max(lengths, default=0))


def split_rows(s: Segments, values: Tensor) -> list[Tensor]:
    """The rows by plain slicing."""
    starts, lengths = s.offsets.tolist()[:-1], s.row_lengths.tolist()
    return [values[a : a + n] for a, n in zip(starts, lengths, strict=True)]


@pytest.fixture(params=["back to back", "holes"])
def segments(request) -> list[Segments]:
    holes = request.param == "holes"
    return [make_segments(rows, [i % 3 for i, _ in enumerate(rows)] if holes else None) for rows in ROWS]


def random_values(s: Segments, *rest: int) -> Tensor:
    torch.manual_seed(0)
    values = torch.randn(s.total, *rest, dtype=torch.float64)
    if s.exists is not None:
        values[~s.exists] = float("nan")  # what does not exist must reach nothing
    return values


# ---- against a loop --------------------------------------------------------------------------------------------


def test_sums(segments):
    for s in segments:
        values = random_values(s, 2)
        rows = split_rows(s, values)
        by_row, by_position = s.sum_rows(values), s.sum_positions(values)
        assert by_row.shape == (s.count, 2) and by_position.shape == (s.width, 2)
        for got, row in zip(by_row, rows, strict=True):
            torch.testing.assert_close(got, row.sum(0))
        for place, got in enumerate(by_position):
            reaching = [row[place] for row in rows if len(row) > place]
            torch.testing.assert_close(got, torch.stack(reaching).sum(0))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=6))
def test_random_rows(rows):
    s = make_segments([n for n, _ in rows], [gap for _, gap in rows])
    values = random_values(s)
    torch.testing.assert_close(s.sum_rows(values), s.pad(values).sum(1))
    torch.testing.assert_close(s.sum_positions(values), s.pad(values).sum(0))


# ---- derivatives and dtypes -------------------------------------------------------------------------------


def argument_of(s: Segments, operation: str) -> Tensor:
    shapes = {"unpad": (s.count, s.width, 2), "spread_rows": (s.count, 2), "spread_positions": (s.width, 2)}
    return torch.randn(shapes.get(operation, (s.total, 2)), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients(operation, segments):
    s = segments[0]
    assert torch.autograd.gradcheck(getattr(s, operation), [argument_of(s, operation)])
    assert torch.autograd.gradgradcheck(getattr(s, operation), [argument_of(s, operation)])


def test_a_cotangent_of_what_does_not_exist_goes_nowhere():
    s = make_segments([2, 1], [1, 2])
    per_row = torch.ones(2, requires_grad=True)
    s.spread_rows(per_row).backward(torch.where(s.exists, 1.0, float("nan")))
    assert per_row.grad.tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bool, torch.int64), (torch.int32, torch.int64), (torch.complex64, torch.complex64)],
)
def test_sums_have_the_dtype_of_torch_sum(dtype, expected):
    s = make_segments([2, 3])
    assert s.sum_rows(torch.ones(5, dtype=dtype)).dtype == expected
    assert s.sum_rows(torch.ones(5, dtype=dtype)).tolist() == [2, 3]
