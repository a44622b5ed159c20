"""State dicts, and files of three kinds."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from subclasses.int8 import Int8Tensor, from_plain, to_plain
from tests.subclasses.int8.models import CONFIGS, quantized


def floats(dtype=torch.bfloat16):
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)


def make_model(config, dtype=torch.float32):
    return quantized(floats(dtype), config)


def assert_same(model, other, dtype=torch.float32):
    x = torch.randn(3, 16, dtype=dtype)
    assert torch.equal(model(x), other(x))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert type(a.data) is type(b.data) and a.dtype == b.dtype
        assert type(a.data) is not Int8Tensor or a.data._layout is b.data._layout


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(config, assign):
    model, other = make_model(CONFIGS[config]), make_model(CONFIGS[config])
    other.load_state_dict(model.state_dict(), assign=assign)
    assert_same(model, other)


@pytest.mark.parametrize("config", CONFIGS)
def test_torch_save(config):
    model, file = make_model(CONFIGS[config], torch.bfloat16), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = floats()
    other.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert_same(model, other, torch.bfloat16)


@pytest.mark.parametrize("config", CONFIGS)
def test_safetensors(config, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file, save_file

    model, path = make_model(CONFIGS[config], torch.bfloat16), str(tmp_path / "model.safetensors")
    tensors, metadata = to_plain(model.state_dict())
    save_file(tensors, path, metadata)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    other = floats()
    state = from_plain(load_file(path), metadata)
    assert set(state) == set(model.state_dict())
    other.load_state_dict(state, assign=True)
    assert_same(model, other, torch.bfloat16)


def test_tied_weights_are_written_once(tmp_path):
    pytest.importorskip("safetensors")
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 10, bias=False))
        model.append(nn.Linear(10, 10)).append(model[3])
        model[2].weight = model[0].weight
        return quantized(model, choose=lambda m, name: name in ("0", "1", "2"))

    model, other, path = make(0), make(1), str(tmp_path / "model.safetensors")
    state = model.state_dict()
    tensors, metadata = to_plain(state)
    assert len(tensors) == 2 + 3 + 2  # the tied pair, the layer between, the layer that comes twice
    save_file(tensors, path, metadata)
    with safe_open(path, "pt") as file:
        read = from_plain(load_file(path), file.metadata())
    assert set(read) == set(state)
    ids = torch.tensor([1, 9])
    for assign in (False, True):
        other.load_state_dict(read, assign=assign)
        assert torch.equal(other(ids), model(ids))
    assert other[0].weight.qdata.data_ptr() == other[2].weight.qdata.data_ptr()


STATE = make_model(CONFIGS["rows"]).state_dict()
TENSORS, METADATA = to_plain(STATE)


@pytest.mark.parametrize(
    ("convert", "text"),
    [
        (lambda: from_plain(TENSORS, None), "int8_tensors"),
        (
            lambda: from_plain({k: v for k, v in TENSORS.items() if k != "0.weight.scale"}, METADATA),
            r"0\.weight\.qdata or 0\.weight\.scale is missing",
        ),
        (
            lambda: to_plain({**STATE, "0.weight.qdata": torch.zeros(1)}),
            r"named 0\.weight\.qdata already",
        ),
    ],
)
def test_wrong_files(convert, text):
    with pytest.raises(ValueError, match=text):
        convert()


def test_module_to():
    model = make_model(CONFIGS["rows"])
    before = model[0].weight.dequantize()
    model.to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16 and type(model[0].weight.data) is Int8Tensor
    assert torch.equal(model[0].weight.data.float().dequantize(), before)
    assert model(torch.randn(2, 16).bfloat16()).dtype == torch.bfloat16
