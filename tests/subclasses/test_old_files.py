"""Files from before the packages had folders: values, state dicts, layouts, compiled programs."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from subclasses.int8 import Int8Tensor, Int8WeightOnlyConfig, quantize_
from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor, PaddedTensor

FILES = Path(__file__).parent / "files_before_folders"
CLASSES = {
    "jagged": JaggedTensor,
    "padded": PaddedTensor,
    "int8": Int8Tensor,
    "int8_asymmetric": Int8Tensor,
    "parameter": Int8Tensor,
    "keyed": KeyedJaggedTensor,
}


@pytest.fixture(scope="module")
def expected():
    return torch.load(FILES / "expected.pt", weights_only=True)


def _plain(value):
    return value.dequantize() if isinstance(value, Int8Tensor) else value.to_dense()


def _unpickle(name):
    return pickle.loads((FILES / name).read_bytes())


@pytest.mark.parametrize("by_torch", [True, False])
def test_values(expected, by_torch):
    values = torch.load(FILES / "values.pt", weights_only=True) if by_torch else _unpickle("values.pkl")
    assert {name: type(value) for name, value in values.items()} == CLASSES
    for name, dense in expected["plain"].items():
        assert torch.equal(_plain(values[name]), dense), name
    keyed = values["keyed"]
    assert torch.equal(keyed.values, expected["keyed"][0])
    assert torch.equal(keyed.weights, expected["keyed"][1])
    assert keyed.keys == ("a", "b")
    assert isinstance(values["parameter"], nn.Parameter)


def test_a_state_dict(expected):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    quantize_(model, Int8WeightOnlyConfig())
    model.load_state_dict(torch.load(FILES / "quantized.pt", weights_only=True))
    assert torch.equal(model(expected["x"]), expected["y"])


def test_layouts_are_those_of_values():
    layouts, values = _unpickle("layouts.pkl"), _unpickle("values.pkl")
    assert set(layouts) == set(CLASSES)
    for name, layout in layouts.items():
        assert layout is values[name]._layout, name


def test_what_was_compiled():
    function, module = _unpickle("compiled_function.pkl"), _unpickle("compiled_module.pkl")
    assert torch.equal(function(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    x = torch.ones(1, 2)
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    assert len(function.programs) == 1
    assert len(module.programs) == 1
