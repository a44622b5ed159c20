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

from examples.classes import (
    adam_states,
    block_sparse,
    float8,
    int4_kernel,
    int4_weight,
    log_probability,
    low_rank,
    masked,
    master_weight,
    mxfp8,
    named,
    nf4,
    nvfp4,
    quantity,
    quaternion,
    ring_buffer,
    uncertain,
)
from subclasses.dispatch.coverage import all_aten_ops, takes_tensors
from subclasses.dispatch.resolution import resolve
from subclasses.errors import DispatchError, SpecError
from subclasses.int8 import Int8Tensor
from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses import subjects

TABLE = Path(__file__).with_name("plans.txt")
CLASSES = [
    *(adam_states.State8, block_sparse.BlockSparse, float8.Float8, int4_kernel.KernelInt4Weight),
    *(int4_weight.Int4Weight, log_probability.LogProbability, low_rank.LowRank, masked.Masked),
    *(master_weight.MasterWeight, mxfp8.MXFP8, named.Named, nf4.NF4, nf4.QuantizedScales, nvfp4.NVFP4),
    *(quantity.Quantity, quaternion.Quaternion, ring_buffer.RingBuffer, uncertain.Uncertain),
    *(Int8Tensor, KeyedJaggedTensor, JaggedTensor, PaddedTensor),
    *(subjects.Pair, subjects.Int8Weight, subjects.Scaled, subjects.Rows, subjects.Hostile),
]
# Beside the core ops: ops that write, and ops that autograd, optimizers and serialization call.
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
        resolution = resolve(cls, op)
    except (DispatchError, SpecError) as error:
        return type(error).__name__
    step = resolution.step if resolution.source is None else f"{resolution.step} ({resolution.source[1]})"
    return " < ".join([step, *resolution.layers])


def _name(op: Any) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is that of PyTorch 2.13")
def test_plans_are_those_of_the_table():
    assert table() == TABLE.read_text(), "read the difference; this module, run as a script, writes the table"


if __name__ == "__main__":
    TABLE.write_text(table())
