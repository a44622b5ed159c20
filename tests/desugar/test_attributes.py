"""What a function sets on its modules while it is traced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import desugar
from desugar import DesugarError
from tests.desugar.judge import by_pass, judge


class Table(nn.Module):
    """Makes a table when it is first called, or grows it, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.table, self.calls = None, 0

    def forward(self, x):
        self.calls += 1
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(float(len(x)))
        return x * self.table[: len(x)]


class Cache(nn.Module):
    """Sets a buffer to a new tensor at every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(3))

    def forward(self, x):
        self.keys = self.keys + x
        return self.keys * 2


def test_a_table_that_is_made_when_it_is_first_needed():
    module = Table()
    compiled = by_pass(module)
    for size in (3, 3, 2, 5, 5, 4):
        assert compiled(torch.ones(size)).tolist() == [float(n) for n in range(size)]
        assert not isinstance(module.table, torch._subclasses.FakeTensor) and len(module.table) >= size
    assert compiled.programs


def test_effects_of_a_trace_happen_once():
    module = Table()
    module(torch.ones(3))
    by_pass(module)(torch.ones(3))
    assert module.calls == 2


def test_state_that_is_replaced_at_every_call_is_refused():
    module = Cache()
    compiled = by_pass(module)
    assert compiled(torch.ones(3)).tolist() == [
        2,
        2,
        2,
    ]  # as eager mode has it, for it might be the only time
    keys = module.keys
    for _ in range(2):
        with pytest.raises(DesugarError, match=r"Cache\.keys to a tensor that it computes"):
            compiled(torch.ones(3))
        assert module.keys is keys and keys.tolist() == [1, 1, 1]


def test_trace_refuses_and_leaves_the_module_alone():
    module = Table()
    with pytest.raises(DesugarError, match=r"Table\.table"):
        desugar.trace(module, torch.ones(3))
    assert module.table is None and module.calls == 0


def test_an_error_leaves_attributes_alone():
    class Fails(Table):
        def forward(self, x):
            super().forward(x)
            self.register_buffer("late", x)
            raise KeyError("inside")

    module = Fails()
    with pytest.raises(KeyError):
        by_pass(module)(torch.ones(3))
    assert module.table is None and module.calls == 0 and "late" not in dict(module.named_buffers())


def test_a_tensor_kept_elsewhere_is_refused():
    kept = []

    def fn(x):
        if not kept:
            kept.append(x * 2)
        return x + kept[0]

    with pytest.raises(DesugarError, match="keeps a tensor"):
        by_pass(fn)(torch.ones(3))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_modules():
    for scripted in (torch.jit.script(nn.Linear(3, 3)), torch.jit.script(nn.Sequential(nn.BatchNorm1d(3)))):
        model = nn.Sequential(nn.Tanh(), scripted)
        compiled, x = by_pass(model), torch.ones(2, 3)
        for called in (compiled, by_pass(lambda x, scripted=scripted: scripted(x) * 2)):
            with pytest.raises(DesugarError, match="a scripted module is called"):
                called(x)
        model[1] = nn.Linear(3, 3)
        assert torch.equal(compiled(x), model(x)), "the next call works"
    for bare in (torch.jit.script(nn.Sequential(nn.Tanh(), nn.GELU())), torch.jit.script(nn.Softmax(-1))):
        judge(lambda x, bare=bare: bare(x * 2), lambda: (torch.randn(2, 3, requires_grad=True),), calls=2)
        judge(nn.Sequential(bare), lambda: (torch.randn(2, 3, requires_grad=True),), calls=2)
