"""Fakes, their symbols, and the guards that come back as text."""

from __future__ import annotations

import pytest
import torch

import desugar
from desugar.errors import DesugarError
from desugar.flatten.fakes import bare_alias, check_plain

# ---- fakes ---------------------------------------------------------------------------------------------------


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
