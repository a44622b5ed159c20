"""``save_pretrained`` and ``from_pretrained`` of transformers with int8 weights."""

import copy
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from subclasses.int8 import FqnToConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from tests.subclasses.int8.models import int8_names, quantized

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
TOKENS = torch.tensor([[3, 4, 5], [6, 7, 8]])


def make(tied=False, config=Int8WeightOnlyConfig(), choose=None):  # noqa: B008 - frozen
    torch.manual_seed(0)
    sizes = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied)
    return quantized(transformers.LlamaForCausalLM(sizes).eval(), config, choose)


def through_a_file(model, folder, **options):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, **options)


def assert_same(other, model):
    assert int8_names(other) == int8_names(model) and int8_names(model)
    assert not any(dict(other.named_parameters())[name].requires_grad for name in int8_names(other))
    with torch.no_grad():
        assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)


CONFIGS = {
    "rows": Int8WeightOnlyConfig(),
    "dynamic": Int8DynamicActivationInt8WeightConfig(act_mapping_type="asymmetric"),
    "by name": FqnToConfig({"re:.*mlp[.].*": Int8WeightOnlyConfig()}),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shards", ["50GB", "2KB"])
def test_weights_stay_int8(config, shards, tmp_path):
    model = make(config=CONFIGS[config])
    model.save_pretrained(tmp_path / "first", max_shard_size=shards)
    for cls in (type(model), transformers.AutoModelForCausalLM):
        other = cls.from_pretrained(tmp_path / "first")
        assert_same(other, model)
    assert_same(through_a_file(other, tmp_path / "second"), model)


def test_another_dtype(tmp_path):
    model = make()
    other = through_a_file(model, tmp_path, dtype=torch.bfloat16)
    assert_same(other, model.to(torch.bfloat16))
    weight = other.lm_head.weight.data
    assert (weight.dtype, weight.scale.dtype) == (torch.bfloat16, torch.float32)


def tied_by_the_user():
    model = make()
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    return model


def tied(taken):
    return lambda: make(tied=True, choose=lambda module, _: isinstance(module, taken))


# A model, two of its layers, and whether they share a weight.
TIED = {
    "an embedding and the last layer": (
        tied(nn.Linear | nn.Embedding),
        "model.embed_tokens",
        "lm_head",
        True,
    ),
    # The last layer ceases to share its weight, and loading does not tie it again.
    "the last layer alone": (tied(nn.Linear), "model.embed_tokens", "lm_head", False),
    "layers that the user tied": (
        tied_by_the_user,
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.gate_proj",
        True,
    ),
}


@pytest.mark.parametrize("case", TIED)
def test_tied_weights(case, tmp_path):
    make, *names, is_tied = TIED[case]
    model = make()
    other, found = through_a_file(copy.deepcopy(model), tmp_path, output_loading_info=True)
    assert_same(other, model)
    for each in (model, other):
        one, two = map(each.get_submodule, names)
        assert (one.weight is two.weight) is is_tied
    assert not found["missing_keys"] and not found["unexpected_keys"]


@pytest.mark.slow
def test_the_block_on_the_page_runs(tmp_path, monkeypatch):
    """The page itself runs where transformers is not installed, so its block for transformers is run here."""
    page = (Path(__file__).parents[3] / "docs" / "int8.md").read_text()
    (block,) = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "block.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("block.py")


def test_weights_of_floats_are_not_quantized_while_they_are_loaded(tmp_path):
    load = transformers.AutoModelForCausalLM.from_pretrained
    make(config=FqnToConfig({})).save_pretrained(tmp_path)
    text = r"quantizes no weights of floats: load the model without quantization_config, then call subclasses.int8"
    with pytest.raises(ValueError, match=text):
        load(tmp_path, quantization_config={"quant_method": "desugar_int8"})
    assert int8_names(quantized(load(tmp_path)))


def test_a_model_without_int8_weights_is_not_marked():
    model = make(config=FqnToConfig({}))
    assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")
