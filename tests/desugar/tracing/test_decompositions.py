"""Layers that PyTorch decomposes otherwise than eager mode does them: dropout, recurrent layers, one loss."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from desugar import DesugarError
from tests.desugar.classes import Pair, make
from tests.desugar.judge import by_dynamo, by_pass, judge

KINDS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, **kwargs, nonlinearity="relu"),
}
SETTINGS = [
    pytest.param(*pair, marks=() if pair[0] == pair[1] else pytest.mark.slow)
    for pair in itertools.product([False, True], [False, True])
]


@pytest.fixture(params=[False, True], ids=["breaks", "whole"])
def is_whole(request):
    """Whether Dynamo takes recurrent layers into its graph; by default it breaks the graph there."""
    with torch._dynamo.config.patch(allow_rnn=request.param):
        yield request.param


def assert_same_numbers(layer, run):
    """Compares what `run` returns of a layer and of it compiled, twice, with the same random numbers."""
    compiled, state, sides = by_pass(layer), torch.get_rng_state(), []
    for fn in (layer, compiled, compiled):
        torch.set_rng_state(state)
        sides.append(run(fn))
        torch.testing.assert_close(sides[-1], sides[0])
    return compiled, sides[0]


@pytest.mark.sweep(128)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("bidirectional", "batch_first"), SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers(kind, bidirectional, batch_first, grad, dropout, is_whole):
    module = KINDS[kind](3, 4, 3, dropout=dropout, bidirectional=bidirectional, batch_first=batch_first)
    x = torch.randn(2, 2, 3).requires_grad_(grad)

    def run(fn):
        out, hidden = fn(x)
        loss = out.square().sum() + sum(h.sum() for h in (hidden if kind == "LSTM" else [hidden]))
        return [out, *torch.autograd.grad(loss, [*module.parameters(), *([x] if grad else [])])]

    if is_whole and dropout:
        with pytest.raises(DesugarError, match="dropout between its layers"):
            by_pass(module)(x)
        module.eval()
    compiled, _ = assert_same_numbers(module, run)
    assert any("lstm" in str(p.joint) or len(p.joint.graph.nodes) > 50 for p in compiled.programs) == is_whole


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind, dropout, is_whole):
    rows, layer = [torch.randn(3, 3), torch.randn(2, 3)], KINDS[kind](3, 4, 2, dropout=dropout)

    def run(fn):
        out = fn(pack_sequence(rows))[0].data
        return [out, *torch.autograd.grad(out.square().sum(), [*layer.parameters()])]

    assert_same_numbers(layer, run)


NOTHING_DROPPED = {
    "evaluation": lambda x: F.dropout(x, 0.5, False),
    "p is 0": lambda x: F.dropout(x, p=0.0),
    "the op": lambda x: torch.dropout(x, 0.5, train=False),
    "in place": lambda x: F.dropout(x, 0.5, training=False, inplace=True),
    "a module": nn.Dropout(0.5).eval(),
    "written to": lambda x: (F.dropout(x, 0.5, training=False).add_(1), x * 2)[1],
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", [by_pass, by_dynamo])
@pytest.mark.parametrize("cls", [torch.Tensor, Pair])
@pytest.mark.parametrize("name", NOTHING_DROPPED)
def test_dropout_that_drops_nothing_gives_its_argument(name, cls, way):
    judge(NOTHING_DROPPED[name], lambda: (make(cls, 2, 3),), way=way)


@pytest.mark.parametrize("training", [True, False])
def test_a_probability_that_is_none_is_an_error(training):
    with pytest.raises(Exception, match="dropout probability"):  # in words of Dynamo's
        by_pass(lambda x: F.dropout(x, 1.5, training))(torch.ones(3))


@pytest.mark.parametrize("way", [by_pass, by_dynamo])
def test_margins_of_several_labels_are_refused(way):
    with pytest.raises(Exception, match="counts the targets after a -1"):
        way(F.multilabel_margin_loss)(torch.randn(2, 3), torch.tensor([[0, -1, 1], [1, 2, -1]]))
