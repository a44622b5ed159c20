"""``quantize_``: which weights, how, and how good they are beside torchao's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from subclasses.int8 import (
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
    weight_bytes,
)


def make_model():
    return nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8))


def kinds(model):
    return [type(m.weight.data) is Int8Tensor for m in model]


# ---- choosing ----------------------------------------------------------------------------------------------


def test_linear_layers_by_default():
    model = make_model()
    assert quantize_(model, Int8WeightOnlyConfig()) is None
    assert kinds(model) == [False, True, False, True]
    assert not model[1].weight.requires_grad and model[1].bias.requires_grad
    before = model[1].weight
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    assert model[1].weight is before


def test_a_filter_sees_modules_and_names():
    model, seen = make_model(), []

    def take(module, name):
        seen.append(name)
        return name in ("0", "3")

    quantize_(model, Int8WeightOnlyConfig(), take)
    assert kinds(model) == [True, False, False, True] and seen == ["", "0", "1", "2", "3"]
    assert model(torch.tensor([1, 9])).shape == (2, 8)


def test_a_configuration_for_each_layer():
    model = make_model()
    by_name = {
        "3": Int8WeightOnlyConfig(PerGroup(8), symmetric=False),
        "re:[03]": Int8WeightOnlyConfig(PerTensor()),
        "_default": Int8DynamicActivationInt8WeightConfig(),
    }
    quantize_(model, FqnToConfig(by_name))
    assert kinds(model) == [True, True, False, True]
    assert [model[i].weight.block_size for i in (0, 1, 3)] == [(10, 16), (1, 16), (1, 8)]
    assert [model[i].weight.activation for i in (0, 1, 3)] == [None, "row", None]
    left = make_model()
    quantize_(left, FqnToConfig({"1": None, "_default": Int8WeightOnlyConfig()}))
    assert kinds(left) == [False, False, False, True]


def test_a_shared_weight_stays_shared():
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 10, bias=False))
    model[1].weight = model[0].weight
    quantize_(model, Int8WeightOnlyConfig(), lambda m, _: isinstance(m, nn.Linear | nn.Embedding))
    assert model[0].weight is model[1].weight and kinds(model) == [True, True]


def test_granularities():
    for config, block_size in (
        (Int8WeightOnlyConfig(), (1, 16)),
        (Int8WeightOnlyConfig(PerTensor()), (8, 16)),
        (Int8WeightOnlyConfig(PerGroup(4)), (1, 4)),
        (Int8DynamicActivationInt8WeightConfig((PerRow(), PerTensor())), (8, 16)),
    ):
        layer = nn.Linear(16, 8)
        quantize_(layer, config)
        assert layer.weight.block_size == block_size


def test_bytes():
    model = nn.Linear(64, 32, bias=False)
    assert weight_bytes(model) == 64 * 32 * 4
    quantize_(model, Int8WeightOnlyConfig())
    assert weight_bytes(model) == 64 * 32 + 32 * 4


# ---- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "error", "says"),
    [
        (lambda m: quantize_(m, "int8"), TypeError, r"Int8WeightOnlyConfig\(\), got str"),
        (lambda m: quantize_(m, Int8WeightOnlyConfig(PerGroup(7))), ValueError, "does not divide"),
        (
            lambda m: quantize_(m, Int8WeightOnlyConfig(), lambda *_: True),
            TypeError,
            "has no weight of floats",
        ),
        (lambda m: quantize_(m, FqnToConfig({}), lambda *_: True), ValueError, "leave filter_fn out"),
        (lambda m: Int8WeightOnlyConfig("row"), ValueError, "PerRow, PerTensor, PerGroup, got 'row'"),
        (
            lambda m: Int8DynamicActivationInt8WeightConfig(PerGroup(4)),
            ValueError,
            "PerRow, PerTensor, got PerG",
        ),
        (lambda m: Int8DynamicActivationInt8WeightConfig((PerRow(),)), ValueError, "got 1"),
        (lambda m: Int8DynamicActivationInt8WeightConfig(act_mapping_type="both"), ValueError, "'both'"),
    ],
)
def test_a_wrong_call_changes_nothing(run, error, says):
    model = nn.Sequential(nn.Linear(14, 16), nn.Linear(16, 8))
    with pytest.raises(error, match=says):
        run(model)
    assert kinds(model) == [False, False]


# ---- beside torchao ----------------------------------------------------------------------------------------


def sqnr(expected, got):
    return float(20 * torch.log10(expected.norm() / (expected - got).norm()))


def pairs(quantization):
    """Ours and theirs, of one meaning."""
    asymmetric = quantization.MappingType.ASYMMETRIC
    theirs = quantization.Int8DynamicActivationInt8WeightConfig
    return {
        "rows": (Int8WeightOnlyConfig(), quantization.Int8WeightOnlyConfig()),
        "tensor": (
            Int8WeightOnlyConfig(PerTensor()),
            quantization.Int8WeightOnlyConfig(granularity=quantization.PerTensor()),
        ),
        "groups": (
            Int8WeightOnlyConfig(PerGroup(32)),
            quantization.Int8WeightOnlyConfig(granularity=quantization.PerGroup(32)),
        ),
        "dynamic": (Int8DynamicActivationInt8WeightConfig(), theirs()),
        "dynamic tensor": (
            Int8DynamicActivationInt8WeightConfig(PerTensor()),
            theirs(granularity=quantization.PerTensor()),
        ),
        "dynamic asymmetric": (
            Int8DynamicActivationInt8WeightConfig(act_mapping_type="asymmetric"),
            theirs(act_mapping_type=asymmetric),
        ),
    }


PAIRS = ["rows", "tensor", "groups", "dynamic", "dynamic tensor", "dynamic asymmetric"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pair", PAIRS)
def test_no_less_accurate_than_torchao(pair, dtype):
    quantization = pytest.importorskip("torchao.quantization")
    ours, theirs = pairs(quantization)[pair]
    quality = {"ours": 0.0, "theirs": 0.0}
    for _ in range(4):
        model = (
            nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 64)).to(dtype).requires_grad_(False)
        )
        x = torch.randn(256, 256, dtype=dtype)
        expected = copy.deepcopy(model).double()(x.double())
        for name, quantize, config in (("ours", quantize_, ours), ("theirs", quantization.quantize_, theirs)):
            quantized = copy.deepcopy(model)
            quantize(quantized, config)
            quality[name] += sqnr(expected, quantized(x).double()) / 4
    # In decibel; two ways to round the same numbers differ by a few hundredths.
    assert quality["ours"] > quality["theirs"] - 0.05 and quality["ours"] > 25, quality
