"""Where a tensor begins in its storage is part of the signature only if the function counts from there."""

from __future__ import annotations

import pytest
import torch

from desugar.errors import DesugarError
from desugar.flatten.fakes import check_plain
from tests.desugar.classes import Pair
from tests.desugar.judge import BACKEND_DOORS, WAYS, by_pass

STORAGE = torch.arange(80.0).view(20, 4)


def as_many_ops_as_the_offset(x):
    for _ in range(x.storage_offset() % 3):
        x = x + 1
    return x


aten = torch.ops.aten
FUNCTIONS = {
    "window": lambda x: x.as_strided((2, 2), (1, 1)) * 2,
    "window of a view": lambda x: torch.as_strided(x[1:], (2,), (2,)) * 2,
    "view": lambda x: x[1:] * 2,
    "unfold": lambda x: x.unfold(0, 2, 1) + 1,
    "of what it made": lambda x: (x * 2).as_strided((3,), (1,), 2) + (x * 3)[1:].storage_offset(),
    "as smaller elements": lambda x: x.view(torch.int8) + 1,
    # Those that depend on the offset.
    "offset": lambda x: x * x.storage_offset(),
    "offset of a view": lambda x: x * x[1:2].storage_offset() + x[:, 2:].storage_offset(),
    "as many ops as the offset": as_many_ops_as_the_offset,
    "window at": lambda x: x.as_strided((2,), (1,), 13) * 2,
    "window of a view at": lambda x: torch.as_strided(x[1:], (2,), (1,), storage_offset=13) * 2,
    "window by its op": lambda x: (
        aten.as_strided.default(x, (2,), (1,), 13) + aten.as_strided(x, (2,), (1,), 13)
    ),
    "window before": lambda x: x.as_strided((2,), (1,), 1) * 2,
    "window that is returned": lambda x: x.as_strided((2,), (1,), 13),
    "written window": lambda x: x.as_strided((2,), (1,), 13).mul_(2),
    "scattered": lambda x: torch.as_strided_scatter(x, torch.ones(2), (2,), (1,), 13),
}


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
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("starts", [(0, 2, 3, 0), (2, 0, 3, 1)])
def test_tensors_that_begin_anywhere(name, dynamic, starts):
    if name == "offset of a view" and dynamic and starts[0] == 0:
        pytest.skip(
            "Dynamo takes the offset 0 of an argument as a constant without a guard, in stock as well"
        )
    compiled = by_pass(FUNCTIONS[name], dynamic=dynamic)
    for start in starts:
        check(compiled, FUNCTIONS[name], start)


@pytest.mark.sweep(30)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("door", BACKEND_DOORS)
def test_through_inductor(name, door):
    compiled = BACKEND_DOORS[door](FUNCTIONS[name])
    for start in (2, 0, 3):
        check(compiled, FUNCTIONS[name], start)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_program_serves_every_place_where_none_matters(dynamic, start):
    compiled = by_pass(lambda x: x * 2, dynamic=dynamic)
    for row in (start, 3, 0, 5):
        check(compiled, lambda x: x * 2, row)
    assert len(compiled.programs) == 1 + (dynamic and start > 0)  # Dynamo makes a symbol of an offset above 1
    assert "storage_offset() " not in compiled.programs[0].wrapper


def test_what_is_inside_a_wrapper():
    compiled = by_pass(lambda x: x.unwrap()[0].as_strided((2,), (1,), 13) * 2)
    for start in (0, 2, 3):
        x = Pair(STORAGE[start : start + 5], STORAGE[:5])
        torch.testing.assert_close(compiled(x), torch.tensor([26.0, 28.0]))


@pytest.mark.parametrize("way", WAYS)
def test_a_view_as_larger_elements(way):
    """It takes an offset that they divide: elsewhere the call is refused as in eager mode."""
    storage = torch.arange(64, dtype=torch.int8)
    compiled = WAYS[way](lambda x: x.view(torch.int32) + 1, dynamic=False)
    for start in (0, 8, 4, 0):
        part = storage[start : start + 16]
        assert compiled(part).equal(part.view(torch.int32) + 1)
        with pytest.raises(RuntimeError, match=r"storage_offset\(\) must be divisible by 4"):
            compiled(storage[1:17])


# ---- fakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "conjugated or negated"),
    ],
    ids=["sparse", "conj", "neg"],
)
def test_what_is_not_strided_is_refused(odd, what):
    with pytest.raises(DesugarError, match=rf"{what}[\s\S]*convert it first"):
        check_plain(odd)
    torch.testing.assert_close(by_pass(lambda x: x * 2)(odd), odd * 2)
