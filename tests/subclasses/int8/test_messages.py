"""What splits of int8 values, what ranks send each other, and what loading a model refuses: what the errors say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from subclasses import DispatchError
from subclasses.int8 import Int8Tensor, Int8WeightOnlyConfig, quantize_


def int8(**options):
    return Int8Tensor.from_float(torch.randn(4, 8), **options)


# ---- splits ----------------------------------------------------------------------------------------------------

SPLITS = {
    "of no rows": (lambda x: x.split(0), "split: expected a size of 1 or more, got 0"),
    "of fewer": (lambda x: torch.split(x, -1), "split: expected a size of 1 or more, got -1"),
    "of too few": (
        lambda x: x.split([1, 2]),
        r"split_with_sizes: \[1, 2\] do not add up to 4, the extent of dim 0",
    ),
    "of too many": (lambda x: x.split_with_sizes([3, 2]), r"split_with_sizes: \[3, 2\] do not add up to 4"),
    "of fewer than none": (
        lambda x: torch.split(x, [5, -1]),
        r"split_with_sizes: expected sizes of 0 or more, got \[5, -1\]",
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits_that_there_are_not(name):
    """As of a plain tensor, by an error of the same type."""
    split, text = SPLITS[name]
    with pytest.raises(RuntimeError):
        split(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match=text):
        split(int8())


# ---- ranks -----------------------------------------------------------------------------------------------------

SENT = {
    "a plain tensor": (
        lambda: torch.randn(4, 8),
        r"got a Tensor of size \(4, 8\) too; quantize what each rank gives and what it receives alike",
    ),
    "numbers with a zero point": (
        lambda: int8(symmetric=False),
        r"got Int8Tensors with a scale of \(4, 1\) and a zero point too; quantize .* alike, all with symmetric=True or",
    ),
    "other blocks": (
        lambda: int8(block_size=(4, 8)),
        r"got Int8Tensors with a scale of \(1, 1\) .*src_data_rank=None",
    ),
}


@pytest.fixture
def one_process():
    if not dist.is_available():
        pytest.skip("needs torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent_is_what_is_received(name, one_process):
    make, text = SENT[name]
    text = rf"scatter_.*: expected Int8Tensors with a scale of \(4, 1\) and no zero point throughout, {text}"
    with pytest.raises(DispatchError, match=text):
        dist.scatter(int8(), [make()])


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_quantized_alike_is_sent(symmetric, one_process):
    sent, received = int8(symmetric=symmetric), int8(symmetric=symmetric)
    dist.scatter(received, [sent])
    assert torch.equal(received.dequantize(), sent.dequantize())


# ---- models ----------------------------------------------------------------------------------------------------


def test_weights_of_floats_are_not_quantized_while_they_are_loaded(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    text = r"quantizes no weights of floats: load the model without quantization_config, then call subclasses.int8"
    with pytest.raises(ValueError, match=text):
        load(tmp_path, quantization_config={"quant_method": "desugar_int8"})
    model = load(tmp_path)
    quantize_(model, Int8WeightOnlyConfig())
    assert any(isinstance(p.data, Int8Tensor) for p in model.parameters())
