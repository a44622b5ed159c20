"""Idioms of containers: lists, dicts, sets, deques and iterators that a function reads, fills and empties."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict, deque

import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Pair, make
from tests.desugar.idioms.running import idiom

SEEN: list = []


@idiom
def list_argument_grows(compile_):
    def fn(x, out):
        out.append(x * 2)
        out += [len(out), "text"]
        return out[0] + 1

    fn, out = compile_(fn), []
    for _ in range(3):
        yield fn(make(TwoTensor, 2, 3), out), out


@idiom
def list_argument_shrinks(compile_):
    def fn(xs):
        last = xs.pop()
        xs.reverse()
        return last * 2 if xs else last

    fn, xs = compile_(fn), [make(Pair, 2, 3) for _ in range(3)]
    for _ in range(3):
        yield fn(xs), xs


@idiom
def closure_list_grows(compile_):
    history = []

    def fn(x):
        y = x * 2
        history.append(y)
        return y if len(history) < 3 else sum(history)

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for _ in range(4):
        yield fn(x), history


@idiom
def dict_argument_changed(compile_):
    def fn(state):
        state["h"] = state["h"] * 2
        state.setdefault("steps", 0)
        state["steps"] += 1
        return state.pop("once", None)

    fn, state = compile_(fn), {"h": make(Pair, 2, 3), "once": torch.ones(2)}
    for _ in range(3):
        yield fn(state), state


@idiom
def set_changed(compile_):
    seen = set()

    def fn(x, name):
        new = name not in seen
        seen.add(name)
        return x * 2 if new else x + 1

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for name in ("a", "a", "b", "b", "a"):
        yield fn(x, name), seen


@idiom
def deque_as_a_queue(compile_):
    def fn(x, window):
        window.append(x)
        window.rotate(1)
        return window.popleft() * 2 if len(window) > 2 else window[-1] + len(window)

    fn, window = compile_(fn), deque()
    for _ in range(4):
        yield fn(make(TwoTensor, 2, 3), window), window


@idiom
def deque_of_bounded_length(compile_):
    def fn(x, window):
        window.append(x)
        return sum(window) / len(window)

    fn, window = compile_(fn), deque(maxlen=2)
    for _ in range(4):
        yield fn(make(TwoTensor, 2, 3), window), window


@idiom
def counter_and_defaultdict(compile_):
    counts, groups = Counter(), defaultdict(list)

    def fn(x, name):
        counts[name] += 1
        groups[name].append(x * counts[name])
        return groups[name][-1]

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for name in ("a", "b", "a"):
        yield fn(x, name), dict(counts), dict(groups)


@idiom
def ordered_dict_as_cache(compile_):
    cache = OrderedDict()

    def fn(x, key):
        if key in cache:
            cache.move_to_end(key)
        else:
            cache[key] = x * key
        while len(cache) > 2:
            cache.popitem(last=False)
        return cache[key]

    fn = compile_(fn)
    for key in (1, 2, 1, 3, 2):
        yield fn(make(Pair, 2, 3), key), cache


@idiom
def next_of_an_iterator(compile_):
    fn, numbers, x = compile_(lambda x, it: x * next(it)), iter([2, 3, 4]), make(TwoTensor, 2, 3)
    for _ in range(3):
        yield fn(x, numbers)


@idiom
def next_of_a_count(compile_):
    fn, numbers, x = compile_(lambda x, it: x * next(it)), itertools.count(1), make(TwoTensor, 2, 3)
    for _ in range(3):
        yield fn(x, numbers)


@idiom
def next_of_a_generator(compile_):
    fn, x = compile_(lambda x, it: x * next(it)), make(TwoTensor, 2, 3)
    numbers = (n * n for n in range(1, 9))
    for _ in range(3):
        yield fn(x, numbers)
    yield list(numbers)


@idiom
def generator_inside(compile_):
    def halves(x, n):
        for step in range(n):
            yield x / 2**step
        return

    def fn(x, n):
        first, *rest = halves(x, n)
        return first, rest, next(halves(x, n)), any(h.dim() > 5 for h in rest)

    fn, x = compile_(fn), make(Pair, 2, 3)
    for n in (1, 3, 2):
        yield fn(x, n)


@idiom
def generator_returned(compile_):
    def fn(x, n):
        return (x * step for step in range(n))

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for n in (1, 3):
        yield list(fn(x, n))


@idiom
def itertools_and_zip(compile_):
    def fn(xs, scales):
        pairs = [x * s + n for n, (x, s) in enumerate(zip(xs, scales, strict=False))]
        chained = list(itertools.chain(pairs, reversed(xs)))
        sums = [a + b for a, b in itertools.combinations(xs, 2)]
        return chained, sums, list(itertools.accumulate(xs)), list(map(torch.neg, xs))

    fn = compile_(fn)
    for n in (1, 2, 3):
        yield fn([make(TwoTensor, 2, 3) for _ in range(n)], range(1, 4))
