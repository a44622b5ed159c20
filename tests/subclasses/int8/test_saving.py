"""State dicts, and files of three kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subclasses.int8 import Int8Tensor, from_plain, to_plain
from tests.subclasses.int8.models import CONFIGS, quantized
from tests.tables import raising


def floats(dtype=torch.bfloat16):
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)


def by_torch(state, path):
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def by_safetensors(state, path):
    pytest.importorskip("safetensors")
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    tensors, metadata = to_plain(state)
    save_file(tensors, path, metadata)
    with safe_open(path, "pt") as file:
        read = from_plain(load_file(path), file.metadata())
    assert set(read) == set(state)
    return read


FILES = {"none": lambda state, path: state, "torch.save": by_torch, "safetensors": by_safetensors}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts(config, file, assign, dtype, tmp_path):
    """Int8 weights are loaded into others by copying, and in the place of floats by assignment."""
    model = quantized(floats(dtype), CONFIGS[config])
    other = floats(dtype) if assign else quantized(floats(dtype), CONFIGS[config])
    other.load_state_dict(FILES[file](model.state_dict(), str(tmp_path / "model")), assign=assign)
    x = torch.randn(3, 16, dtype=dtype)
    assert torch.equal(model(x), other(x))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert type(a.data) is type(b.data) and a.dtype == b.dtype
        assert type(a.data) is not Int8Tensor or a.data._layout is b.data._layout


def test_tied_weights_are_written_once(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 10, bias=False))
        model.append(nn.Linear(10, 10)).append(model[3])
        model[2].weight = model[0].weight
        return quantized(model, choose=lambda m, name: name in ("0", "1", "2"))

    model, other, ids = make(0), make(1), torch.tensor([1, 9])
    assert (
        len(to_plain(model.state_dict())[0]) == 2 + 3 + 2
    )  # the pair, the layer between, one that comes twice
    read = by_safetensors(model.state_dict(), str(tmp_path / "model.safetensors"))
    for assign in (False, True):
        other.load_state_dict(read, assign=assign)
        assert torch.equal(other(ids), model(ids))
    assert other[0].weight.qdata.data_ptr() == other[2].weight.qdata.data_ptr()


STATE = quantized(floats(), CONFIGS["rows"]).state_dict()
TENSORS, METADATA = to_plain(STATE)


test_wrong_files = raising(
    [
        (convert, ValueError, text)
        for convert, text in [
            (lambda: from_plain(TENSORS, None), "int8_tensors"),
            (
                lambda: from_plain({k: v for k, v in TENSORS.items() if k != "0.weight.scale"}, METADATA),
                r"0\.weight\.qdata or 0\.weight\.scale is missing",
            ),
            (
                lambda: to_plain({**STATE, "0.weight.qdata": torch.zeros(1)}),
                r"named 0\.weight\.qdata already",
            ),
        ]
    ]
)


def test_module_to():
    model = quantized(floats(torch.float32), CONFIGS["rows"])
    before, weight = model[0].weight.dequantize(), model.to(torch.bfloat16)[0].weight
    assert weight.dtype == torch.bfloat16 and type(weight.data) is Int8Tensor
    assert torch.equal(weight.data.float().dequantize(), before)
    assert model(torch.randn(2, 16).bfloat16()).dtype == torch.bfloat16
