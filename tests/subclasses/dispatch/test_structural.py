"""Ops that keep a value's structure, and ops that ask for a fact about its outside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner
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


class Chosen(TensorSubclass, fallback="materialize"):
    """Rows of a table, chosen by index."""

    table: Tensor = inner()
    index: Tensor = inner(dtype=torch.int64)
    hosted: Tensor = inner(dtype=torch.int64, device="any")

    @staticmethod
    def outer(table, index, hosted):
        return Outer((index.shape[0], table.shape[1]))

    def materialize(self):
        return self.table[self.index]


def test_a_module_made_without_data_is_loaded():
    """``to_empty`` has no integers to copy; what it makes instead are valid indices."""
    x = Chosen(torch.randn(5, 3), torch.tensor([4, 0]), torch.tensor([7]))
    layer, source = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2, bias=False)
    for module in (layer, source):
        module.weight = torch.nn.Parameter(x.clone(), requires_grad=False)
    layer.to("meta").to_empty(device="cpu")
    assert {t.device.type for t in layer.weight.unwrap()} == {"cpu"}
    assert layer.weight.materialize().shape == (2, 3) and torch.equal(layer.weight.hosted, x.hosted)
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer.weight.materialize(), x.materialize())
