"""Sizes that only data determines: compiled functions give the values, and as many, as eager mode gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from subclasses.ragged import JaggedTensor
from subclasses.ragged.data_sizes import size_of, true_places
from tests.doors import COMPILED, by_desugar

KERNEL = torch.linspace(-1, 1, 18).view(3, 3, 2)
ODD_ROWS = torch.tensor([1, 0, 1])


def convolved(x: Any) -> Any:
    """Rows shorter by one entry."""
    return F.conv1d(x.mT, KERNEL).mT


CASES: dict[str, Callable[[Any], Any]] = {
    "convolution": convolved,
    "pool": lambda x: F.max_pool1d(x.mT, 2, 1).mT,
    "from_padded": lambda x: JaggedTensor.from_padded(x.to_dense(), x.row_lengths()),
    "from_mask": lambda x: JaggedTensor.from_mask(x.to_dense(), x.mask()),
    "to_jagged": lambda x: x.to_padded(multiple=8).to_jagged(),
    "two of other sizes": lambda x: convolved(x) + F.max_pool1d(x.mT, 2, 1).mT,
    "beside a slice": lambda x: x[:, 1:] * convolved(x),
    "joined": lambda x: torch.cat([convolved(x), x], 1),
    "taken apart": lambda x: JaggedTensor(convolved(x).values, convolved(x).offsets, max_length=x.shape[1]),
    "a slice": lambda x: convolved(x)[:, 1:],
    "rows by numbers": lambda x: x[ODD_ROWS],
    "rows by a list": lambda x: x[[0, -1]],
    "rows by a mask": lambda x: x[x.row_lengths() > 2],
    "entries by a mask": lambda x: x[x.select(2, 0) > 0],
    "elements by a mask": lambda x: x[x > 0],
    "features by a mask": lambda x: x[..., torch.tensor([True, False, True])],
}

# The second batch has no entry in some results.
BATCHES = ([3, 2, 5], [2, 2], [4, 3, 2, 2], [2, 6])


def batch(lengths: list[int]) -> JaggedTensor:
    """Rows of these lengths, with gradients."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randn(n, 3, generator=generator) for n in lengths]
    return JaggedTensor.from_tensors(rows).requires_grad_()


def parts(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that reads what its result stores, inside."""

    def read(x: Any) -> Any:
        y = f(x)
        return y.values.mean(), y.unwrap("values"), y.offsets, y.row_lengths(), y

    return read


def check(f: Callable[[Any], Any], program: Callable[[Any], Any]) -> None:
    """The parts of results and the gradients are those of eager mode, inside of the function and outside."""
    for lengths in BATCHES:
        x, judge = batch(lengths), batch(lengths)
        found, expected = program(x), parts(f)(judge)
        torch.testing.assert_close(found[:-1], expected[:-1], equal_nan=True)
        torch.testing.assert_close(found[-1].values, expected[-1].values)
        assert (found[-1].lengths is None) == (expected[-1].lengths is None)
        for result in (found, expected):
            (result[0].nan_to_num() + result[-1].values.square().sum()).backward()
        torch.testing.assert_close(x.grad.values, judge.grad.values)  # type: ignore[union-attr]


@pytest.mark.sweep(50)
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_eager_mode(name, door):
    check(CASES[name], COMPILED[door](parts(CASES[name]), fullgraph=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convolution", "elements by a mask"])
@pytest.mark.parametrize("backend", ["inductor", "desugar"])
def test_values_are_those_of_eager_mode_in_kernels(name, backend):
    check(CASES[name], torch.compile(parts(CASES[name]), backend=backend, fullgraph=True))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    f = parts(CASES["from_padded"])
    program = by_desugar(f)
    with mode():
        for lengths in ([3, 2, 5], [0, 1], [0, 0], [1, 1, 1]):
            x = batch(lengths)
            torch.testing.assert_close(program(x)[:-1], f(x)[:-1], equal_nan=True)


@pytest.mark.parametrize("mask", [[True, False], [False, False]])
def test_rows_of_a_mask_that_is_all_false(mask):
    x, mask = batch([3, 2]), torch.tensor(mask)
    program = by_desugar(lambda x, mask: x[mask].values.sum(0))
    torch.testing.assert_close(program(x, mask), x[mask].values.sum(0))


@pytest.mark.parametrize("lengths", [[2, 4], [2, -1]])
def test_lengths_that_a_table_does_not_have(lengths):
    table = torch.ones(2, 3)
    program = by_desugar(lambda table, lengths: JaggedTensor.from_padded(table, lengths).values.sum())
    program(table, torch.tensor([1, 3]))
    with pytest.raises(RuntimeError, match="from_padded: a length is negative, or beyond the extent"):
        program(table, torch.tensor(lengths))


def test_a_mask_of_another_number_of_rows():
    with pytest.raises(IndexError, match="expected a mask of 2 rows, got one of 1"):
        batch([3, 2])[torch.tensor([True])]


def test_sizes_in_eager_mode():
    assert size_of(torch.tensor(3)) == 3
    assert true_places(torch.tensor([True, False, True])).tolist() == [0, 2]
    assert torch.ops.subclasses.numbers_below(torch.tensor(3)).tolist() == [0, 1, 2]
