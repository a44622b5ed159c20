"""Idioms of tensors: branches on data, writes in place, tensors that live from call to call."""

from __future__ import annotations

import copy
import weakref

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from subclasses.ragged import JaggedTensor
from tests.desugar.classes import Halves, Labeled, Pair, Tagged, make
from tests.desugar.idioms.running import idiom, idioms_of_calls, raised, trained

# ------------------------------------------------------------------------------------------------ data in Python


def item_in_a_branch(x):
    total = x.sum().item()
    return x * 2 if total > 0 else x - 1, total


def branch_on_data(x, flag):
    if x.sum() > 0:
        x = x * 2
    return x + 1 if flag else x - 1


def while_on_data(x):
    steps = 0
    while x.abs().max() > 0.1:
        x = x / 2
        steps += 1
    return x, steps


idioms_of_calls(
    {
        "item_in_a_branch": (item_in_a_branch, lambda fn, x: (fn(value) for value in (x, -x, x * 2))),
        "branch_on_data": (
            branch_on_data,
            lambda fn, x: (fn(value, torch.tensor(flag)) for value in (x, -x) for flag in (True, False)),
        ),
        "while_on_data": (
            while_on_data,
            lambda fn, x: ((fn(make(Tensor, 2, 3) * scale), fn(x * scale)[1]) for scale in (1, 4, 0.01)),
        ),
        "tolist_and_loop": (
            lambda x, lengths: [
                part * n for n, part in zip(lengths.tolist(), x.split(lengths.tolist()), strict=True)
            ],
            lambda fn, x: (fn(x, torch.tensor(lengths)) for lengths in ([2, 1], [1, 2], [1, 1, 1])),
            *(TwoTensor, 3, 2),
        ),
        "nonzero_and_masks": (
            lambda x: (x[x > 0], x.nonzero(), x.clamp(min=0).unique().numel()),
            lambda fn, x: (fn(make(Tensor, 3, 4)) for _ in range(3)),
        ),
        "numpy_inside": (
            lambda x, y: (x * torch.from_numpy(y.numpy() * 2), float(y.numpy().sum())),
            lambda fn, x: (fn(make(TwoTensor, 2, n), torch.arange(float(n))) for n in (3, 4)),
        ),
        "iterating_over_a_tensor": (
            lambda x: ([row * 2 for row in x], sum(x), len(x), x[0] in [None]),
            lambda fn, x: (fn(make(TwoTensor, rows, 3)) for rows in (2, 3, 1)),
        ),
        "tensor_equality_as_a_bool": (
            lambda x, y: x * 2 if torch.equal(x, y) else x + y,
            lambda fn, x: (fn(x, x.clone()), fn(x, x + 1), fn(x, x)),
        ),
    }
)

# ----------------------------------------------------------------------------------------------------- writes


class Cache:
    keys = None

    def update(self, key):
        self.keys = key if self.keys is None else torch.cat([self.keys, key], 0)
        return self.keys


def writing(x, y):
    x.mul_(2)
    y[0] = x[1]
    return x + y


def write_and_read(x):
    x.mul_(2)
    return x.a + 1, x * 1


def writing_an_inner_tensor(x):
    x.a.add_(1)
    return x * 2


def assigning_an_inner_tensor(x):
    x.a = x.a * 3
    return x * 2


def doubling_the_first(x, y):
    x.mul_(2)
    return x + y


def appending(x, cache):
    keys = cache.update(x * 2)
    return x @ keys.t()


def writing_by_position(cache, x, position):
    cache[position : position + len(x)] = x
    return cache[: position + len(x)].sum(0)


def swapping(state):
    state[0], state[1] = state[1] * 2, state[0]
    return state[0] + state[1]


def sharing(a, b, c):
    """Pairs of wrappers that share one inner tensor, both, or are one."""
    return (TwoTensor(a, b), TwoTensor(c, b)), (TwoTensor(a, b), TwoTensor(a, b)), (TwoTensor(a, b),) * 2


