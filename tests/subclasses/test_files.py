"""Values of every kind of declared class come back from a safetensors file, and nothing passes to a file in silence."""

import enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from classes import mxfp8, named, nf4, nvfp4, quantity, ring_buffer
from subclasses import TensorSubclass, inner, static
from subclasses.files import load_file, save_file, to_plain
from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.tables import raising

safetensors = pytest.importorskip("safetensors")


class Color(enum.Enum):
    RED = 1


class Tagged(TensorSubclass, fallback="map"):
    held: Tensor = inner()
    color: Color | None = static(default=None)
    more: Any = static(default=None)
    cached: Tensor | None = inner(optional=True)


W, ROWS = torch.randn(32, 64), [torch.randn(n, 2) for n in (3, 1)]
VALUES = {
    "a dtype": mxfp8.MXFP8.from_float(W.bfloat16()),
    "an inner tensor of no dims": nvfp4.NVFP4.from_float(W),
    "a nested class": nf4.NF4.from_float(W, 8, 16),
    "a Parameter": nn.Parameter(nf4.NF4.from_float(W, 8, 16), requires_grad=False),
    "text": named.Named(torch.randn(2, 3), dims=("a", "b")),
    "tuples": quantity.Quantity.of(W, m=1, s=-2),
    "a dynamic int": ring_buffer.RingBuffer(W, count=99),
    "jagged rows": JaggedTensor.from_tensors(ROWS),
    "padded rows": PaddedTensor.from_tensors(ROWS),
    "keys": KeyedJaggedTensor.from_jagged({key: JaggedTensor.from_tensors(ROWS) for key in ("a", "b")}),
    "an enum, and an optional tensor that is absent": Tagged(W, color=Color.RED, more=(1, (2.5, None, True))),
    "an optional tensor": Tagged(W, W[:1] * 2),
    "nested twice": Tagged(Tagged(nvfp4.NVFP4.from_float(W)), more=-1),
}


def facts(x):
    """Types, metadata and numbers from the outside in."""
    if not isinstance(x, TensorSubclass):
        return (type(x), x.dtype, x.tolist() if isinstance(x, Tensor) else x)
    _, (cls, inners, metadata, *_) = x.detach().__reduce_ex__(2)
    return cls, metadata, {name: facts(t) for name, t in inners.items()}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back(name, tmp_path):
    state = {"before": torch.ones(2), "0.w": VALUES[name], "again": VALUES[name], "after": torch.zeros(1)}
    save_file(state, tmp_path / "model", {"format": "pt"})
    read = load_file(tmp_path / "model")
    assert set(read) == set(state) and facts(read["0.w"]) == facts(read["again"]) == facts(VALUES[name])
    with safetensors.safe_open(tmp_path / "model", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert {key.partition(".w.")[0] for key in file.keys()} == {"before", "0", "after"}  # noqa: SIM118


def test_a_file_of_plain_tensors(tmp_path):
    safetensors.torch.save_file({"w": W}, tmp_path / "model")
    assert torch.equal(load_file(tmp_path / "model")["w"], W)


test_what_no_file_takes = raising(
    {
        what: (lambda value=value: to_plain({"w": value, "v": W}), TypeError, words)
        for what, value, words in [
            ("no tensor", 3, "expected a tensor under w, got 3"),
            ("another class", TwoTensor(W, W), "w is a TwoTensor, which is not declared"),
            ("another class inside", Tagged(TwoTensor(W, W)), r"w\.held is a TwoTensor"),
            (
                "a gradient",
                Tagged(W.clone().requires_grad_()).cotangent(held=W),
                "w is a gradient of a Tagged",
            ),
            ("other metadata", Tagged(W, more=frozenset()), r"w\.more is frozenset"),
        ]
    }
)
