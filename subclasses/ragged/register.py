"""Registers every rule with its classes, from one explicit list for each layout."""

from __future__ import annotations

from subclasses.base import many_rules
from subclasses.ragged.attention import flex, rule as attention
from subclasses.ragged.indexing import indexing, joining, splitting, strided, views
from subclasses.ragged.jagged import JaggedTensor, merging as jagged_merging
from subclasses.ragged.modules import convolution, ctc, multi_head, recurrent, time_major
from subclasses.ragged.padded import merging as padded_merging
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.registry import where_all_exist
from subclasses.ragged.rules import (
    copies,
    einsum,
    entries,
    gradients,
    layers,
    losses,
    masked,
    normalization,
    order_statistics,
    pointwise,
    reductions,
)

BOTH = (
    pointwise,
    copies,
    reductions,
    order_statistics,
    losses,
    layers,
    normalization,
    einsum,
    entries,
    masked,
)
BOTH += (gradients, indexing, joining, splitting, strided, views, attention, time_major)

# Their rules compute spare rows too, so they refuse rows with a count.
UNCOUNTED = (flex, convolution, ctc, multi_head, recurrent)


def register_rules() -> None:
    """Registers all rules; their order does not matter."""
    for cls, merging in ((JaggedTensor, jagged_merging), (PaddedTensor, padded_merging)):
        with many_rules(cls) as register_rule:
            for module in (*BOTH, merging):
                module.RULES.register(register_rule)
            for module in UNCOUNTED:
                module.RULES.register(register_rule, where_all_exist)
    with many_rules(time_major.TimeMajor) as register_rule:
        for module in (ctc, multi_head, recurrent):
            module.RULES.register(register_rule)
