"""Idioms of tensors: branches on data, writes in place, tensors that live from call to call."""

from __future__ import annotations

import copy
import weakref

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from subclasses.ragged import JaggedTensor
from tests.desugar.classes import Halves, Labeled, Pair, Tagged, make
from tests.desugar.idioms.running import idiom, raised
from tests.desugar.judge import backward

# ------------------------------------------------------------------------------------------------ data in Python


@idiom
def item_in_a_branch(compile_):
    def fn(x):
        total = x.sum().item()
        return x * 2 if total > 0 else x - 1, total

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for value in (x, -x, x * 2):
        yield fn(value)


@idiom
def branch_on_data(compile_):
    def fn(x, flag):
        if x.sum() > 0:
            x = x * 2
        return x + 1 if flag else x - 1

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for value in (x, -x):
        yield fn(value, torch.tensor(True)), fn(value, torch.tensor(False))


@idiom
def while_on_data(compile_):
    def fn(x):
        steps = 0
        while x.abs().max() > 0.1:
            x = x / 2
            steps += 1
        return x, steps

    fn = compile_(fn)
    for scale in (1, 4, 0.01):
        yield fn(make(Tensor, 2, 3) * scale), fn(make(TwoTensor, 2, 3) * scale)[1]


@idiom
def tolist_and_loop(compile_):
    def fn(x, lengths):
        return [part * n for n, part in zip(lengths.tolist(), x.split(lengths.tolist()), strict=True)]

    fn = compile_(fn)
    for lengths in ([2, 1], [1, 2], [1, 1, 1]):
        yield fn(make(TwoTensor, 3, 2), torch.tensor(lengths))


@idiom
def nonzero_and_masks(compile_):
    fn = compile_(lambda x: (x[x > 0], x.nonzero(), x.clamp(min=0).unique().numel()))
    for _ in range(3):
        yield fn(make(Tensor, 3, 4))


@idiom
def numpy_inside(compile_):
    def fn(x, y):
        return x * torch.from_numpy(y.numpy() * 2), float(y.numpy().sum())

    fn = compile_(fn)
    for n in (3, 4):
        yield fn(make(TwoTensor, 2, n), torch.arange(float(n)))


@idiom
def iterating_over_a_tensor(compile_):
    fn = compile_(lambda x: ([row * 2 for row in x], sum(x), len(x), x[0] in [None]))
    for rows in (2, 3, 1):
        yield fn(make(TwoTensor, rows, 3))


@idiom
def tensor_equality_as_a_bool(compile_):
    fn, x = compile_(lambda x, y: x * 2 if torch.equal(x, y) else x + y), make(TwoTensor, 2, 3)
    yield fn(x, x.clone()), fn(x, x + 1), fn(x, x)


# ----------------------------------------------------------------------------------------------------- writes


@idiom
def writes_to_arguments(compile_):
    def fn(x, y):
        x.mul_(2)
        y[0] = x[1]
        return x + y

    fn, x, y = compile_(fn), make(TwoTensor, 2, 3), make(TwoTensor, 2, 3)
    for _ in range(3):
        yield fn(x, y), x, y, x._version


@idiom
def write_then_inner_tensor_read(compile_):
    def fn(x):
        x.mul_(2)
        return x.a + 1, x * 1

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for _ in range(2):
        yield fn(x), x


@idiom
def write_to_an_inner_tensor(compile_):
    def fn(x):
        x.a.add_(1)
        return x * 2

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for _ in range(2):
        yield fn(x), x


@idiom
def inner_tensor_assigned_inside(compile_):
    def fn(x):
        x.a = x.a * 3
        return x * 2

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for _ in range(2):
        yield fn(x), x


@idiom
def inner_tensors_shared(compile_):
    def fn(x, y):
        x.mul_(2)
        return x + y

    fn, a, b, c = compile_(fn), torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)
    for x, y in (
        (TwoTensor(a, b), TwoTensor(c, b)),
        (TwoTensor(a, b), TwoTensor(a, b)),
        (TwoTensor(a, b),) * 2,
    ):
        yield fn(x, y), x, y


@idiom
def overlapping_views(compile_):
    def fn(x, y):
        x.mul_(2)
        return x + y

    fn, base = compile_(fn), torch.arange(8.0)
    for one, two in ((base[:3], base[5:]), (base[:3], base[1:4]), (base[:3], base[:3])):
        yield fn(one, two), base


