"""Widths of tables: multiples, lists, powers, and the ones that are proposed."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, strategies as st

from subclasses.ragged import PaddedTensor, kernel_multiple, propose_buckets
from subclasses.ragged.padded.buckets import bucket_of
from tests.subclasses.ragged.judge import raising


@given(st.integers(0, 100), st.integers(1, 20))
def test_a_multiple_is_the_least_that_holds_the_row(length, multiple):
    width = bucket_of(length, multiple)
    assert width % multiple == 0 and width >= length and width - multiple < max(length, 1)


@given(st.integers(0, 1000))
def test_powers(length):
    width = bucket_of(length, buckets="powers")
    assert width.bit_count() == 1 and width >= length and (width == 1 or width // 2 < length)


def test_powers_of_a_table():
    x = PaddedTensor.from_tensors([torch.ones(5), torch.ones(2)], buckets="powers")
    assert x.shape == x.to_jagged().to_padded(buckets="powers").shape == (2, 8)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([1, 4, 8]))
def test_proposed_buckets_pad_least(lengths, programs, multiple):
    buckets = propose_buckets(lengths, programs=programs, multiple=multiple)

    def places(buckets):
        return sum(bucket_of(n, buckets=buckets) for n in lengths)

    assert buckets == sorted(set(buckets)) and len(buckets) <= programs
    assert all(b % multiple == 0 for b in buckets)
    widths = sorted({bucket_of(n, multiple) for n in lengths})
    every = (
        c for k in range(1, programs + 1) for c in itertools.combinations(widths, k) if c[-1] == widths[-1]
    )
    assert places(buckets) == min(map(places, every))


test_what_is_refused = raising(
    {
        "primes": (
            lambda: PaddedTensor.from_tensors([torch.ones(5)], buckets="primes"),  # type: ignore[arg-type]
            ValueError,
            "or 'powers', got 'primes'",
        ),
        "no programs": (lambda: propose_buckets([3], programs=0), ValueError, "at least 1, got 0"),
        "no multiple": (lambda: propose_buckets([3], multiple=0), ValueError, "at least 1, got 0"),
        "no lengths": (lambda: propose_buckets([]), ValueError, "one length or more"),
        "a row that fits nowhere": (
            lambda: PaddedTensor.by_length([torch.ones(9, 1)], [4, 8]),
            ValueError,
            "fits into none of",
        ),
        "no rows": (lambda: PaddedTensor.by_length([], [4]), ValueError, "at least one row"),
    }
)


def test_multiples_of_kernels():
    assert kernel_multiple(torch.float16, "cuda") == 8 and kernel_multiple(torch.int8, "cuda") == 16
    assert kernel_multiple(torch.float32) == 16 and kernel_multiple(torch.bfloat16) == 32


# ---- tables by length ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_rows_sorted_into_tables_are_those_rows(lengths):
    rows = [torch.full((n, 2), float(number)) for number, n in enumerate(lengths)]
    tables = PaddedTensor.by_length(rows, [8, 16, 64])
    seen = [number for numbers, _ in tables for number in numbers.tolist()]
    assert sorted(seen) == list(range(len(rows)))
    widths = [table.shape[1] for _, table in tables]
    assert widths == sorted(set(widths)) and set(widths) <= {8, 16, 64}
    for numbers, table in tables:
        for number, row in zip(numbers.tolist(), table.to_tensors(), strict=True):
            assert torch.equal(row, rows[number])
            assert bucket_of(len(row), buckets=[8, 16, 64]) == table.shape[1]


def test_gradients_of_tables_add_up():
    rows = [torch.randn(n, 3, requires_grad=True) for n in (2, 30, 0, 7)]
    total = sum(table.square().sum() for _, table in PaddedTensor.by_length(rows, "powers"))
    for row, grad in zip(rows, torch.autograd.grad(total, rows), strict=True):
        torch.testing.assert_close(grad, 2 * row)


def test_results_lead_back_to_the_order_of_the_rows():
    rows = [torch.randn(n, 3) for n in (2, 30, 1, 7, 9)]
    tables = PaddedTensor.by_length(rows, [8, 32])
    sums = torch.cat([table.sum(1) for _, table in tables])
    order = torch.cat([numbers for numbers, _ in tables]).argsort()
    torch.testing.assert_close(sums[order], torch.stack([row.sum(0) for row in rows]))
