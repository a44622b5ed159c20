"""Guards of Dynamo's that prove nothing new are left out; all others stay."""

from __future__ import annotations

import pytest
import torch

import desugar
from desugar import _torch as private
from desugar.dynamo.implied_guards import has_fixed_metadata, has_fixed_names
from subclasses import TensorSubclass, inner, static
from tests.desugar.classes import Pair, Tagged, TwoTensor, make


class Unit(TensorSubclass, fallback="map"):
    data_: torch.Tensor = inner()
    unit: str = static(default="m")


class Own(TensorSubclass, fallback="map"):
    data_: torch.Tensor = inner()

    def __metadata_guard__(self, other):
        return True


def fn(x):
    return x * 2


def guards_of(fn):
    (entry,) = private.cache_entries(fn.__code__)
    return str(entry.guard_manager)


@pytest.mark.parametrize("cls", [Pair, TwoTensor])
def test_classes_without_metadata(cls):
    desugar.compile(fn, backend="eager")(x := make(cls, 2))
    assert has_fixed_metadata(x) and has_fixed_names(x)
    text = guards_of(fn)
    assert "__tensor_flatten__" not in text and "___check_metadata" not in text
    assert "TYPE_MATCH: ___check_type_id(L['x']" in text and "check_tensor(L['x'].a" in text


def test_metadata_that_may_change_keeps_its_guard():
    compiled = desugar.compile(fn, backend="eager")
    for unit in ("m", "s", "m"):
        assert compiled(Unit(torch.ones(2), unit=unit)).unit == unit
    assert not has_fixed_metadata(Unit(torch.ones(2))) and has_fixed_names(Unit(torch.ones(2)))
    assert len(compiled.programs) == 2


def test_what_an_author_has_written_keeps_its_guards():
    assert not has_fixed_metadata(Own(torch.ones(2))) and not has_fixed_names(Own(torch.ones(2)))
    assert not has_fixed_metadata(make(Tagged, 2)) and not has_fixed_names(make(Tagged, 2))


def test_a_wrapper_inside_of_another():
    compiled = desugar.compile(fn, backend="eager")
    flat, nested = Pair(torch.ones(2), torch.ones(2)), Pair(torch.ones(2), make(Pair, 2))
    assert has_fixed_metadata(flat) and not has_fixed_metadata(nested)
    for x in (flat, nested, flat):
        assert type(compiled(x).b) is type(x.b)
