"""Widths of tables: multiples, lists, powers, and the ones that are proposed."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from subclasses.ragged import PaddedTensor, kernel_multiple, propose_buckets
from subclasses.ragged.padded.buckets import bucket_of


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
    assert x.shape == (2, 8) and x.to_jagged().to_padded(buckets="powers").shape == (2, 8)
    with pytest.raises(ValueError, match="or 'powers', got 'primes'"):
        PaddedTensor.from_tensors([torch.ones(5)], buckets="primes")  # type: ignore[arg-type]


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


def test_no_lengths_and_no_programs():
    for options in ({"programs": 0}, {"multiple": 0}):
        with pytest.raises(ValueError, match="at least 1, got 0"):
            propose_buckets([3], **options)
    with pytest.raises(ValueError, match="one length or more"):
        propose_buckets([])


def test_multiples_of_kernels():
    assert kernel_multiple(torch.float16, "cuda") == 8 and kernel_multiple(torch.int8, "cuda") == 16
    assert kernel_multiple(torch.float32) == 16 and kernel_multiple(torch.bfloat16) == 32
