"""The golden table: how each class of the examples, of the tests and of the package runs PyTorch's core ops.

A change of resolution is a difference of `plans.txt`. Read it, then write the file with
`PYTHONPATH=examples python -m tests.subclasses.dispatch.test_plans`.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.classes.block_sparse import BlockSparse
from examples.classes.int4_weight import Int4Weight
from examples.classes.log_probability import LogProbability
from examples.classes.low_rank import LowRank
from examples.classes.masked import Masked
from examples.classes.master_weight import MasterWeight
from examples.classes.named import Named
from examples.classes.quantity import Quantity
from examples.classes.quaternion import Quaternion
from examples.classes.ring_buffer import RingBuffer
from examples.classes.uncertain import Uncertain
from subclasses.dispatch.coverage import all_aten_ops, takes_tensors
from subclasses.dispatch.resolution import choose_plan
from subclasses.errors import DispatchError, SpecError
from subclasses.int8 import Int8Tensor
from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses import subjects

TABLE = Path(__file__).with_name("plans.txt")
CLASSES = [
    *(BlockSparse, Int4Weight, LogProbability, LowRank, Masked, MasterWeight, Named, Quantity, Quaternion),
    *(RingBuffer, Uncertain, Int8Tensor, KeyedJaggedTensor, JaggedTensor, PaddedTensor),
    *(subjects.Pair, subjects.Int8Weight, subjects.Scaled, subjects.Rows, subjects.Hostile),
]
# Beside the core ops: those that write, and what autograd, optimizers and serialization call.
_MORE = frozenset(
    "add_.Tensor mul_.Tensor zero_ copy_ addcdiv_ detach t transpose.int _foreach_add_.List".split()
)


def table() -> str:
    """Returns the table as text: for each class, each step with its stages, and the ops that run so."""
    ops = [
        op for op in all_aten_ops() if takes_tensors(op) and (torch.Tag.core in op.tags or _name(op) in _MORE)
    ]
    text = []
    for cls in CLASSES:
        found: dict[str, list[str]] = defaultdict(list)
        for op in ops:
            found[_describe(cls, op)].append(_name(op))
        text.append(f"== {cls.__name__}")
        for kind in sorted(found):
            text.append(f"{kind}:")
            text.append(
                textwrap.fill(" ".join(found[kind]), 118, initial_indent="  ", subsequent_indent="  ")
            )
    return "\n".join(text) + "\n"


def _describe(cls: type, op: Any) -> str:
    try:
        plan = choose_plan(cls, op)
    except (DispatchError, SpecError) as error:
        return type(error).__name__
    step = plan.step if plan.source is None else f"{plan.step} ({plan.source[1]})"
    return " < ".join([step, *plan.stages])


def _name(op: Any) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is that of PyTorch 2.13")
def test_plans_are_those_of_the_table():
    assert table() == TABLE.read_text(), "read the difference; this module, run as a script, writes the table"


if __name__ == "__main__":
    TABLE.write_text(table())
