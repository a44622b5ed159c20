"""Fakes, their symbols, and the guards that come back as text."""

from __future__ import annotations

import pytest
import torch
from torch import SymInt

import desugar
from desugar.errors import DesugarError
from desugar.flatten.fakes import Fakes, bare_alias, check_plain, hint, is_symbolic, size_guards
from desugar.flatten.inputs import Inputs
from desugar.flatten.origins import Origin
from tests.desugar.classes import Labeled

# ---- fakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "real",
    [
        torch.ones(2, 3),
        torch.ones(3, 2).t(),
        torch.ones(0, 4),
        torch.tensor(1),
        torch.ones(2, 1).expand(2, 5),
        torch.ones(8, dtype=torch.bfloat16)[2:6],
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=lambda t: f"{tuple(t.shape)}-{t.dtype}",
)
def test_a_fake_has_the_facts_of_the_real_tensor(real):
    fake = Fakes().tensor(real, Origin(0))
    assert (fake.size(), fake.stride(), fake.dtype) == (real.size(), real.stride(), real.dtype)
    assert fake.device == real.device and fake.storage_offset() == real.storage_offset()
    assert not fake.requires_grad and not is_symbolic(fake)


def test_sizes_that_are_equal_by_chance_have_symbols_of_their_own():
    fakes = Fakes()
    x, y = (fakes.tensor(torch.ones(4, 4), Origin(leaf), is_dynamic=True) for leaf in (0, 1))
    symbols = [extent.node.expr for extent in (*x.size(), *y.size())]
    assert len(set(symbols)) == 4
    assert [fakes.symbols[s].origin for s in symbols] == [
        Origin(leaf, (), "size", dim) for leaf in (0, 1) for dim in (0, 1)
    ]
    assert [hint(extent) for extent in x.size()] == [4, 4] and hint(3) == 3


@pytest.mark.parametrize("extent", [0, 1])
def test_zero_and_one_stay_constants(extent):
    fakes = Fakes()
    assert not is_symbolic(fakes.tensor(torch.ones(extent, 1), Origin(0), is_dynamic=True))
    assert (
        not isinstance(fakes.integer(extent, Origin(1)), SymInt)
        or not fakes.integer(extent, Origin(1)).node.expr.free_symbols
    )


def test_a_bare_alias_is_the_same_memory_without_history():
    base = torch.arange(6.0)
    for real in (base[2:5], torch.nn.Parameter(base), (base * 1).requires_grad_()):
        alias = bare_alias(real)
        assert alias.data_ptr() == real.data_ptr() and alias.stride() == real.stride()
        assert type(alias) is torch.Tensor and not alias.requires_grad and not alias._is_view()
    assert bare_alias(base) is base


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "conjugated or negated"),
    ],
    ids=["sparse", "conj", "neg"],
)
def test_what_is_not_strided_is_refused(odd, what):
    with pytest.raises(DesugarError, match=what) as caught:
        check_plain(odd)
    assert "convert it first" in str(caught.value)
    torch.testing.assert_close(desugar.compile(lambda x: x * 2, backend="eager")(odd), odd * 2)


# ---- guards --------------------------------------------------------------------------------------------------


def guarded(*leaves, is_dynamic=True):
    inputs = Inputs(Fakes(), is_dynamic)
    inputs.add_arguments(list(leaves))
    return inputs


def test_no_symbol_no_guard():
    guards = size_guards(guarded(torch.ones(4), is_dynamic=False).fakes)
    assert guards.expression is None and guards.hold([torch.ones(5)])


def test_what_the_trace_assumed_is_compared_with_other_leaves():
    inputs = guarded(torch.ones(4, 3), torch.ones(8))
    x, y = inputs.fake_items[0], inputs.fake_items[1]
    assert bool(x.size(0) * 2 == y.size(0))
    guards = size_guards(inputs.fakes)
    assert guards.hold([torch.ones(5, 3), torch.ones(10)])
    assert not guards.hold([torch.ones(5, 3), torch.ones(8)])
    assert not guards.hold([torch.ones(1, 3), torch.ones(2)]), "0 and 1 are programs of their own"


def test_inner_tensors_and_dynamic_ints():
    inputs = guarded(Labeled(torch.ones(4), count=6))
    n = next(extent for (_, extent) in inputs.values[0].dynamics)
    assert bool(inputs.fake_items[n.index] % 2 == 0)
    guards = size_guards(inputs.fakes)
    assert guards.hold([Labeled(torch.ones(9), count=8)])
    assert not guards.hold([Labeled(torch.ones(9), count=7)])
