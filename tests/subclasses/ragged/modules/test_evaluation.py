"""Modules of ``torch.nn`` with an op of their own for evaluation: rows and quantized weights take the ordinary way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import desugar
from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.doors import COMPILED, by_desugar

WIDTH, LENGTHS = 8, (5, 3, 4)
INPUTS = {"jagged": JaggedTensor.from_tensors, "padded": PaddedTensor.from_tensors, "dense": torch.stack}


def make_input(kind: str) -> Any:
    lengths = (4, 4, 4) if kind == "dense" else LENGTHS
    return INPUTS[kind]([torch.randn(n, WIDTH) for n in lengths])


def make_encoder(kind: str, layers: int = 1) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    if kind == "dense":
        quantize_(encoder, Int8WeightOnlyConfig())
    return encoder


def parts_of(x: Any) -> list[Tensor]:
    return list(x) if type(x) is Tensor else x.to_tensors()


PARTS = {
    "encoder": lambda encoder, x: encoder(x),
    "attention": lambda encoder, x: encoder.layers[0].self_attn(x, x, x, need_weights=False)[0],
}


@pytest.mark.sweep(18)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("part", PARTS)
def test_an_encoder_and_its_attention_are_one_graph(part, kind, door, mode):
    encoder, x, run = make_encoder(kind), make_input(kind), PARTS[part]
    compiled = COMPILED[door](lambda x: run(encoder, x), fullgraph=True)
    with mode():
        torch.testing.assert_close(parts_of(compiled(x)), parts_of(run(encoder, x)))


@pytest.mark.slow
def test_a_causal_hint_is_kept():
    """With it no score beyond a row is computed, and no padded table is made."""
    encoder, x = make_encoder("jagged"), make_input("jagged")
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    compiled = by_desugar(lambda x, mask: encoder(x, mask=mask, is_causal=True), fullgraph=True)
    with torch.no_grad():
        got = compiled(x, mask)
        torch.testing.assert_close(got.values, encoder(x, mask=mask, is_causal=True).values)
    graph = str(compiled.programs[0].forward.code)
    assert "ragged_attention" in graph and "_transformer_encoder_layer_fwd" not in graph


def test_plain_tensors_keep_the_op():
    encoder, x = make_encoder("jagged"), torch.randn(3, 4, WIDTH)
    graphs = []
    compiled = torch.compile(encoder, fullgraph=True, backend=lambda gm, _: graphs.append(gm.code) or gm)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), encoder(x))
    assert "_transformer_encoder_layer_fwd" in graphs[0]


@pytest.mark.slow
def test_a_package_of_an_encoder(tmp_path):
    encoder, x = make_encoder("jagged"), make_input("jagged")
    with torch.no_grad():
        desugar.save(tmp_path / "encoder.pt2", encoder, desugar.call(x))
        package = desugar.load(tmp_path / "encoder.pt2", classes=[JaggedTensor])
        torch.testing.assert_close(package(x).values, encoder(x).values)
