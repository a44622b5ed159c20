"""Python around tensors that a graph alone does not hold: values and effects are eager's, call by call.

`idioms/` has the common ways to write such code; here are what gradients, modules and odd results add to them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import desugar
from tests.desugar.classes import Pair, TwoTensor, make
from tests.desugar.judge import BOTH_DOORS, assert_same_values, by_pass, judge
from tests.modules import Held

# ---- data in Python ------------------------------------------------------------------------------------------

DATA: dict[str, Callable[..., Any]] = {
    "branch": lambda x: x * 2 if x.sum() > 0 else x,
    "int": lambda x: x * int(x[0]),
    "equal": lambda x: x * 2 if torch.equal(x, x) else x,
    "size": lambda x: torch.ones(int((x > 0).sum())) * x.sum(),
    "item": lambda x: x * x.sum().item(),
    "nonzero": lambda x: x.nonzero() * 2,
    "mask": lambda x: x[x > 0] * 2,
    "repeated": lambda x: (
        x.repeat_interleave((x > 0).long()) * 2,
        x.view(1, 5, 1).transpose(1, 2)[:, :, x > 0],
    ),
    "tolist": lambda x: x * x.tolist()[0],
    "unique": lambda x: x.detach().round().unique() + 1,
    "results": lambda x: (x * 2, x.tolist(), x[0].item(), x.sum().item()),
    "results of other types": lambda x: (
        (x > 0).tolist(),
        (x > 0)[0].item(),
        x.double().sum().item(),
        x.long().tolist(),
    ),
    "memory": lambda x: (x.detach().numpy().sum() > 0, x.data_ptr() > 0, x * 2),
}


@pytest.mark.sweep(96)
@BOTH_DOORS
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", DATA)
def test_what_only_data_tells(name, grad, door):
    judge(DATA[name], lambda: (torch.randn(5, requires_grad=grad),), way=door, calls=4)


# ---- sizes ---------------------------------------------------------------------------------------------------

# Functions that take ints and may refuse symbols, and functions that show a symbol as text.
OF_SIZES: dict[str, Callable[..., Any]] = {
    "text": lambda x: (x * 2, f"{x.shape[0]} rows"),
    "printed size": lambda x: str(x.shape),
    "printed int": lambda x: [repr(x.shape[0])],
    "key of text": lambda x: {f"rows {x.shape[0]}": x * 2},
    "key": lambda x: {x.shape[0]: x * 2},
    "looked up": lambda x: {3: "three", 4: "four"}.get(x.shape[0]),
    "slice": lambda x: slice(0, x.shape[0]),
    "divmod": lambda x: divmod(x.shape[0], 3),
    "numpy": lambda x: x * float(np.sqrt(x.shape[0])),
    "json": lambda x: json.dumps([x.shape[0]]),
    "set": lambda x: len({x.shape[0], 4}),
    "ceil": lambda x: x[: math.ceil(x.shape[0] / 2)] * 2,
    "floor": lambda x: x[: math.floor(x.shape[0] / 2)] * 2,
    "divided by a size": lambda x: [part * 2 for part in x.split(max(1, x.shape[0] // 2))],
    "chunks": lambda x: [part * 2 for part in x.chunk(3)],
    "padded": lambda x: F.pad(x, (0, 0, 0, 8 - x.shape[0])),
}


@pytest.mark.sweep(64)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", OF_SIZES)
def test_sizes_where_symbols_do_not_go(name, dynamic):
    fn = OF_SIZES[name]
    compiled = by_pass(fn, dynamic=dynamic)
    for n in (3, 4, 5, 8, 1, 0):
        judge(fn, lambda n=n: (torch.arange(2.0 * n).view(n, 2),), compiled)
        x = torch.arange(2.0 * n).view(n, 2)
        assert str(compiled(x)) == str(fn(x))


# ---- texts and objects ---------------------------------------------------------------------------------------

SHOWN: dict[str, Callable[..., Any]] = {
    "text of a tensor": lambda x: str(x.sum()),
    "text in a list": lambda x: [x * 2, f"sum: {x.sum()}"],
    "text of a number": lambda x: repr(x.sum().item()),
    "key": lambda x: {repr(x.sum()): x},
    "format": lambda x: f"{x.sum().item():.2f}",
    "class": lambda x: type(x),
    "name of the class": lambda x: type(x).__name__,
    "storage": lambda x: x.untyped_storage().nbytes(),
    "node of autograd": lambda x: type((x * x.detach().requires_grad_()).grad_fn).__name__,
    "deep copy": lambda x: copy.deepcopy(x.detach()),
}


@pytest.mark.sweep(12)
@BOTH_DOORS
@pytest.mark.parametrize("cls", [Tensor, TwoTensor])
@pytest.mark.parametrize("name", SHOWN)
def test_texts_and_objects_of_tensors(name, cls, door):
    compiled = door(SHOWN[name])
    for seed in (1, 2, 2):
        torch.manual_seed(seed)
        x = make(cls, 2, 2)
        got, want = compiled(x), SHOWN[name](x)
        assert type(got) is type(want) and str(got) == str(want)


Holder = dataclasses.make_dataclass("Holder", ["y"])


@BOTH_DOORS
@pytest.mark.parametrize("cls", [Tensor, TwoTensor, Pair])
def test_results_in_containers_that_are_none_of_pytorchs(cls, door):
    fn = lambda x: (SimpleNamespace(y=x * 2), {x * 3}, Holder(x * 4), (x * n for n in (5, 6)))  # noqa: E731
    compiled = door(fn)
    for _ in range(3):
        x, found = make(cls, 2, 3), []
        for function in (fn, compiled):
            box, held, holder, generated = function(x)
            assert type(box) is SimpleNamespace and type(held) is set and type(holder) is Holder
            found.append([box.y, *held, holder.y, *generated])
        assert_same_values(found[1], found[0])


@BOTH_DOORS
def test_iterators_among_the_arguments_are_gone_through_once(door):
    compiled, tensors = door(lambda ts: sum(ts)), [torch.ones(2), torch.zeros(2)]
    for make_iterator in (iter, lambda ts: (t for t in ts), lambda ts: map(torch.cos, ts)) * 2:
        iterator = make_iterator(tensors)
        assert torch.equal(compiled(iterator), sum(make_iterator(tensors)))
        assert list(iterator) == []


# ---- values that persist between calls -----------------------------------------------------------------------


@pytest.mark.sweep(2)
@BOTH_DOORS
@pytest.mark.parametrize("cls", [Tensor, Pair])
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_tensors_kept_in_caches_are_real(cls, door):
    xs, kept, table = [make(cls, 2, 3) for _ in "ab"], {}, functools.cache(lambda: torch.arange(3.0) * 2)
    compiled = door(lambda x: (kept.setdefault("first", x * 2), x + table())[1])
    for x in xs:
        assert_same_values([compiled(x), kept["first"]], [x + torch.arange(3.0) * 2, xs[0] * 2])
    assert torch.equal(table(), torch.arange(3.0) * 2)


def cycle(x):
    holder: list[object] = [x * 2]
    holder.append(holder)  # only the collector frees it
    return x + 1


@BOTH_DOORS
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", [cycle, lambda x: (x[0], x.t(), (x * 2).view(-1))], ids=["cycle", "views"])
def test_what_is_dropped_again(fn, grad, door):
    judge(fn, lambda: (torch.randn(2, 3, requires_grad=grad),), way=door, calls=2)


# ---- modules -------------------------------------------------------------------------------------------------


# ---- attributes that forward sets ----------------------------------------------------------------------------


class Keeping(Held):
    """Counts its calls, and sets a buffer to a new tensor at each."""

    def forward(self, x):
        self.calls += 1
        self.keys = self.keys + x
        return self.keys * 2


def test_trace_leaves_the_module_alone():
    module = Keeping({"keys": torch.zeros(3)}, calls=0)
    before = vars(module) | dict(module.named_buffers())
    desugar.trace(module, torch.ones(3))
    after = vars(module) | dict(module.named_buffers())
    assert all(after[name] is value for name, value in before.items()) and len(after) == len(before)
    assert module.keys.tolist() == [0, 0, 0]


# ---- hooks ---------------------------------------------------------------------------------------------------


# ---- scripted modules ----------------------------------------------------------------------------------------

SCRIPTED = {
    "linear": lambda: nn.Linear(3, 3),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(3)),
    "activations": lambda: nn.Sequential(nn.Tanh(), nn.GELU()),
    "softmax": lambda: nn.Softmax(-1),
}


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@BOTH_DOORS
@pytest.mark.parametrize("name", SCRIPTED)
def test_scripted_modules(name, door):
    make_args = lambda: (torch.randn(2, 3, requires_grad=True),)  # noqa: E731
    scripted = torch.jit.script(SCRIPTED[name]().eval())
    model = nn.Sequential(nn.Tanh(), scripted)
    compiled = judge(model, make_args, way=door, calls=2)
    judge(lambda x: scripted(x * 2) * 2, make_args, way=door, calls=2)
    model[1] = nn.Linear(3, 3)
    judge(model, make_args, compiled)
