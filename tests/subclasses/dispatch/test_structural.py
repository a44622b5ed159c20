"""Ops that keep a value's structure, and ops that ask for a fact about its outside."""

import pytest
import torch
from torch import Tensor

from subclasses import Outer, inner
from subclasses.dispatch.structural import find_structural
from tests.doors import by_stock
from tests.subclasses.subjects import Scaled, declare, make_int8

aten = torch.ops.aten


Bare = declare()  # no rule and no fallback
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


# Rows of a table, chosen by index.
Chosen = declare(
    keywords={"fallback": "materialize"},
    table=inner(),
    index=inner(dtype=torch.int64),
    hosted=inner(dtype=torch.int64, device="any"),
    outer=staticmethod(lambda table, index, hosted: Outer((index.shape[0], table.shape[1]))),
    materialize=lambda self: self.table[self.index],
)


def test_a_module_made_without_data_is_loaded():
    """``to_empty`` has no integers to copy; it makes valid indices instead."""
    x = Chosen(torch.randn(5, 3), torch.tensor([4, 0]), torch.tensor([7]))
    layer, source = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2, bias=False)
    for module in (layer, source):
        module.weight = torch.nn.Parameter(x.clone(), requires_grad=False)
    layer.to("meta").to_empty(device="cpu")
    assert {t.device.type for t in layer.weight.unwrap()} == {"cpu"}
    assert layer.weight.materialize().shape == (2, 3) and torch.equal(layer.weight.hosted, x.hosted)
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer.weight.materialize(), x.materialize())


# ---- as_strided ----------------------------------------------------------------------------------------------


def test_as_strided_in_its_own_geometry_is_an_alias():
    x = make_int8()
    same = x.as_strided(x.size(), x.stride(), x.storage_offset())
    assert type(same) is type(x) and same.qdata.data_ptr() == x.qdata.data_ptr()
    assert type(x.as_strided((2, 2), (3, 1))) is Tensor


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("call", [Tensor.detach, lambda x: (x.detach(), x + 1)[0], aten.alias.default])
def test_stock_returns_an_alias_of_a_materializing_argument_as_a_value(call, requires_grad):
    x = Scaled(torch.ones(3), torch.tensor(2.0)).requires_grad_(requires_grad)
    got, expected = by_stock(call)(x), call(x)
    assert type(got) is type(expected) is Scaled and got.requires_grad == expected.requires_grad
    assert torch.equal(got.data_, expected.data_)
