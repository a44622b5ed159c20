"""Which callable of `torch.compile` is being called, as a backend finds it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from desugar._torch_compiled_calls import compiled_call


class Net(nn.Module):
    def forward(self, x, *, by=2):
        return x * by

    def method(self, x):
        return x + 1


def free(x, *, by=2):
    return x * by


NET, LINEAR = Net(), nn.Linear(2, 2)


def calls_of(run):
    """What is found while `run(backend)` compiles."""
    found = []
    run(lambda graph, inputs: (found.append(compiled_call()), graph.forward)[1])
    return found


WHAT = {
    "a function": free,
    "a module": NET,
    "a method": NET.method,
    "a forward": NET.forward,
    "a module of torch": LINEAR,
}


@pytest.mark.parametrize("what", WHAT.values(), ids=WHAT)
def test_what_was_compiled_and_its_arguments(what):
    x, kwargs = torch.ones(2), {} if what in (NET.method, LINEAR) else {"by": 3}
    (call,) = calls_of(lambda backend: torch.compile(what, backend=backend)(x, **kwargs))
    assert call.what == what and call.args[0] is x and call.kwargs == kwargs
    assert callable(call.backend)


def test_graphs_of_one_call_have_its_arguments():
    def breaks(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    first, rest = calls_of(lambda backend: torch.compile(breaks, backend=backend)(torch.ones(2)))
    assert first.args is rest.args and first.what is rest.what is breaks


def test_the_innermost_one_is_found():
    def run(backend):
        inner = torch.compile(free, backend=backend)
        in_eager_mode = torch._dynamo.disable(lambda x: inner(x), recursive=False)
        outer = torch.compile(lambda x: in_eager_mode(x), backend=lambda graph, inputs: graph.forward)
        outer(torch.ones(2))

    (call,) = calls_of(run)
    assert call.what is free


def test_there_is_none_outside_of_calls():
    with ThreadPoolExecutor(1) as threads:
        assert compiled_call() is threads.submit(compiled_call).result() is None
