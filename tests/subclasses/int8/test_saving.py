"""State dicts, and files of three kinds."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from subclasses.int8 import (
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    PerGroup,
    PerTensor,
    from_plain,
    quantize_,
    to_plain,
)

CONFIGS = {
    "rows": Int8WeightOnlyConfig(),
    "tensor": Int8WeightOnlyConfig(PerTensor()),
    "groups": Int8WeightOnlyConfig(PerGroup(4), symmetric=False),
    "dynamic": Int8DynamicActivationInt8WeightConfig(act_mapping_type="asymmetric"),
}


def make_model(config, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)
    quantize_(model, config)
    return model


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
    other = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
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
    other = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
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
        quantize_(model, CONFIGS["rows"], lambda m, name: name in ("0", "1", "2"))
        return model

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


def test_wrong_files():
    state = make_model(CONFIGS["rows"]).state_dict()
    tensors, metadata = to_plain(state)
    with pytest.raises(ValueError, match="int8_tensors"):
        from_plain(tensors, None)
    with pytest.raises(ValueError, match=r"0\.weight\.qdata or 0\.weight\.scale is missing"):
        from_plain({k: v for k, v in tensors.items() if k != "0.weight.scale"}, metadata)
    with pytest.raises(ValueError, match=r"named 0\.weight\.qdata already"):
        to_plain({**state, "0.weight.qdata": torch.zeros(1)})


def test_module_to():
    model = make_model(CONFIGS["rows"])
    before = model[0].weight.dequantize()
    model.to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16 and type(model[0].weight.data) is Int8Tensor
    assert torch.equal(model[0].weight.data.float().dequantize(), before)
    assert model(torch.randn(2, 16).bfloat16()).dtype == torch.bfloat16