idioms_of_calls(
    {
        "writes_to_arguments": (
            writing,
            lambda fn, x: ((fn(x, y), x, y, x._version) for y in [make(TwoTensor, 2, 3)] for _ in range(3)),
        ),
        "write_then_inner_tensor_read": (write_and_read, lambda fn, x: ((fn(x), x) for _ in range(2))),
        "write_to_an_inner_tensor": (writing_an_inner_tensor, lambda fn, x: ((fn(x), x) for _ in range(2))),
        "inner_tensor_assigned_inside": (
            assigning_an_inner_tensor,
            lambda fn, x: ((fn(x), x) for _ in range(2)),
        ),
        "inner_tensors_shared": (
            doubling_the_first,
            lambda fn, x: (
                (fn(one, two), one, two) for one, two in sharing(*(torch.ones(2, 3) for _ in range(3)))
            ),
        ),
        "overlapping_views": (
            doubling_the_first,
            lambda fn, x: (
                (fn(base[:3], base[start : start + 3]), base)
                for base in [torch.arange(8.0)]
                for start in (5, 1, 0)
            ),
        ),
        "cache_appended_by_cat": (
            appending,
            lambda fn, x: (
                (fn(make(TwoTensor, rows, 4), cache), cache.keys)
                for cache in [Cache()]
                for rows in (3, 1, 1, 1)
            ),
        ),
        "cache_written_by_position": (
            writing_by_position,
            lambda fn, x: (
                (fn(x, make(TwoTensor, rows, 4), position), x)
                for position, rows in ((0, 3), (3, 1), (4, 1), (5, 2))
            ),
            *(TwoTensor, 8, 4),
        ),
        "swapped_every_call": (
            swapping,
            lambda fn, x: ((fn(state), state) for state in [[x, make(Pair, 2, 3)]] for _ in range(3)),
            Pair,
        ),
    }
)


@idiom
def result_fed_back(compile_):
    fn, x = compile_(lambda x: (x * 2, x.sin())), make(TwoTensor, 2, 3, grad=True)
    y = fn(fn(x)[0])[0]
    yield y
    yield trained(lambda y: fn(y)[0], y), x


# ------------------------------------------------------------------------------------- keys, classes and types


class Doubling(Tensor):
    """Runs a function, whatever the op."""

    @staticmethod
    def __new__(cls, data, run):
        return torch.Tensor._make_wrapper_subclass(cls, data.size())

    def __init__(self, data, run):
        self.data_, self.run = data, run

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return list(args[0].run(args[0].data_))


def copying(x):
    one, two = copy.copy(x), copy.deepcopy(x)
    two.mul_(2)
    return one, two, one is x


idioms_of_calls(
    {
        "called_inside_a_dispatch": (
            lambda x: (x * 2).unbind(),
            lambda fn, x: (Doubling(make(Tensor, n, 3), fn).unbind() for n in (2, 3)),
        ),
        "type_changes_between_calls": (
            lambda x: (x * 2 + 1).sum(0),
            lambda fn, x: (
                trained(fn, make(cls, 2, 6, grad=True))
                for cls in (Tensor, TwoTensor, Pair, Tagged, Labeled, Halves, Tensor, TwoTensor)
            ),
        ),
        "copies_of_a_tensor": (copying, lambda fn, x: ((fn(y), y) for y in (make(Tensor, 2, 3), x))),
        "copy_of_a_declared_tensor": (
            lambda x: copy.copy(x) * 2,
            lambda fn, x: (fn(make(Pair, 2, 3)) for _ in range(2)),
        ),
        "deep_copy_of_a_declared_tensor": (
            lambda x: copy.deepcopy(x).mul_(2),
            lambda fn, x: ((fn(x), x) for x in (make(Pair, 2, 3), make(Pair, 2, 3))),
        ),
        "ragged_rows_of_new_lengths": (
            lambda x, scale: ((x * scale).sum(1), x.values, len(x)),
            lambda fn, x: (
                fn(JaggedTensor.from_tensors([torch.randn(n, 3) for n in lengths]), len(lengths))
                for lengths in ((2, 3), (1, 4, 2), (5,), (2, 2), (3, 1, 1, 1))
            ),
        ),
        "dtype_changes_between_calls": (
            lambda x, y: (x * y).to(torch.float32) if x.dtype.is_floating_point else x + y,
            lambda fn, x: (
                [
                    fn(z, y)
                    for dtype in (torch.float32, torch.float64, torch.bfloat16)
                    for z in [x.to(dtype)]
                    for y in (z, torch.ones(3), 2)
                ],
                fn(torch.arange(3), 2),
                raised(fn, torch.arange(3), None),
            ),
        ),
    }
)


@idiom
def weak_dictionary_of_tensors(compile_):
    known = weakref.WeakKeyDictionary()

    def fn(x, box):
        known[box] = known.get(box, 0) + 1
        return x * known[box]

    boxes = [nn.Identity(), nn.Identity()]
    fn, x = compile_(fn), make(Pair, 2, 3)
    return ((fn(x, boxes[n]), list(known.values())) for n in (0, 1, 0))


@idiom
def identity_as_a_key(compile_):
    known = {}

    def fn(x):
        y = x + 1
        return y if known.setdefault(id(x), len(known)) else y * 2

    fn, x, y = compile_(fn), make(TwoTensor, 2, 3), make(TwoTensor, 2, 3)
    return ((fn(value), list(known.values())) for value in (x, y, x))
