"""What a program depends on besides its arguments."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import desugar
from desugar.state import closure_cells, find_state
from tests.desugar.classes import Pair, make
from tests.desugar.judge import by_pass


def test_modules_their_training_and_their_slots():
    module = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3).eval())
    state = find_state(module, [], [module, module[0]])
    assert dict(state.modules)[module] is True and dict(state.modules)[module[1]] is False
    held = {(kind, name): tensor for m, kind, name, tensor in state.slots if m is module[1]}
    assert held["_parameters", "weight"] is module[1].weight
    assert held["_buffers", "running_mean"] is module[1].running_mean
    assert [tensor for m, _, name, tensor in state.slots if m is module[0] and name == "bias"] == [None]
    assert not state.inference
    with torch.inference_mode():
        assert find_state(module, [], []).inference


def test_cells():
    tensor, number, module, held = torch.ones(2), 3, nn.ReLU(), [1]

    def fn():
        return tensor, number, module, held, later

    contents = [content for _, content in closure_cells(fn)]
    assert len(contents) == 4, "an empty cell has no content yet"
    assert all(any(c is wanted for c in contents) for wanted in (tensor, number, module, held))
    later = 1
    assert list(closure_cells(torch.sin)) == [] and later


def test_a_module_in_a_cell_is_state():
    module = nn.Linear(2, 2)
    assert module in dict(find_state(lambda x: module(x), [], []).modules)


def test_modules_among_the_arguments_and_bound_by_partials_are_state():
    owner, argument, bound = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    fn = functools.partial(owner.forward, held=[bound])
    modules = dict(find_state(fn, [argument, torch.ones(2)], []).modules)
    assert set(modules) == {owner, argument, bound}


def test_a_decorated_forward_sees_eval_and_new_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        @by_pass
        def forward(self, x):
            return nn.functional.dropout(x * self.weight, 0.9, self.training)

    model = Model()
    assert (model(torch.ones(3)) != 1).all()
    assert model.eval()(torch.ones(3)).tolist() == [1, 1, 1]
    model.weight = nn.Parameter(torch.zeros(3))
    assert model(torch.ones(3)).tolist() == [0, 0, 0]


def test_shared_modules_are_noted_once():
    shared = nn.Linear(2, 2)
    state = find_state(nn.Sequential(), [], [nn.Sequential(shared, shared), shared])
    assert [m for m, _ in state.modules].count(shared) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__(1, nn.Tanh()),
        lambda m: m.append(nn.Linear(3, 2)),
        lambda m: m.__setitem__(0, nn.Linear(3, 3)),
        lambda m: m.__delitem__(1),
    ],
    ids=["other", "more", "same kind", "fewer"],
)
def test_submodule_replaced(change):
    module, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), make(Pair, 2, 3)
    compiled = by_pass(module)
    compiled(x)
    change(module)
    torch.testing.assert_close(compiled(x).a, module(x).a)


@pytest.mark.parametrize("on_compiled", [False, True])
def test_hook_registered_later(on_compiled):
    module, x = nn.Linear(3, 3), make(Pair, 2, 3)
    compiled = by_pass(module)
    compiled(x)
    (compiled if on_compiled else module).register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(compiled(x).a, module(x).a)


def test_hooks_that_were_there_run():
    module, x = nn.Linear(3, 3), make(Pair, 2, 3)
    module.register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(by_pass(module)(x).a, module(x).a)


@pytest.mark.parametrize("how", ["tuple", "dtype", "function", "partial", "held function"])
def test_whatever_a_cell_holds_is_seen(how):
    values = {"tuple": ((2.0,), (5.0,)), "dtype": (torch.float32, torch.float64)}.get(
        how, (torch.sin, torch.cos)
    )
    held = values[0]

    def inner(x):
        return x * held[0] if how == "tuple" else x.to(held) if how == "dtype" else held(x)

    fn = {"partial": functools.partial(inner), "held function": lambda x: inner(x)}.get(how, inner)
    compiled, x = desugar.compile(fn, backend="eager"), torch.ones(3)
    for held in values:  # noqa: B007
        assert torch.equal(compiled(x), inner(x))


def test_the_module_of_a_bound_method_is_seen():
    module, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    compiled = desugar.compile(module.forward, backend="eager")
    compiled(x)
    module.weight = torch.nn.Parameter(torch.zeros(3, 3))
    assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_registered_later_is_seen(register):
    module, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    compiled = desugar.compile(lambda x: module(x).sum(), backend="eager")
    (before,) = torch.autograd.grad(compiled(x), x)
    handle = getattr(module, register)(lambda module, *grads: (grads[0][0] * 2,))
    (doubled,) = torch.autograd.grad(compiled(x), x)
    assert torch.equal(doubled, before * 2)
    handle.remove()
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], before)
