"""Containers of arguments taken apart by text."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import optree
import pytest
import torch

import desugar
from desugar.arguments import Unpacking
from desugar.trees import flatten
from subclasses.build import build_functions
from subclasses.emit import Emitter

MISS = object()
Point = namedtuple("Point", "x y")


def build(args: tuple[Any, ...], kwargs: dict[str, Any]):
    """A function (args, kwargs) -> list of leaves or MISS, and its text."""
    unpacking, leaves = Unpacking.of(args, kwargs)
    out = Emitter()
    out.reserve("args", "kwargs", "run")
    out.writeline("def run(args, kwargs):")
    miss = out.bind(MISS, "MISS")

    def require(condition: str) -> None:
        out.writeline(f"if not ({condition}):")
        with out.indent():
            out.writeline(f"return {miss}")

    with out.indent():
        names = unpacking.emit(out, require)
        out.writeline(f"return [{', '.join(names)}]")
    run = build_functions(out.source, out.namespace, filename="<unpacking>")["run"]
    assert run(args, kwargs) == leaves
    return run, out.source


CALLS = [
    ((), {}),
    ((1,), {}),
    ((1, None, "s"), {}),
    ((), {"a": 1}),
    ((1,), {"b": 2, "a": 3}),
    (([1, (2, 3)], {"k": [4], 5: ()}), {"z": {"y": {"x": 6}}}),
    (((), [], {}), {}),
    ((Point(1, 2),), {}),
    ((OrderedDict(a=1, b=2),), {}),
    (({(1, 2): 3},), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS, ids=map(str, CALLS))
def test_leaves_come_in_the_order_of_flatten(args, kwargs):
    run, _ = build(args, kwargs)
    assert run(args, kwargs) == flatten((args, kwargs))[0]


@pytest.mark.parametrize(("args", "kwargs"), CALLS, ids=map(str, CALLS))
def test_another_structure_misses(args, kwargs):
    run, _ = build(args, kwargs)
    structure = optree.tree_structure((args, kwargs), none_is_leaf=True)
    for other in CALLS:
        if optree.tree_structure(other, none_is_leaf=True) != structure:
            found = run(*other)
            # A container where a leaf stood is found by the check of that leaf: it is neither tensor nor equal.
            assert found is MISS or any(isinstance(leaf, tuple | list | dict) for leaf in found), other


def test_type_of_containers_matters():
    run, _ = build(([1, 2]), {})
    assert run(((1, 2),), {}) is MISS
    assert run((Point(1, 2),), {}) is MISS
    assert run(([1, 2]), {}) == [1, 2]


def test_another_order_of_keywords_or_keys_is_another_structure():
    run, _ = build(({"a": 1, "b": 2},), {"c": 3, "d": 4})
    assert run(({"a": 5, "b": 6},), {"c": 7, "d": 8}) == [5, 6, 7, 8]
    assert run(({"b": 2, "a": 1},), {"c": 3, "d": 4}) is MISS
    assert run(({"a": 1, "b": 2},), {"d": 4, "c": 3}) is MISS


def test_builtin_containers_need_no_pytree_library():
    _, text = build(([1, (2, 3)], {"k": [4]}), {"z": 5})
    assert "flatten" not in text and "isinstance" not in text
    assert "flatten((args, kwargs))" in build((Point(1, 2),), {})[1]


def test_sample():
    _, text = build((1, [2]), {"k": 3})
    assert (
        text
        == """\
def run(args, kwargs):
    if not (len(args) == 2):
        return MISS
    a0 = args[0]
    node = args[1]
    if not (type(node) is list):
        return MISS
    if not (len(node) == 1):
        return MISS
    (a1,) = node
    if not ([*kwargs] == ['k']):
        return MISS
    a2 = kwargs['k']
    return [a0, a1, a2]
"""
    )


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda d: defaultdict(list, d)])
def test_the_order_of_a_dict(kind):
    compiled = desugar.compile(lambda d: torch.stack([*d["k"].values()]), backend="eager")
    a, b = torch.ones(2), torch.zeros(2)
    for d in ({"a": a, "b": b}, {"b": b, "a": a}, {"b": a, "a": b}):
        assert torch.equal(compiled({"k": kind(d)}), torch.stack([*d.values()]))
    assert len(compiled.programs) == 2


def test_the_order_of_keyword_arguments():
    def fn(**kwargs):
        return torch.stack([*kwargs.values()])

    compiled = desugar.compile(fn, backend="eager")
    a, b = torch.ones(2), torch.zeros(2)
    assert torch.equal(compiled(a=a, b=b), torch.stack([a, b]))
    assert torch.equal(compiled(b=b, a=a), torch.stack([b, a]))
