"""Ops that keep a value's structure, and ops that ask for a fact about its outside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import TensorSubclass, inner
from subclasses.dispatch.structural import find_structural

aten = torch.ops.aten


class Bare(TensorSubclass):
    """No rule and no fallback."""

    held: Tensor = inner()


FACTS = [
    *(getattr(aten, name).default for name in ("size", "sym_size", "stride", "sym_stride", "numel")),
    *(getattr(aten, name).default for name in ("sym_numel", "storage_offset", "sym_storage_offset", "dim")),
    *(aten.size.int, aten.sym_size.int, aten.stride.int, aten.sym_stride.int, aten.is_contiguous.default),
]


@pytest.mark.parametrize("op", FACTS, ids=str)
def test_facts_reach_dispatch_in_a_trace_with_symbolic_sizes(op):
    t = torch.randn(9)[1:7].view(2, 3).t()
    args = (1,) if op._schema.name != "aten::is_contiguous" and len(op._schema.arguments) > 1 else ()
    got = Bare.__torch_dispatch__(op, (Bare,), (Bare(t), *args))
    assert got == op(t, *args) and find_structural(op) is not None
    assert type(got) is type(op(t, *args))


def test_an_op_that_changes_values_is_none_of_them():
    assert find_structural(aten.mul.Tensor) is None
