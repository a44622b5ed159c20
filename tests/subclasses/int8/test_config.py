"""``quantize_``: which weights, how, the modules that it takes for linear layers, accuracy, and files."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import desugar
from subclasses import files
from subclasses.int8 import (
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    PerGroup,
    PerRow,
    PerTensor,
    from_plain,
    quantize_,
    to_plain,
    weight_bytes,
)
from subclasses.strict_mode import strict
from tests.doors import by_desugar, by_stock
from tests.subclasses.int8.models import CONFIGS, DYNAMIC, WEIGHTS, int8_names, quantized, sqnr
from tests.tables import giving, raising


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


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 4)), nn.Parameter(torch.randn(3, 4, 8))
        self.register_buffer("gate", torch.randn(3, 4))
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        return self.out(torch.einsum("bi,ei,eoi,ejo->bj", x, self.gate, self.up, self.down))


class Adapted(nn.Module):
    """A layer with an adapter, as peft writes them."""

    adapter_layer_names = ("lora_A", "lora_B", "not_there")

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": nn.Linear(8, 2)}), nn.Linear(2, 8)


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
        **{
            f"no adapters by {type(config).__name__}": (
                chosen(lambda: nn.Sequential(Adapted(), nn.Linear(8, 2)), config),
                {"0.base_layer.weight", "1.weight"},
            )
            for config in (WEIGHTS, FqnToConfig({"_default": WEIGHTS}))
        },
        "adapters by name": (
            chosen(Adapted, WEIGHTS, lambda _, name: name.startswith("lora_A.")),
            {"lora_A.default.weight"},
        ),
        "all parameters but one": (
            chosen(Experts, FqnToConfig({"out.weight": None, "re:.*": WEIGHTS})),
            {"up", "down", "out.bias"},
        ),
    }
)


def trained(model):
    """The names of the parameters that are trained."""
    return {name for name, p in model.named_parameters() if p.requires_grad}


def blocks_of(model):
    """The block sizes and activations of int8 weights."""
    weights = [m.weight for m in model.modules() if isinstance(getattr(m, "weight", None), Int8Tensor)]
    return [(weight.block_size, weight.activation) for weight in weights]


BY_NAME = FqnToConfig(
    {
        "3": Int8WeightOnlyConfig(PerGroup(8), symmetric=False),
        "re:[03]": Int8WeightOnlyConfig(PerTensor()),
        "_default": DYNAMIC,
    }
)
BIASES = {"0.weight", "1.bias", "2.weight", "2.bias", "3.bias"}
test_what_becomes_of_weights = giving(
    {
        "nothing is returned": (lambda: quantize_(make_model(), WEIGHTS), None),
        "biases are trained": (lambda: trained(quantized(make_model())), BIASES),
        "adapters are trained": (
            lambda: trained(quantized(Adapted())) >= {"lora_A.default.weight", "lora_B.weight"},
            True,
        ),
        "frozen weights stay so": (lambda: trained(quantized(make_model().requires_grad_(False))), set()),
        "they are quantized once": (
            lambda: (lambda m: m[1].weight is quantized(m, DYNAMIC)[1].weight)(quantized(make_model())),
            True,
        ),
        "a shared weight stays shared": (
            lambda: (lambda m: m[0].weight is m[1].weight)(
                quantized(tied(), WEIGHTS, lambda m, _: isinstance(m, nn.Linear | nn.Embedding))
            ),
            True,
        ),
        "a configuration for each layer": (
            lambda: blocks_of(quantized(make_model(), BY_NAME)),
            [((10, 16), None), ((1, 16), "row"), ((1, 8), None)],
        ),
        **{
            str(config): (lambda config=config: blocks_of(quantized(nn.Linear(16, 8), config)), [found])
            for config, *found in (
                (Int8WeightOnlyConfig(), (1, 16), None),
                (Int8WeightOnlyConfig(PerTensor()), (8, 16), None),
                (Int8WeightOnlyConfig(PerGroup(4)), (1, 4), None),
                (Int8DynamicActivationInt8WeightConfig((PerRow(), PerTensor())), (8, 16), "row"),
                (Int8DynamicActivationInt8WeightConfig([PerTensor(), PerRow()]), (1, 16), "tensor"),
            )
            for found in [tuple(found)]
        },
        "bytes of floats": (lambda: weight_bytes(nn.Linear(64, 32, bias=False)), 64 * 32 * 4),
        "bytes": (lambda: weight_bytes(quantized(nn.Linear(64, 32, bias=False))), 64 * 32 + 32 * 4),
    }
)


def test_a_filter_sees_modules_and_names():
    seen = []
    quantize_(make_model(), WEIGHTS, lambda module, name: seen.append(name))
    assert seen == ["", "0", "1", "2", "3"]


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
        *(
            (
                lambda m, normalize=normalize: quantize_(
                    nn.Sequential(m, normalize(nn.Linear(4, 4))), WEIGHTS
                ),
                TypeError,
                r"1 \(ParametrizedLinear\) is computed, for example by a parametrization, and not a parameter",
            )
            for normalize in (parametrizations.weight_norm, parametrizations.orthogonal)
        ),
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


# ---- other modules -----------------------------------------------------------------------------------------

LAYERS = {name: config for name, config in CONFIGS.items() if name != "tensor"}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("config", LAYERS)
def test_addmm_is_a_linear_layer_with_the_weight_transposed(config):
    layer, x = quantized(nn.Linear(16, 8), LAYERS[config]), torch.randn(3, 16, requires_grad=True)
    weight, bias, product = layer.weight.t(), layer.bias, layer(x) - layer.bias
    with strict():
        got = torch.addmm(bias, x, weight)
    torch.testing.assert_close(got, layer(x))
    grads = [torch.autograd.grad(y.square().sum(), (x, bias)) for y in (got, layer(x))]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.addmm(bias, x, weight, beta=2, alpha=3), 3 * product + 2 * bias)
    nothing = torch.full_like(bias, torch.nan)
    torch.testing.assert_close(torch.addmm(nothing, x, weight, beta=0), product)
    compiled = by_desugar(lambda x: torch.addmm(bias, x, weight), fullgraph=True)
    torch.testing.assert_close(compiled(x), got)
    with pytest.raises(RuntimeError, match="expand"):
        torch.addmm(torch.zeros(5, 8), x[:1], weight)


@pytest.mark.parametrize("config", LAYERS)
def test_conv1d_of_transformers(config):
    layers = pytest.importorskip("transformers.pytorch_utils", reason="needs the extra `models`")
    layer, linear = layers.Conv1D(8, 16), nn.Linear(16, 8)
    with torch.no_grad():
        linear.weight.copy_(layer.weight.t())
        linear.bias.copy_(layer.bias.normal_())
    for each in (layer, linear):
        quantize_(each, LAYERS[config])
    assert layer.weight.shape == (16, 8) and layer.weight.is_contiguous()
    assert torch.equal(layer.weight.dequantize(), linear.weight.dequantize().t())
    x = torch.randn(2, 3, 16)
    with strict():
        torch.testing.assert_close(layer(x), linear(x))


@pytest.mark.parametrize("config", LAYERS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_model_on_meta_takes_the_weights_of_a_quantized_one(config, assign):
    model, x = make_model(), torch.tensor([0, 9])
    with torch.device("meta"):
        other = make_model()
    for each in (model, other):
        quantize_(each, LAYERS[config])
    assert other[1].weight.device.type == "meta" and int8_names(other) == int8_names(model)
    if not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(model.state_dict(), assign=assign)
    assert int8_names(other) == int8_names(model) and torch.equal(other(x), model(x))


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


# ==== state dicts and files =======================================================================================


def floats(dtype=torch.bfloat16):
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)


def by_torch(state, path):
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def by_safetensors(state, path):
    pytest.importorskip("safetensors")
    files.save_file(state, path)
    read = files.load_file(path)
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
    def make():
        model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 10, bias=False))
        model.append(nn.Linear(10, 10)).append(model[3])
        model[2].weight = model[0].weight
        return quantized(model, choose=lambda m, name: name in ("0", "1", "2"))

    model, other, ids = make(), make(), torch.tensor([1, 9])
    # The pair, the layer between, one that comes twice.
    assert len(to_plain(model.state_dict())[0]) == 2 + 3 + 2
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
            (lambda: from_plain(TENSORS, None), "declared_values"),
            (
                lambda: from_plain({k: v for k, v in TENSORS.items() if k != "0.weight.scale"}, METADATA),
                r"0\.weight\.scale is missing",
            ),
            (
                lambda: to_plain({**STATE, "0.weight.qdata": torch.zeros(1)}),
                r"named 0\.weight\.qdata already",
            ),
        ]
    ]
)
