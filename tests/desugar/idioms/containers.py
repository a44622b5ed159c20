"""Idioms of containers: lists, dicts, sets, deques and iterators that a function reads, fills and empties."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict, deque

import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Pair, make
from tests.desugar.idioms.running import idiom, idioms_of_calls


def grow(x, out):
    out.append(x * 2)
    out += [len(out), "text"]
    return out[0] + 1


def shrink(xs):
    last = xs.pop()
    xs.reverse()
    return last * 2 if xs else last


def change_a_dict(state):
    state["h"] = state["h"] * 2
    state.setdefault("steps", 0)
    state["steps"] += 1
    return state.pop("once", None)


def queue(x, window):
    window.append(x)
    window.rotate(1)
    return window.popleft() * 2 if len(window) > 2 else window[-1] + len(window)


def windowed(x, window):
    window.append(x)
    return sum(window) / len(window)


def halves(x, n):
    for step in range(n):
        yield x / 2**step
    return


def of_a_generator(x, n):
    first, *rest = halves(x, n)
    return first, rest, next(halves(x, n)), any(h.dim() > 5 for h in rest)


def zipped(xs, scales):
    pairs = [x * s + n for n, (x, s) in enumerate(zip(xs, scales, strict=False))]
    chained = list(itertools.chain(pairs, reversed(xs)))
    sums = [a + b for a, b in itertools.combinations(xs, 2)]
    return chained, sums, list(itertools.accumulate(xs)), list(map(torch.neg, xs))


def of_one_container(build, times):
    """Calls with a new tensor and one container, which is recorded as well."""
    return lambda fn, x: ((fn(make(TwoTensor, 2, 3), held), held) for held in [build()] for _ in range(times))


idioms_of_calls(
    {
        "list_argument_grows": (grow, of_one_container(list, 3)),
        "list_argument_shrinks": (
            shrink,
            lambda fn, x: ((fn(xs), xs) for xs in [[make(Pair, 2, 3) for _ in range(3)]] for _ in range(3)),
        ),
        "dict_argument_changed": (
            change_a_dict,
            lambda fn, x: (
                (fn(state), state) for state in [{"h": x, "once": torch.ones(2)}] for _ in range(3)
            ),
            Pair,
        ),
        "deque_as_a_queue": (queue, of_one_container(deque, 4)),
        "deque_of_bounded_length": (windowed, of_one_container(lambda: deque(maxlen=2), 4)),
        "next_of_an_iterator": (
            lambda x, it: x * next(it),
            lambda fn, x: (fn(x, it) for it in [iter([2, 3, 4])] for _ in range(3)),
        ),
        "next_of_a_count": (
            lambda x, it: x * next(it),
            lambda fn, x: (fn(x, it) for it in [itertools.count(1)] for _ in range(3)),
        ),
        "next_of_a_generator": (
            lambda x, it: x * next(it),
            lambda fn, x: [
                (fn(x, it), fn(x, it), fn(x, it), list(it)) for it in [(n * n for n in range(1, 9))]
            ],
        ),
        "generator_inside": (of_a_generator, lambda fn, x: (fn(x, n) for n in (1, 3, 2)), Pair),
        "generator_returned": (
            lambda x, n: (x * step for step in range(n)),
            lambda fn, x: (list(fn(x, n)) for n in (1, 3)),
        ),
        "itertools_and_zip": (
            zipped,
            lambda fn, x: (fn([make(TwoTensor, 2, 3) for _ in range(n)], range(1, 4)) for n in (1, 2, 3)),
        ),
    }
)


@idiom
def closure_list_grows(compile_):
    history = []

    def fn(x):
        y = x * 2
        history.append(y)
        return y if len(history) < 3 else sum(history)

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    return ((fn(x), history) for _ in range(4))


@idiom
def set_changed(compile_):
    seen = set()

    def fn(x, name):
        new = name not in seen
        seen.add(name)
        return x * 2 if new else x + 1

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    return ((fn(x, name), seen) for name in ("a", "a", "b", "b", "a"))


@idiom
def counter_and_defaultdict(compile_):
    counts, groups = Counter(), defaultdict(list)

    def fn(x, name):
        counts[name] += 1
        groups[name].append(x * counts[name])
        return groups[name][-1]

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    return ((fn(x, name), dict(counts), dict(groups)) for name in ("a", "b", "a"))


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
    return ((fn(make(Pair, 2, 3), key), cache) for key in (1, 2, 1, 3, 2))
