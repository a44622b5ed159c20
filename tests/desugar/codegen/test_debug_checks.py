"""The switch that turns every proved check on again: silent where proofs are right, loud where one is not."""

from __future__ import annotations

import pytest
import torch

from desugar.codegen.debug_checks import Expected, recheck
from desugar.ir.values import Flat, unwrap_value
from desugar.passes.verify import RECHECK_VARIABLE, InvariantError, rechecks_enabled
from tests.desugar.classes import EVERY, Pair, Tagged, make, plain_parts
from tests.desugar.judge import assert_programs, by_dynamo, by_pass, judge


@pytest.fixture
def rechecking(monkeypatch):
    monkeypatch.setenv(RECHECK_VARIABLE, "1")


def test_off_by_default():
    assert not rechecks_enabled()
    compiled = by_pass(lambda x: x * 2)
    compiled(make(Pair, 2))
    assert "recheck" not in compiled.programs[0].source


@pytest.mark.sweep(13)
@pytest.mark.parametrize("way", [by_pass, by_dynamo])
@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("grad", [False, True])
def test_silent(rechecking, cls, grad, way):
    compiled = judge(
        lambda x, y: ((x * y).sin(), x + 1),
        lambda: (make(cls, 3, 4, grad=grad), torch.randn(4)),
        way=way,
        calls=2,
    )
    assert way is not by_pass or "recheck(" in compiled.programs[0].source


@pytest.mark.sweep(7)
@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_silent_with_dynamic_sizes(rechecking, cls):
    calls = [lambda rows=rows: (make(cls, rows, 4, grad=True),) for rows in (2, 3, 4, 5)]
    assert_programs(lambda x: (x * 2).sin(), calls, 2)


@pytest.mark.slow
def test_silent_where_inductor_checks_no_sizes(rechecking):
    compiled = by_pass(lambda x: x * 2, backend="inductor", dynamic=False)
    for rows in (2, 1):
        for x in (make(Pair, rows, 4), make(Pair, 4, rows).t(), make(Pair, rows, 8)[:, ::2]):
            torch.testing.assert_close(plain_parts(compiled(x)), plain_parts(x * 2))


# ---- it can fire -------------------------------------------------------------------------------------------


def expected_of(leaf):
    flat = Flat()
    return Expected("things", (unwrap_value(leaf, flat),), dict(enumerate(flat.items)))


CHANGED = {
    "class": (make(Pair, 2, 3), make(Tagged, 2, 3), "type"),
    "metadata": (Tagged(torch.ones(2), torch.ones(2), "a"), Tagged(torch.ones(2), torch.ones(2), "b"), "metadata"),
    "size": (make(Pair, 2, 3), make(Pair, 3, 3), "size"),
    "stride": (torch.ones(2, 3), torch.ones(3, 2).t(), "stride"),
    "dtype": (torch.ones(2), torch.ones(2).double(), "dtype"),
    "dimensions": (torch.ones(2), torch.ones(2, 1), "dimensions"),
    "a wrapper inside": (
        Tagged(torch.ones(2), torch.ones(2)), Tagged(make(Pair, 2), torch.ones(2)), "a Pair, proved to be a plain",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_fires(name):
    traced, live, match = CHANGED[name]
    recheck([traced], expected_of(traced))
    with pytest.raises(InvariantError, match=match):
        recheck([live], expected_of(traced))


def test_a_constructor_that_cheats_is_caught(rechecking):
    """A class by hand whose instances change behind the wrapper's back."""
    compiled, x = by_pass(lambda x: x * 2), make(Pair, 3)
    compiled(x)
    scope = compiled.programs[0].run.__globals__
    scope["compiled_graph"] = lambda items: (torch.ones(4), torch.ones(3))
    with pytest.raises(InvariantError, match="size of results"):
        compiled(x)


def test_a_float_among_the_results(rechecking):
    compiled = by_pass(lambda x: (x * 2, x.numel() / 2))
    assert [compiled(torch.ones(n))[1] for n in (3, 4, 5)] == [1.5, 2.0, 2.5]
