"""The interface of both layouts, and how rules are registered on them."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from subclasses.autograd.python_functions import twins
from subclasses.ragged import JaggedTensor, PaddedTensor, register
from subclasses.ragged.base import RaggedTensor


def documented() -> list[str]:
    """The names that the docstring of the interface gives."""
    lines = re.findall(
        r"^ {8}([a-z_]+(?:\([^)]*\))?(?:, [a-z_]+(?:\([^)]*\))?)*):", RaggedTensor.__doc__, re.M
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
