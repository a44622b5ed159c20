"""Sizes of ragged values are symbols in the first program, whatever lies between the constructor and the call."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from subclasses._torch import dims_marked_dynamic
from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor
from subclasses.ragged.indexing.splitting import extent_of_slice
from tests.doors import by_desugar

BATCHES = [(3, 5), (4, 2, 7), (9, 8, 3, 2), (2, 6), (3, 3, 3, 3, 3)]
triple = by_desugar(lambda x: x * 3)
doors = pytest.mark.parametrize("door", ["ours", "stock"])

WAYS = {
    "op": lambda x: x * 2,
    "conversion": lambda x: x.to(torch.float64),
    "detach": lambda x: x.detach(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "all of it": lambda x: x[:],
    "slice of each row": lambda x: x[:, 1:],
    "merged": lambda x: x.flatten(0, 1),
    "ragged along 2": lambda x: x.transpose(1, 2),
    "result of a program": lambda x: triple(x),
    "as made": lambda x: x,
}


def rows(lengths):
    return JaggedTensor.from_tensors([torch.randn(n, 4) for n in lengths])


def parts(y):
    return y.unwrap() if isinstance(y, JaggedTensor) else (y,)


def count_programs(door, fn, calls):
    """Runs calls through a door, compares with eager mode, and returns how many programs it took."""
    counter = CompileCounter()
    stock = door == "stock"
    compiled = torch.compile(fn, backend=counter) if stock else by_desugar(fn)
    for x in calls:
        got, want = compiled(x), fn(x)
        assert got.shape == want.shape
        for inner, expected in zip(parts(got), parts(want), strict=True):
            torch.testing.assert_close(inner, expected)
    return counter.frame_count if stock else len(compiled.programs)


@pytest.mark.sweep(24)
@doors
@pytest.mark.parametrize("way", WAYS)
def test_one_program(way, door):
    assert count_programs(door, lambda x: x.sin() + 1, [WAYS[way](rows(n)) for n in BATCHES]) == 1


@doors
def test_one_program_for_values_of_the_constructor_and_of_ops(door):
    calls = [rows(n) if number % 2 else rows(n) * 2 for number, n in enumerate(BATCHES)]
    assert count_programs(door, torch.sin, calls) == 1


@pytest.mark.sweep(2)
@doors
@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.to(torch.float64), lambda x: x.permute([1, 0])])
def test_one_program_for_keyed_rows(change, door):
    def keyed(lengths):
        both = torch.tensor([*lengths, *lengths[::-1]])
        return KeyedJaggedTensor(["a", "b"], torch.randn(int(both.sum())), both)

    assert count_programs(door, lambda x: x["a"].sin(), [change(keyed(n)) for n in BATCHES]) == 1


def test_dims_marked_dynamic():
    """A feature of the extent of the rows is no symbol; a user's mark adds to those of the class."""
    x = rows((4, 2))  # as long as the features are many
    assert x.shape == (2, 4, 4) and dims_marked_dynamic(x) == [0, 1]
    torch._dynamo.maybe_mark_dynamic(x, 2)
    assert dims_marked_dynamic(x) == [0, 1, 2]


PARTS = {
    "all of it": lambda x: x[:, slice(0, None), :],
    "all but the last": lambda x: x[:, :-1],
    "all but the first and the last": lambda x: x[:, 1:-1],
    "last two": lambda x: x[:, -2:],
    "last two, read": lambda x: x[:, -2:].values.sum(),
    "view": lambda x: x.view(*x.shape[:2], -1, 2),
    "reshape": lambda x: x.reshape(*x.shape[:2], 2, -1),
    "first entry": lambda x: x[:, :1].mean(1),
    "all but the first": lambda x: x[:, 1:].to_dense().sum(1),
    "in the middle": lambda x: x[:, -4:-1].sum(1),
    "the greatest": lambda x: x.topk(1, 1).values.sum(1),
    "narrow": lambda x: x.narrow(1, 0, 2) + 1,
}


@pytest.mark.sweep(12)
@doors
@pytest.mark.parametrize("name", PARTS)
def test_no_guard_on_the_longest_row(name, door):
    """The longest rows are also as long as an entry has elements, or as a part of one has."""
    calls = [rows(lengths) for lengths in [(3, 7), (4, 3, 3), (3, 2, 3), (9, 8, 3, 5), (5, 4)]]
    assert count_programs(door, PARTS[name], calls) == 1


def test_extent_of_a_slice():
    bounds = [None, *range(-6, 7)]
    for extent, start, stop in itertools.product(range(5), bounds, bounds):
        part = slice(start, stop)
        assert extent_of_slice(extent, part) == len(range(extent)[part])


# ---- a longest row of 1 ------------------------------------------------------------------------------------------

SHORT = [(2, 5, 1), (1, 1, 1), (4, 3), (0, 1, 1, 0)]


# How many programs a function takes at most: a guard separates those where the results differ.
FUNCTIONS = {
    "sum": (1, lambda x: x.sum(1)),
    "mean": (1, lambda x: x.mean(1)),
    "softmax": (1, lambda x: x.softmax(1)),
    "sin": (1, lambda x: x.sin() * 2),
    "a comparison": (2, lambda x: x.sum(1) * (3 if x.shape[1] > 1 else 5)),
    "the first": (2, lambda x: x[:, :1].sum(1)),
    "all but the first": (2, lambda x: x[:, 1:].sum(1)),
    "squeeze": (2, lambda x: x.to_dense(0).squeeze(1)),
    "a dense operand": (2, lambda x: x + torch.ones(x.shape[1], 1)),
    "positions": (2, lambda x: x * x.to_dense(1).sum(0)),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("first", range(len(SHORT)))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_programs_for_a_longest_row_of_1(name, first):
    most, fn = FUNCTIONS[name]
    calls = [rows(lengths) for lengths in SHORT[first:] + SHORT[:first]]
    assert count_programs("ours", fn, calls) <= most


def test_features_with_a_longest_row_of_1_do_not_multiply_programs():
    """Constants would make a program of each combination of features."""
    compiled = by_desugar(lambda *xs: [x.sum(1) for x in xs])
    for short in range(4):
        xs = [rows((1, 1, 0) if n == short else (2, 3, 1)) for n in range(4)]
        torch.testing.assert_close(compiled(*xs), [x.sum(1) for x in xs])
    assert len(compiled.programs) == 1
