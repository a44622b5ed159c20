"""``quantize_``: which weights, how, and how good they are beside torchao's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import desugar
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
from tests.doors import by_stock
from tests.subclasses.int8.models import DYNAMIC, WEIGHTS, int8_names, quantized, sqnr
from tests.tables import giving


def make_model():
    return nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8))


# ---- choosing ----------------------------------------------------------------------------------------------


def chosen(make, *how):
    """The names of the int8 parameters of a model, after it is quantized so."""
    return lambda: int8_names(quantized(make(), *how))


def tied():
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 10, bias=False))
    model[1].weight = model[0].weight
    return model


test_which_weights_are_chosen = giving(
    {
        "linear layers by default": (chosen(make_model, WEIGHTS), {"1.weight", "3.weight"}),
        "by modules and names": (
            chosen(make_model, WEIGHTS, lambda module, name: name in ("0", "3")),
            {"0.weight", "3.weight"},
        ),
        "all but one": (chosen(make_model, FqnToConfig({"1": None, "_default": WEIGHTS})), {"3.weight"}),
        "a shared weight": (
            chosen(tied, WEIGHTS, lambda m, _: isinstance(m, nn.Linear | nn.Embedding)),
            {"0.weight"},
        ),
    }
)


def test_linear_layers_are_quantized_once_and_biases_are_trained():
    model = make_model()
    assert quantize_(model, WEIGHTS) is None
    assert not model[1].weight.requires_grad and model[1].bias.requires_grad
    before = model[1].weight
    quantize_(model, DYNAMIC)
    assert model[1].weight is before


def test_a_filter_sees_modules_and_names():
    seen = []
    quantize_(make_model(), WEIGHTS, lambda module, name: seen.append(name))
    assert seen == ["", "0", "1", "2", "3"]


def test_a_configuration_for_each_layer():
    by_name = {
        "3": Int8WeightOnlyConfig(PerGroup(8), symmetric=False),
        "re:[03]": Int8WeightOnlyConfig(PerTensor()),
        "_default": DYNAMIC,
    }
    model = quantized(make_model(), FqnToConfig(by_name))
    found = [(m.weight.block_size, m.weight.activation) for m in (model[0], model[1], model[3])]
    assert found == [((10, 16), None), ((1, 16), "row"), ((1, 8), None)]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 4)), nn.Parameter(torch.randn(3, 4, 8))
        self.register_buffer("gate", torch.randn(3, 4))
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        return self.out(torch.einsum("bi,ei,eoi,ejo->bj", x, self.gate, self.up, self.down))


def test_a_configuration_for_each_parameter():
    by_name = {
        "experts.up": Int8WeightOnlyConfig(PerGroup(2)),
        "re:experts[.](down|gate)": Int8WeightOnlyConfig(),
        "experts.gate": Int8WeightOnlyConfig(),  # a buffer is taken by its name alone
        "experts.out": Int8DynamicActivationInt8WeightConfig(),
        "experts.out.weight": Int8WeightOnlyConfig(),
        "nowhere": Int8WeightOnlyConfig(),
    }
    model = nn.ModuleDict({"experts": Experts()})
    experts, x = model["experts"], torch.randn(2, 4)
    expected = experts(x)
    quantize_(model, FqnToConfig(by_name))
    weights = (experts.up, experts.down, experts.gate, experts.out.weight)
    assert [w.block_size for w in weights] == [(1, 1, 2), (1, 1, 8), (1, 4), (1, 4)]
    assert experts.out.weight.activation is None
    assert sqnr(expected, experts(x)) > 25
    left = nn.ModuleDict({"experts": Experts()})
    quantize_(left, FqnToConfig({"experts.out.weight": None, "re:.*": Int8WeightOnlyConfig()}))
    assert type(left["experts"].out.weight.data) is torch.Tensor


def test_an_expression_that_matches_all_takes_parameters_of_floats():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2))
    x, expected = torch.randn(5, 4), copy.deepcopy(model)
    quantize_(model, FqnToConfig({"1": None, "re:1[.].*": None, "re:.*": Int8WeightOnlyConfig()}))
    assert int8_names(model) == {"0.weight", "2.weight", "2.bias"}
    assert sqnr(expected(x), model(x)) > 25
    quantize_(expected, FqnToConfig({"re:.*": Int8WeightOnlyConfig()}))
    assert type(expected[1].weight.data) is Int8Tensor
    assert type(expected[1].running_mean) is torch.Tensor


@pytest.mark.slow
@pytest.mark.parametrize("config", [Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()])
def test_attention_keeps_its_output_layer_as_in_torchao(config):
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
    expected, model = layer(x), quantized(copy.deepcopy(layer), config)
    assert int8_names(model) == {"linear1.weight", "linear2.weight"}
    compiled = by_stock(model, fullgraph=True)
    for run, mode in ((model, torch.enable_grad), (model, torch.no_grad), (compiled, torch.inference_mode)):
        with mode():
            assert sqnr(expected, run(x)) > 35


def test_matrices_that_stay_floats_are_logged_once(caplog):
    model = nn.ModuleDict({"emb": nn.Embedding(8, 16), "layer": nn.TransformerEncoderLayer(16, 2, 32)})
    config, left = Int8WeightOnlyConfig(), "re:emb.weight|.*(in_proj_weight|out_proj.weight)"
    quantize_(copy.deepcopy(model), config)
    assert len(caplog.records) == 1
    assert "emb.weight, layer.self_attn.in_proj_weight, layer.self_attn.out_proj.weight." in caplog.text
    caplog.clear()
    quantize_(model, FqnToConfig({"_default": config, left: config}))
    quantize_(model, config)  # nothing is left
    quantize_(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv2d(1, 1, 3)), config)
    quantize_(nn.Embedding(4, 4), config, lambda *_: False)
    assert not caplog.records
    assert all(type(p.data) is Int8Tensor for p in model.parameters() if p.dim() == 2)


@pytest.mark.parametrize("compile_", [torch.compile, desugar.compile])
def test_names_in_a_compiled_model_are_those_of_the_model(compile_):
    model = make_model()
    quantize_(compile_(model), FqnToConfig({"3": Int8WeightOnlyConfig()}))
    assert int8_names(model) == {"3.weight"}
    quantize_(nn.Sequential(compile_(model)), Int8WeightOnlyConfig(), lambda m, name: name == "0.1")
    assert int8_names(model) == {"1.weight", "3.weight"}


@pytest.mark.parametrize("normalize", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_computed_weight_is_refused_before_anything_changes(normalize):
    model = nn.Sequential(nn.Linear(4, 4), normalize(nn.Linear(4, 4)))
    message = r"1 \(ParametrizedLinear\) is computed, for example by a parametrization, and not a parameter"
    with pytest.raises(TypeError, match=message):
        quantize_(model, Int8WeightOnlyConfig())
    assert type(model[0].weight.data) is torch.Tensor
    parametrize.remove_parametrizations(model[1], "weight")
    quantize_(model, Int8WeightOnlyConfig())
    assert int8_names(model) == {"0.weight", "1.weight"}


def test_a_shared_weight_stays_shared():
    model = quantized(tied(), WEIGHTS, lambda m, _: isinstance(m, nn.Linear | nn.Embedding))
    assert model[0].weight is model[1].weight


@pytest.mark.parametrize(
    ("config", "block_size", "activation"),
    [
        (Int8WeightOnlyConfig(), (1, 16), None),
        (Int8WeightOnlyConfig(PerTensor()), (8, 16), None),
        (Int8WeightOnlyConfig(PerGroup(4)), (1, 4), None),
        (Int8DynamicActivationInt8WeightConfig((PerRow(), PerTensor())), (8, 16), "row"),
        (Int8DynamicActivationInt8WeightConfig([PerTensor(), PerRow()]), (1, 16), "tensor"),
    ],
)
def test_granularities(config, block_size, activation):
    weight = quantized(nn.Linear(16, 8), config).weight
    assert (weight.block_size, weight.activation) == (block_size, activation)


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
        (lambda m: quantize_(m, FqnToConfig({}), lambda *_: True), ValueError, "omit filter_fn"),
        (lambda m: quantize_(list(m), Int8WeightOnlyConfig()), TypeError, "a module, got list"),
        (lambda m: FqnToConfig({"0": "int8"}), TypeError, "for '0', got 'int8'"),
        (
            lambda m: FqnToConfig({"re:(": Int8WeightOnlyConfig()}),
            ValueError,
            "not a valid regular expression",
        ),
        (lambda m: PerGroup(0), ValueError, "expected a number of entries, 1 or more, got 0"),
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
    assert int8_names(model) == set()


# ---- beside torchao ----------------------------------------------------------------------------------------


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


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pair", PAIRS)
def test_no_less_accurate_than_torchao(pair, dtype):
    quantization = pytest.importorskip("torchao.quantization")
    ours, theirs = pairs(quantization)[pair]
    quality = {"ours": 0.0, "theirs": 0.0}
    for _ in range(4):
        model = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 64)).to(dtype)
        x, model = torch.randn(256, 256, dtype=dtype), model.requires_grad_(False)
        expected = copy.deepcopy(model).double()(x.double())
        for name, quantize, config in (("ours", quantize_, ours), ("theirs", quantization.quantize_, theirs)):
            other = copy.deepcopy(model)
            quantize(other, config)
            quality[name] += sqnr(expected, other(x).double()) / 4
    # In decibel; two ways to round the same numbers differ by a few hundredths.
    assert quality["ours"] > quality["theirs"] - 0.05 and quality["ours"] > 25, quality
