"""Fakes, their symbols, and the guards that come back as text."""

from __future__ import annotations

import pytest
import torch
from torch import SymInt

import desugar
from desugar.errors import DesugarError
from desugar.fakes import Fakes, bare_alias, check_plain, guard_expression, hint, is_symbolic

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
    fake = Fakes().tensor(real, "t0", ())
    assert (fake.size(), fake.stride(), fake.dtype) == (real.size(), real.stride(), real.dtype)
    assert fake.device == real.device and fake.storage_offset() == real.storage_offset()
    assert not fake.requires_grad and not is_symbolic(fake)


def test_sizes_that_are_equal_by_chance_have_symbols_of_their_own():
    fakes = Fakes()
    x, y = (fakes.tensor(torch.ones(4, 4), name, (0, 1)) for name in ("t0", "t1"))
    symbols = [extent.node.expr for extent in (*x.size(), *y.size())]
    assert len(set(symbols)) == 4
    assert [fakes.symbols[s].text for s in symbols] == [
        "t0.size(0)",
        "t0.size(1)",
        "t1.size(0)",
        "t1.size(1)",
    ]
    assert [hint(extent) for extent in x.size()] == [4, 4] and hint(3) == 3


@pytest.mark.parametrize("extent", [0, 1])
def test_zero_and_one_stay_constants(extent):
    fakes = Fakes()
    assert not is_symbolic(fakes.tensor(torch.ones(extent, 3), "t0", (0,)))
    assert (
        not isinstance(fakes.integer(extent, "n0"), SymInt)
        or not fakes.integer(extent, "n0").node.expr.free_symbols
    )


def test_only_the_dimensions_asked_for_are_symbols():
    fake = Fakes().tensor(torch.ones(4, 5), "t0", (1,))
    assert isinstance(fake.size(1), SymInt) and fake.size(0) == 4 and not isinstance(fake.size(0), SymInt)


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
    with pytest.raises(DesugarError, match=what):
        desugar.compile(torch.sin, backend="eager")(odd)


# ---- guards --------------------------------------------------------------------------------------------------


def holds(text, **values):
    return eval(text, {}, values)


def test_no_symbol_no_guard():
    fakes = Fakes()
    fakes.tensor(torch.ones(4), "t0", ())
    assert guard_expression(fakes) is None


def test_what_the_trace_assumed_comes_back_over_the_guarded_names():
    fakes = Fakes()
    x = fakes.tensor(torch.ones(4, 3), "t0", (0,))
    y = fakes.tensor(torch.ones(8), "t1", (0,))
    assert bool(x.size(0) * 2 == y.size(0))
    text = guard_expression(fakes)
    assert text is not None
    assert holds(text, t0=torch.ones(5, 3), t1=torch.ones(10))
    assert not holds(text, t0=torch.ones(5, 3), t1=torch.ones(8))
    assert not holds(text, t0=torch.ones(1, 3), t1=torch.ones(2)), "0 and 1 are programs of their own"
    assert "size()[1]" not in text and "stride" not in text, (
        "the C++ check of tensors covers constant extents"
    )


def test_ints_are_guarded_by_name():
    fakes = Fakes()
    n = fakes.integer(6, "n0")
    assert bool(n % 2 == 0)
    text = guard_expression(fakes)
    assert text is not None and holds(text, n0=8) and not holds(text, n0=7)
