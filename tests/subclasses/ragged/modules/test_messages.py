"""What recurrent layers and attention refuse of ragged rows, what the errors say, and that what they advise works."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import classes, raising, working

LENGTHS = (3, 1, 2)
CLASSES = JaggedTensor, PaddedTensor
LAYERS = nn.GRU, nn.LSTM, nn.RNN
FIRST, SECOND = nn.GRU(4, 5, batch_first=True), nn.GRU(4, 5)
ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True)
MASK = nn.Transformer.generate_square_subsequent_mask(max(LENGTHS))


def rows(cls=JaggedTensor, width=4):
    return cls.from_tensors([torch.randn(n, width) for n in LENGTHS])


def attend(cls, layer=ATTENTION, **options):
    x = rows(cls)
    return layer(x, x, x, **options)


TURNED = JaggedTensor.from_tensors([torch.randn(4, LENGTHS[0])]).transpose(1, 2)
STATES = JaggedTensor.from_tensors([torch.zeros(3, 5)])
SIZE = r" of size \(3, 3, 4\)"

test_refused = raising(
    {
        **{
            f"{make.__name__} without batch_first, {cls.__name__}": (
                lambda make=make, cls=cls: make(4, 5)(rows(cls)),
                rf": a layer without batch_first takes \[T, B, C\], got a {cls.__name__}{SIZE}, .*; make the layer "
                r"with batch_first=True",
            )
            for make in LAYERS
            for cls in CLASSES
        },
        **{
            f"{name}, {cls.__name__}": (lambda call=call, cls=cls: call(cls), error, words)
            for cls in CLASSES
            for name, (call, error, words) in {
                "places first": (
                    lambda cls: FIRST(rows(cls).transpose(0, 1)),
                    NotImplementedError,
                    r"gru: a layer with batch_first=True takes \[B, T, C\], got rows \[T, B, C\]; write "
                    r"x.transpose\(0, 1\)",
                ),
                "no mask that is causal": (
                    lambda cls: attend(cls, is_causal=True),
                    ValueError,
                    r"multi_head_attention_forward: is_causal says what attn_mask is; pass",
                ),
                "entries of another size": (
                    lambda cls: attend(cls, nn.MultiheadAttention(6, 2, batch_first=True)),
                    ValueError,
                    rf"multi_head_attention_forward: expected entries of 6 features, got a {cls.__name__}{SIZE}",
                ),
            }.items()
        },
        "rows that are turned": (
            lambda: FIRST(TURNED),
            r"gru: expected rows of entries \[B, T, C\], ragged along 1, got a JaggedTensor of size .*, ragged along 2",
        ),
        "ragged states": (
            lambda: FIRST(rows(), STATES),
            r"gru: expected dense states hx \[layers, B, H\], got a JaggedTensor of size \(1, 3, 5\), ragged along 1",
        ),
    }
)
test_what_is_advised_works = working(
    {
        **{
            f"{make.__name__}, {cls.__name__}": lambda make=make, cls=cls: make(4, 5, batch_first=True)(
                rows(cls)
            )
            for make in LAYERS
            for cls in CLASSES
        },
        **{
            f"a mask, {cls.__name__}": lambda cls=cls: attend(cls, is_causal=True, attn_mask=MASK)
            for cls in CLASSES
        },
        "dense states": lambda: FIRST(rows(), torch.zeros(1, 3, 5)),
    }
)


@classes
@pytest.mark.parametrize("make", LAYERS)
def test_a_recurrent_layer_without_batch_first_takes_places_first(cls, make):
    layer, other = (make(4, 5, bidirectional=True, batch_first=first) for first in (False, True))
    other.load_state_dict(layer.state_dict())
    x = rows(cls)
    leaves = [x.detach().requires_grad_() for _ in range(2)]
    results = [layer(leaves[0].transpose(0, 1))[0].transpose(0, 1), other(leaves[1])[0]]
    for y in results:
        y.sum().backward()
    assert torch.equal(*(y.to_dense() for y in results))
    assert torch.equal(*(leaf.grad.to_dense() for leaf in leaves))


def test_a_recurrent_layer_is_no_part_of_a_graph():
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(FIRST, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=r"gru: the kernel needs the lengths .* leave .*allow_rnn False"):
            compiled(rows())  # by way of Dynamo's own
    torch.compiler.reset()
    assert torch.compile(FIRST, backend="eager")(rows())[0].shape == (3, 3, 5)


def test_a_cache_of_ragged_keys_has_no_length():
    transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
    keys, cache = rows(width=8).unflatten(-1, (2, 4)).transpose(1, 2), transformers.DynamicCache()
    cache.update(keys, keys, 0)
    text = r"get_seq_length: a cache with a JaggedTensor of size .* as its keys has no single length, .* pass whole"
    with pytest.raises(NotImplementedError, match=text):
        cache.get_seq_length()
