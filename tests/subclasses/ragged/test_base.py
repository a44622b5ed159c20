"""How rules are registered on both layouts, and dimensions that a row has not."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from subclasses.autograd.python_functions import twins
from subclasses.ragged import JaggedTensor, PaddedTensor, register
from subclasses.rules.checks import check_key, check_rule
from tests.subclasses.ragged.judge import classes, same


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


@classes
@pytest.mark.parametrize("name", OUT_OF_RANGE)
@pytest.mark.parametrize("dim", [2, 3, -3])
def test_dimensions_that_are_none(name, dim, cls):
    x = cls.from_tensors([torch.arange(3.0), torch.ones(1)])
    with pytest.raises(IndexError):
        OUT_OF_RANGE[name](torch.ones(2, 3), dim)
    with pytest.raises(IndexError):
        OUT_OF_RANGE[name](x, dim)


def of_no_dimension(cls, reduced, dtype):
    rows = [torch.tensor([0, 1, 2]).to(dtype), torch.tensor([0]).to(dtype)]
    return reduced(cls.from_tensors(rows), ()), [reduced(row, ()) for row in rows]


test_any_and_all_of_no_dimension_keep_the_rows = same(
    {
        f"{f.__name__}, {dtype}": lambda cls, f=f, dtype=dtype: of_no_dimension(cls, f, dtype)
        for f in (torch.any, torch.all)
        for dtype in (torch.float32, torch.uint8, torch.bool)
    },
    *(JaggedTensor, PaddedTensor),
)
