"""What recurrent layers and attention refuse of ragged rows, what the errors say, and that what they advise works."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor

LENGTHS = (3, 1, 2)


def rows(cls=JaggedTensor, width=4):
    return cls.from_tensors([torch.randn(n, width) for n in LENGTHS])


def mask():
    return nn.Transformer.generate_square_subsequent_mask(max(LENGTHS))


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_without_batch_first(cls, make):
    text = (
        rf": a layer without batch_first takes \[T, B, C\], got a {cls.__name__} of size \(3, 3, 4\), .*; make the "
        rf"layer with batch_first=True"
    )
    with pytest.raises(DispatchError, match=text):
        make(4, 5)(rows(cls))
    make(4, 5, batch_first=True)(rows(cls))


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_without_batch_first_takes_places_first(cls, make):
    layer, other, x = (
        make(4, 5, bidirectional=True),
        make(4, 5, bidirectional=True, batch_first=True),
        rows(cls),
    )
    other.load_state_dict(layer.state_dict())
    leaves = [x.detach().requires_grad_() for _ in range(2)]
    found, expected = layer(leaves[0].transpose(0, 1))[0].transpose(0, 1), other(leaves[1])[0]
    assert torch.equal(found.to_dense(), expected.to_dense())
    for y in (found, expected):
        y.sum().backward()
    assert torch.equal(*(leaf.grad.to_dense() for leaf in leaves))


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
def test_a_recurrent_layer_with_batch_first_takes_rows_first(cls):
    layer, x = nn.GRU(4, 5, batch_first=True), rows(cls).transpose(0, 1)
    text = r"gru: a layer with batch_first=True takes \[B, T, C\], got rows \[T, B, C\]; write x.transpose\(0, 1\)"
    with pytest.raises(DispatchError, match=text):
        layer(x)
    layer(x.transpose(0, 1))


def test_rows_of_another_number_of_dimensions():
    x = JaggedTensor.from_tensors([torch.randn(4, n) for n in LENGTHS][:1]).transpose(1, 2)
    text = r"gru: expected rows of entries \[B, T, C\], ragged along 1, got a JaggedTensor of size .*, ragged along 2"
    with pytest.raises(DispatchError, match=text):
        nn.GRU(4, 5, batch_first=True)(x)


def test_states_are_dense():
    layer = nn.GRU(4, 5, batch_first=True)
    text = r"gru: expected dense states hx \[layers, B, H\], got a JaggedTensor of size \(1, 3, 5\), ragged along 1"
    with pytest.raises(DispatchError, match=text):
        layer(rows(), JaggedTensor.from_tensors([torch.zeros(3, 5)]))
    layer(rows(), torch.zeros(1, 3, 5))


def test_a_recurrent_layer_is_no_part_of_a_graph():
    layer = nn.GRU(4, 5, batch_first=True)
    expected = layer(rows())[0].shape
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=r"gru: the kernel needs the lengths .* leave .*allow_rnn False"):
            compiled(rows())  # by way of Dynamo's own
    torch.compiler.reset()
    assert torch.compile(layer, backend="eager")(rows())[0].shape == expected


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
def test_attention_asks_for_the_mask_that_is_causal(cls):
    attention, x = nn.MultiheadAttention(4, 2, batch_first=True), rows(cls)
    with pytest.raises(
        ValueError, match=r"multi_head_attention_forward: is_causal says what attn_mask is; pass"
    ):
        attention(x, x, x, is_causal=True)
    attention(x, x, x, is_causal=True, attn_mask=mask())


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
def test_attention_of_entries_of_another_size(cls):
    x = rows(cls)
    text = rf"multi_head_attention_forward: expected entries of 6 features, got a {cls.__name__} of size \(3, 3, 4\)"
    with pytest.raises(ValueError, match=text):
        nn.MultiheadAttention(6, 2, batch_first=True)(x, x, x)


def test_a_cache_of_ragged_keys_has_no_length():
    transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
    keys = JaggedTensor.from_tensors([torch.randn(n, 2, 4) for n in LENGTHS]).transpose(1, 2)
    cache = transformers.DynamicCache()
    cache.update(keys, keys, 0)
    text = r"get_seq_length: a cache with a JaggedTensor of size .* as its keys has no single length, .* pass whole"
    with pytest.raises(DispatchError, match=text):
        cache.get_seq_length()
