"""Where a tensor begins in its storage: part of the signature only if the function counts from there."""

from __future__ import annotations

import pytest
import torch

import desugar
from tests.desugar.classes import Pair

STORAGE = torch.arange(80.0).view(20, 4)


def of_the_offset(x):
    return x * x.storage_offset()


def of_a_views_offset(x):
    return x * x[1:2].storage_offset() + x[:, 2:].storage_offset()


def as_many_ops_as_the_offset(x):
    for _ in range(x.storage_offset() % 3):
        x = x + 1
    return x


def window(x):
    return x.as_strided((2, 2), (1, 1)) * 2


def window_of_a_view(x):
    return torch.as_strided(x[1:], (2,), (2,)) * 2


def window_at(x):
    return x.as_strided((2,), (1,), 13) * 2


def window_of_a_view_at(x):
    return torch.as_strided(x[1:], (2,), (1,), storage_offset=13) * 2


def window_by_its_op(x):
    return torch.ops.aten.as_strided.default(x, (2,), (1,), 13) + torch.ops.aten.as_strided(x, (2,), (1,), 13)


def window_before(x):
    return x.as_strided((2,), (1,), 1) * 2


def window_that_is_returned(x):
    return x.as_strided((2,), (1,), 13)


def written_window(x):
    return x.as_strided((2,), (1,), 13).mul_(2)


def of_what_it_made(x):
    return (x * 2).as_strided((3,), (1,), 2) + (x * 3)[1:].storage_offset()


def scattered(x):
    return torch.as_strided_scatter(x, torch.ones(2), (2,), (1,), 13)


INDIFFERENT = [
    window,
    window_of_a_view,
    lambda x: x[1:] * 2,
    lambda x: x.unfold(0, 2, 1) + 1,
    of_what_it_made,
]
DEPENDENT = [
    of_the_offset,
    of_a_views_offset,
    as_many_ops_as_the_offset,
    window_at,
    window_of_a_view_at,
    window_by_its_op,
    window_before,
    window_that_is_returned,
    written_window,
    scattered,
]


def check(compiled, fn, start):
    """Eager mode's result, in the same place of the storage, and what was written there."""
    ours, theirs = STORAGE.clone(), STORAGE.clone()
    found, expected = compiled(ours[start : start + 5]), fn(theirs[start : start + 5])
    torch.testing.assert_close(found, expected)
    assert torch.equal(ours, theirs)
    if expected.untyped_storage().nbytes() == STORAGE.untyped_storage().nbytes():
        assert (found.storage_offset(), found.stride()) == (expected.storage_offset(), expected.stride())


@pytest.mark.sweep(54)
@pytest.mark.parametrize("dynamic", [False, None, True])
@pytest.mark.parametrize("fn", INDIFFERENT + DEPENDENT, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("starts", [(0, 2, 3, 0), (2, 0, 3, 1)])
def test_tensors_that_begin_anywhere(fn, dynamic, starts):
    if fn is of_a_views_offset and dynamic and starts[0] == 0:
        pytest.skip(
            "Dynamo takes the offset 0 of an argument as a constant without a guard, in stock as well"
        )
    compiled = desugar.compile(fn, backend="eager", dynamic=dynamic)
    for start in starts:
        check(compiled, fn, start)


@pytest.mark.sweep(30)
@pytest.mark.parametrize("fn", INDIFFERENT + DEPENDENT, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("way", ["pass", "dynamo"])
def test_through_inductor(fn, way):
    compiled = desugar.compile(fn) if way == "pass" else torch.compile(fn, backend="desugar")
    for start in (2, 0, 3):
        check(compiled, fn, start)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_program_serves_every_place_where_none_matters(dynamic, start):
    compiled = desugar.compile(lambda x: x * 2, backend="eager", dynamic=dynamic)
    for row in (start, 3, 0, 5):
        torch.testing.assert_close(compiled(STORAGE[row : row + 5]), STORAGE[row : row + 5] * 2)
    assert len(compiled.programs) == 1 + (dynamic and start > 0)  # Dynamo makes a symbol of an offset above 1
    assert "storage_offset() " not in compiled.programs[0].wrapper


def test_what_is_inside_a_wrapper():
    compiled = desugar.compile(lambda x: x.unwrap()[0].as_strided((2,), (1,), 13) * 2, backend="eager")
    for start in (0, 2, 3):
        x = Pair(STORAGE[start : start + 5], STORAGE[:5])
        torch.testing.assert_close(compiled(x), torch.tensor([26.0, 28.0]))


@pytest.mark.slow
def test_gradients():
    def loss(x):
        return (x.as_strided((2,), (1,), 13) * x.storage_offset()).sum()

    compiled = desugar.compile(loss)
    for start in (2, 0, 3):
        x = STORAGE.clone().requires_grad_()
        (found,) = torch.autograd.grad(compiled(x[start : start + 5]), x)
        (expected,) = torch.autograd.grad(loss(x[start : start + 5]), x)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", ["pass", "dynamo"])
def test_a_view_as_larger_elements(way):
    """It takes an offset that they divide: elsewhere the call is refused as in eager mode."""

    def as_words(x):
        return x.view(torch.int32) + 1

    storage = torch.arange(64, dtype=torch.int8)
    compiled = desugar.compile(as_words, backend="eager", dynamic=False)
    if way == "dynamo":
        compiled = torch.compile(as_words, backend="desugar", dynamic=False, options={"backend": "eager"})
    for start in (0, 8, 4):
        assert compiled(storage[start : start + 16]).equal(as_words(storage[start : start + 16]))
    with pytest.raises(RuntimeError, match=r"storage_offset\(\) must be divisible by 4"):
        compiled(storage[1:17])
    assert compiled(storage[:16]).equal(as_words(storage[:16]))


def test_smaller_elements_are_anywhere():
    compiled = desugar.compile(lambda x: x.view(torch.int8) + 1, backend="eager")
    for start in (0, 3, 1):
        assert compiled(STORAGE[start : start + 2]).equal(STORAGE[start : start + 2].view(torch.int8) + 1)
    assert len(compiled.programs) == 1
