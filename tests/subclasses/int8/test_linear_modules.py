"""Which modules ``quantize_`` takes for linear layers, and models that are shared, frozen or on meta."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subclasses.int8 import FqnToConfig, Int8WeightOnlyConfig, quantize_
from subclasses.strict_mode import strict
from tests.doors import by_desugar
from tests.subclasses.int8 import models
from tests.subclasses.int8.models import int8_names, quantized

CONFIGS = {name: config for name, config in models.CONFIGS.items() if name != "tensor"}


class Adapted(nn.Module):
    """A layer with an adapter, as peft writes them."""

    adapter_layer_names = ("lora_A", "lora_B", "not_there")

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": nn.Linear(8, 2)}), nn.Linear(2, 8)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A["default"](x))


@pytest.mark.parametrize(
    "config", [Int8WeightOnlyConfig(), FqnToConfig({"_default": Int8WeightOnlyConfig()})]
)
def test_adapters_stay_floats_and_train(config):
    model = quantized(nn.Sequential(Adapted(), nn.Linear(8, 2)), config)
    assert int8_names(model) == {"0.base_layer.weight", "1.weight"}
    model(torch.randn(3, 8)).sum().backward()
    assert model[0].lora_A["default"].weight.grad is not None


def test_modules_and_names_of_int8_weights():
    """Adapters that are chosen, weights that are frozen, and one that two layers share."""
    adapted = quantized(Adapted(), choose=lambda _, name: name.startswith("lora_A."))
    assert int8_names(adapted) == {"lora_A.default.weight"}
    pair = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    pair[1].weight = pair[0].weight
    assert quantized(pair)[0].weight is pair[1].weight and int8_names(pair) == {"0.weight"}
    assert not any(p.requires_grad for p in pair.parameters())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("config", CONFIGS)
def test_addmm_is_a_linear_layer_with_the_weight_transposed(config):
    layer, x = quantized(nn.Linear(16, 8), CONFIGS[config]), torch.randn(3, 16, requires_grad=True)
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


@pytest.mark.parametrize("config", CONFIGS)
def test_conv1d_of_transformers(config):
    layers = pytest.importorskip("transformers.pytorch_utils", reason="needs the extra `models`")
    layer, linear = layers.Conv1D(8, 16), nn.Linear(16, 8)
    with torch.no_grad():
        linear.weight.copy_(layer.weight.t())
        linear.bias.copy_(layer.bias.normal_())
    for each in (layer, linear):
        quantize_(each, CONFIGS[config])
    assert layer.weight.shape == (16, 8) and layer.weight.is_contiguous()
    assert torch.equal(layer.weight.dequantize(), linear.weight.dequantize().t())
    x = torch.randn(2, 3, 16)
    with strict():
        torch.testing.assert_close(layer(x), linear(x))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_model_on_meta_takes_the_weights_of_a_quantized_one(config, assign):
    def make():
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))

    model, x = make(), torch.randn(3, 8)
    with torch.device("meta"):
        other = make()
    for each in (model, other):
        quantize_(each, CONFIGS[config])
    assert other[0].weight.device.type == "meta" and int8_names(other) == int8_names(model)
    if not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(model.state_dict(), assign=assign)
    assert int8_names(other) == int8_names(model) and torch.equal(other(x), model(x))