@idiom
def cache_appended_by_cat(compile_):
    class Cache:
        keys = None

        def update(self, key):
            self.keys = key if self.keys is None else torch.cat([self.keys, key], 0)
            return self.keys

    def fn(x, cache):
        keys = cache.update(x * 2)
        return x @ keys.t()

    fn, cache = compile_(fn), Cache()
    for rows in (3, 1, 1, 1):
        yield fn(make(TwoTensor, rows, 4), cache), cache.keys


@idiom
def cache_written_by_position(compile_):
    def fn(cache, x, position):
        cache[position : position + len(x)] = x
        return cache[: position + len(x)].sum(0)

    fn, cache, position = compile_(fn), make(TwoTensor, 8, 4), 0
    for rows in (3, 1, 1, 2):
        yield fn(cache, make(TwoTensor, rows, 4), position), cache
        position += rows


@idiom
def swapped_every_call(compile_):
    def fn(state):
        state[0], state[1] = state[1] * 2, state[0]
        return state[0] + state[1]

    fn, state = compile_(fn), [make(Pair, 2, 3), make(Pair, 2, 3)]
    for _ in range(3):
        yield fn(state), state


@idiom
def result_fed_back(compile_):
    fn, x = compile_(lambda x: (x * 2, x.sin())), make(TwoTensor, 2, 3, grad=True)
    y = x
    for _ in range(3):
        y = fn(y)[0]
        yield y
    backward(y)
    yield y, x


@idiom
def weak_dictionary_of_tensors(compile_):
    known = weakref.WeakKeyDictionary()

    def fn(x, box):
        known[box] = known.get(box, 0) + 1
        return x * known[box]

    boxes = [nn.Identity(), nn.Identity()]
    fn, x = compile_(fn), make(Pair, 2, 3)
    for n in (0, 1, 0):
        yield fn(x, boxes[n]), list(known.values())


@idiom
def identity_as_a_key(compile_):
    known = {}

    def fn(x):
        y = x + 1
        return y if known.setdefault(id(x), len(known)) else y * 2

    fn, x, y = compile_(fn), make(TwoTensor, 2, 3), make(TwoTensor, 2, 3)
    for value in (x, y, x):
        yield fn(value), list(known.values())


@idiom
def called_inside_a_dispatch(compile_):
    rows = compile_(lambda x: (x * 2).unbind())

    class Doubling(Tensor):
        @staticmethod
        def __new__(cls, data):
            return torch.Tensor._make_wrapper_subclass(cls, data.size())

        def __init__(self, data):
            self.data_ = data

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return list(rows(args[0].data_))

    for n in (2, 3):
        yield Doubling(make(Tensor, n, 3)).unbind()


@idiom
def type_changes_between_calls(compile_):
    fn = compile_(lambda x: (x * 2 + 1).sum(0))
    for cls in (Tensor, TwoTensor, Pair, Tagged, Labeled, Halves, Tensor, TwoTensor):
        x = make(cls, 2, 6, grad=True)
        out = fn(x)
        backward(out)
        yield out, x


@idiom
def copies_of_a_tensor(compile_):
    def fn(x):
        one, two = copy.copy(x), copy.deepcopy(x)
        two.mul_(2)
        return one, two, one is x

    fn = compile_(fn)
    for cls in (Tensor, TwoTensor):
        x = make(cls, 2, 3)
        yield fn(x), x


@idiom
def copy_of_a_declared_tensor(compile_):
    fn = compile_(lambda x: copy.copy(x) * 2)
    for _ in range(2):
        yield fn(make(Pair, 2, 3))


@idiom
def deep_copy_of_a_declared_tensor(compile_):
    fn = compile_(lambda x: copy.deepcopy(x).mul_(2))
    for _ in range(2):
        x = make(Pair, 2, 3)
        yield fn(x), x


@idiom
def ragged_rows_of_new_lengths(compile_):
    def fn(x, scale):
        return (x * scale).sum(1), x.values, len(x)

    fn = compile_(fn)
    for lengths in ((2, 3), (1, 4, 2), (5,), (2, 2), (3, 1, 1, 1)):
        x = JaggedTensor.from_tensors([torch.randn(n, 3) for n in lengths])
        yield fn(x, len(lengths))


@idiom
def dtype_changes_between_calls(compile_):
    fn = compile_(lambda x, y: (x * y).to(torch.float32) if x.dtype.is_floating_point else x + y)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = make(TwoTensor, 2, 3, dtype=dtype)
        yield fn(x, x), fn(x, torch.ones(3)), fn(x, 2)
    yield fn(torch.arange(3), 2), raised(fn, torch.arange(3), None)
