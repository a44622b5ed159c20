"""The interface of both layouts, and how rules are registered on them."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict

import pytest
import torch

from subclasses.autograd.python_functions import twins
from subclasses.ragged import JaggedTensor, PaddedTensor, register
from subclasses.ragged.base import RaggedTensor
from subclasses.rules.checks import check_key, check_rule


def documented() -> list[str]:
    """The names that the docstring of the interface gives."""
    lines = re.findall(
        r"^ {4}([a-z_]+(?:\([^)]*\))?(?:, [a-z_]+(?:\([^)]*\))?)*):", inspect.getdoc(RaggedTensor), re.M
    )
    return [name for line in lines for name in re.findall(r"([a-z_]+)(?:\([^)]*\))?(?:, |$)", line)]


@pytest.mark.parametrize("layout", [JaggedTensor, PaddedTensor])
def test_a_layout_has_the_whole_interface(layout):
    names = documented()
    assert len(names) > 40 and {"stored", "with_kept", "join_entries", "check_same_rows"} <= set(names)
    only_where_rows_come_first = ["pick_together"] if layout is PaddedTensor else []
    assert [n for n in names if not hasattr(layout, n)] == only_where_rows_come_first


def test_the_order_in_which_rules_are_registered_has_no_meaning():
    """No function gets a rule from two others whose twin it is, and none has two of its own."""
    for merging in (register.jagged_merging, register.padded_merging):
        entries = [entry for module in (*register.BOTH, merging) for entry in module.RULES.entries]
        named = [op for ops, _ in entries for op in ops]
        assert len(named) == len({id(op) for op in named})
        implied = defaultdict(set)
        for ops, rule in entries:
            for twin in (t for op in ops if callable(op) for t in twins(op)):
                implied[twin].add(rule)
        assert not [twin for twin, rules in implied.items() if len(rules) > 1 and twin not in named]


def test_the_rules_pass_the_checks_of_implements():
    """They are registered without these checks, so that an import does not make them."""
    both = {JaggedTensor: register.jagged_merging, PaddedTensor: register.padded_merging}
    cases = [(cls, module) for cls, merging in both.items() for module in (*register.BOTH, merging)]
    cases += [(register.time_major.TimeMajor, module) for module in (register.multi_head, register.recurrent)]
    entries = [(cls, *entry) for cls, module in cases for entry in module.RULES.entries]
    assert len(entries) > 200
    for cls, ops, rule in entries:
        for op in ops:
            check_key(cls, op)
        check_rule(cls, ops, rule)


OUT_OF_RANGE = {
    "diff": lambda x, d: x.diff(dim=d),
    "flatten": lambda x, d: x.flatten(0, d),
    "flatten, start": lambda x, d: x.flatten(d, 1),
    "unflatten": lambda x, d: x.unflatten(d, (1, -1)),
    "transpose": lambda x, d: x.transpose(0, d),
    "swapaxes": lambda x, d: x.swapaxes(d, 1),
    "sum": lambda x, d: x.sum(d),
    "tensor_split": lambda x, d: x.tensor_split(2, d),
}


@pytest.mark.parametrize("kind", [JaggedTensor, PaddedTensor])
@pytest.mark.parametrize("name", OUT_OF_RANGE)
@pytest.mark.parametrize("dim", [2, 3, -3])
def test_dimensions_that_are_none(name, dim, kind):
    x = kind.from_tensors([torch.arange(3.0), torch.ones(1)])
    with pytest.raises(IndexError):
        OUT_OF_RANGE[name](torch.ones(2, 3), dim)
    with pytest.raises(IndexError):
        OUT_OF_RANGE[name](x, dim)


@pytest.mark.parametrize("kind", [JaggedTensor, PaddedTensor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_any_and_all_of_no_dimension_keep_the_rows(kind, dtype):
    rows = [torch.tensor([0, 1, 2]).to(dtype), torch.tensor([0]).to(dtype)]
    for reduced in (torch.any, torch.all):
        for row, plain in zip(reduced(kind.from_tensors(rows), ()).unbind(), rows, strict=True):
            torch.testing.assert_close(row, reduced(plain, ()))
