"""Layers and habits of real models, three training steps each: everything as in eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

from tests.desugar.judge import by_pass


class Held(nn.Module):
    """One linear layer and a function of it and the argument."""

    def __init__(self, fn):
        super().__init__()
        self.layer, self.fn = nn.Linear(4, 4), fn

    def forward(self, x):
        return self.fn(self.layer, x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class Cached(nn.Module):
    """Keys of earlier calls, written into a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 8, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.keys.index_copy_(1, self.place.reshape(1), self.layer(x).detach())
        self.place.add_(1)
        return self.layer(self.keys.sum(1))


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.register_forward_hook(lambda module, args, out: out * 2)
        self.layer.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))

    def forward(self, x):
        y = self.layer(x * self.layer.weight.sum())
        y.register_hook(lambda g: g * 5)
        return y.relu()


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scales = nn.ParameterDict({"out": torch.ones(4)})

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = F.gelu(layer(x)) + x
        return {"out": x * self.scales["out"], "rows": x.shape[0], "more": (x.sum(), mask)}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)


def gradient_of(layer, x):
    return torch.func.grad(lambda y: layer(y).sin().sum())(x)


def doubled(layer, x):
    return torch.func.functional_call(layer, {k: v * 2 for k, v in layer.named_parameters()}, (x,))


def inner_gradient(layer, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)[0]


def partly_bfloat16(layer, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    return y.float() + layer(x)


def spectrum(layer, x):
    pairs = torch.view_as_complex(layer(x).view(-1, 2, 2))
    return torch.fft.rfft(layer(x)).abs() + pairs.conj().real.sum()


def floats(*size):
    return lambda: torch.randn(*size)


def tokens(*size):
    return lambda: torch.randint(0, 10, size)


MODELS = {
    "attention": (Attention, floats(2, 5, 8)),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        floats(2, 5, 8),
    ),
    "lstm": (lambda: nn.LSTM(4, 6, 2, batch_first=True), floats(2, 5, 4)),
    "gru": (lambda: nn.GRU(4, 6), floats(2, 5, 4)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
        ),
        floats(2, 3, 8, 8),
    ),
    "norms": (
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.LayerNorm(5), nn.Dropout(0.3)),
        floats(2, 4, 5),
    ),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), floats(2, 4)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), floats(2, 4)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), floats(2, 4)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 2)), tokens(3, 5)),
    "embedding, renormed": (
        lambda: nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 2)),
        tokens(3, 5),
    ),
    "tied weights": (Tied, tokens(3)),
    "a cache": (Cached, floats(2, 1, 4)),
    "hooks": (Hooked, floats(2, 4)),
    "containers": (Containers, floats(2, 4)),
    "func.grad inside": (lambda: Held(gradient_of), floats(4)),
    "vmap inside": (
        lambda: Held(lambda layer, x: torch.vmap(lambda y: layer(y).sin().sum())(x)),
        floats(2, 4),
    ),
    "functional_call inside": (lambda: Held(doubled), floats(2, 4)),
    "autograd.grad inside": (lambda: Held(inner_gradient), floats(2, 4)),
    "autocast inside": (lambda: Held(partly_bfloat16), floats(2, 4)),
    "complex numbers": (lambda: Held(spectrum), floats(7, 4)),
}


# Dynamo does not trace recurrent layers, tensor hooks of intermediates, or autograd.grad as one graph.
BROKEN_BY_DYNAMO = {"lstm", "gru", "hooks", "autograd.grad inside"}


def total(result):
    parts = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return sum(part.double().sum() for part in parts)


@pytest.mark.parametrize("name", MODELS)
def test_three_steps(name):
    make, make_argument = MODELS[name]
    torch.manual_seed(0)
    model = make()
    copied = copy.deepcopy(model)
    compiled = by_pass(copied)
    sides = [(m, torch.optim.SGD(m.parameters(), 0.01), f) for m, f in ((model, model), (copied, compiled))]
    for step in range(3):
        results = []
        for _, optimizer, call in sides:
            torch.manual_seed(step)
            result = call(make_argument())
            optimizer.zero_grad()
            total(result).backward()
            optimizer.step()
            results.append(tree_leaves(result))
        torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(dict(copied.state_dict()), dict(model.state_dict()))
    assert len(compiled.programs) == 1 or name in BROKEN_BY_DYNAMO
