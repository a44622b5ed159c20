"""Tensors of a trace that the function puts somewhere: the call is refused; what is dropped again is none."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from desugar import DesugarError
from tests.desugar.classes import Pair, make
from tests.desugar.judge import by_pass, judge


def test_a_hook_that_stores_activations():
    stored: list[torch.Tensor] = []
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    handle = module[0].register_forward_hook(lambda module, args, out: stored.append(out.detach()))
    compiled = by_pass(module)
    with pytest.raises(DesugarError, match=r"size \(1, 2\).* is kept for later \(in a list"):
        compiled(torch.ones(1, 2))
    handle.remove()
    judge(module, lambda: (torch.randn(1, 2),), compiled)


@pytest.mark.parametrize("cls", [torch.Tensor, Pair])
def test_stores(cls):
    kept: dict[str, torch.Tensor] = {}

    def store(x):
        kept["x"] = x * 2
        return x + 1

    @functools.lru_cache
    def table():
        return torch.arange(3.0) * 2

    def cached(x):
        return x + table()

    for fn in (store, cached):
        with pytest.raises(DesugarError, match=r"is kept for later|keeps a tensor of size"):
            by_pass(fn)(make(cls, 2, 3))


def test_what_is_dropped_again_is_no_leftover():
    def cycle(x):
        holder: list[object] = [x * 2]
        holder.append(holder)  # only the collector frees it
        return x + 1

    def views(x):
        return x[0], x.t(), (x * 2).view(-1)

    for fn in (cycle, views):
        for grad in (False, True):
            judge(fn, lambda grad=grad: (torch.randn(2, 3, requires_grad=grad),))
