"""What an error advises: authors of a class add a rule, users of a class of the package do something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from subclasses import DispatchError, inner
from subclasses.int8 import Int8Tensor
from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor
from tests.subclasses.subjects import declare


class Mine(JaggedTensor):
    """A class of an author, who inherits advice for users."""


Alone = declare(name="Alone", entries=inner())  # of an author, without advice


def rows() -> Any:
    """Jagged rows."""
    return JaggedTensor.from_tensors([torch.randn(2, 4), torch.randn(3, 4)])


VALUES = {
    "jagged": rows,
    "padded": lambda: rows().to_padded(),
    "time first": lambda: rows().transpose(0, 1),
    "keyed": lambda: KeyedJaggedTensor(["a"], torch.arange(3), torch.tensor([2, 1])),
}


@pytest.mark.parametrize("value", VALUES)
def test_users_of_a_class_of_the_package_are_not_told_to_add_a_rule(value):
    x: Any = VALUES[value]()
    with pytest.raises(DispatchError, match=rf"{type(x).__name__} has no rule for aten\.histc") as caught:
        torch.histc(x)
    assert "implements" not in str(caught.value)
    assert str(caught.value).endswith(f"; {type(x)._instead}")


def test_users_of_int8_weights_read_inner_tensors():
    x = Int8Tensor.from_float(torch.randn(4, 4))
    advice = r"compute with its inner tensors, x\.unwrap\('qdata'\) and x\.unwrap\('scale'\), or x\.materialize\(\)"
    with pytest.raises(DispatchError, match=advice) as caught:
        x.cumsum_(0)
    assert "implements" not in str(caught.value)


def test_authors_are_told_of_rules():
    x = rows()
    with pytest.raises(DispatchError, match=r"@Mine\.implements\(.*; or use x\.to_dense\(fill\)"):
        torch.histc(Mine(x.values, x.offsets))
    with pytest.raises(DispatchError, match=r"@Alone\.implements\(torch\.ops\.aten\.exp\.default\)$"):
        torch.exp(Alone(torch.ones(2)))
