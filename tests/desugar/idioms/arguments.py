"""Idioms of arguments, results and containers of every kind."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import NamedTuple

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Pair, make
from tests.desugar.idioms.running import (
    between,
    idioms_of_calls,
    idioms_of_changes,
    raised,
    trained,
    wrapper,
)


class Mode(enum.Enum):
    SINE = "sine"
    COSINE = "cosine"


class Flags(enum.IntFlag):
    DOUBLE = 1
    SHIFT = 2


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Options(dict):
    """A dict whose items are attributes."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Stack(list):
    """A list with a method."""

    def top(self):
        return self[-1]


NO_FLAGS = Flags(0)
INDICES = (slice(1), slice(1, 3), slice(None, None, 2), ..., 0, -1, (..., 1), None, (slice(2), None, 0))


class Stats(NamedTuple):
    value: Tensor
    count: int


@dataclasses.dataclass(frozen=True)
class Output:
    value: Tensor
    label: str | None = None


# -------------------------------------------------------------------------------------------------- arguments


def nested_containers(tree):
    tree = {**tree, "n": len(tree)}
    return [tree, (tree["x"][0] * 2, {"y": tree["x"][-1]}), None]


def branches_on_sizes(x):
    rows, cols = x.shape
    y = x * 2 if rows > cols else x + rows
    return y if rows % 2 else (y, f"{rows}x{cols}")


idioms_of_calls(
    {
        "int_argument_changed_often": (
            lambda x, n: (x * n + n % 3, n + 1),
            lambda fn, x: (fn(x, n) for n in range(20)),
        ),
        "float_argument_changed_often": (
            lambda x, rate: (x * rate, rate / 2),
            lambda fn, x: (fn(x, 1.0 / (step + 1)) for step in range(20)),
        ),
        "float_argument_without_an_inverse": (
            lambda x, rate: (x * rate, rate / 2),
            lambda fn, x: (fn(x, rate)[0] for rate in (1.0, 0.5, 0.0, -0.0, math.inf, math.nan)),
        ),
        "int_and_float_and_bool_arguments": (
            lambda x, n: x * n if n else x,
            lambda fn, x: (fn(x, n) for n in (1, 1.0, True, 0, 0.0, False, None, 2)),
            Pair,
        ),
        "integer_decides_a_branch": (
            lambda x, n: x * n if n > 5 else x[:, :n] if n % 2 else x + n,
            lambda fn, x: (fn(x, n) for n in (1, 2, 7, 4, 5, 3, 9, 8)),
            *(TwoTensor, 2, 9),
        ),
        "string_argument": (
            lambda x, mode, *, other="none": (
                {"sin": torch.sin, "cos": torch.cos}.get(mode, torch.neg)(x),
                f"{mode}-{other}".upper(),
            ),
            lambda fn, x: ((fn(x, mode), fn(x, mode, other=mode)) for mode in ("sin", "cos", "tan")),
            Pair,
        ),
        "enum_argument": (
            lambda x, mode, flags=NO_FLAGS: (
                (x.sin() if mode is Mode.SINE else x.cos()) * (2 if flags & Flags.DOUBLE else 1),
                mode.value,
                flags | Flags.SHIFT,
            ),
            lambda fn, x: ((fn(x, mode), fn(x, mode, Flags.DOUBLE)) for mode in Mode),
        ),
        "dtype_and_device_arguments": (
            lambda x, dtype, device: (
                x.to(dtype),
                torch.zeros(3, dtype=dtype, device=device),
                x.dtype == dtype,
                str(device),
            ),
            lambda fn, x: (
                (fn(x, dtype, torch.device("cpu")), fn(make(Pair, 2, 3), dtype, "cpu"))
                for dtype in (torch.float32, torch.float64, torch.bfloat16)
            ),
        ),
        "slices_and_indices": (
            lambda x, index: x[index],
            lambda fn, x: (fn(x, index) for index in (*INDICES, torch.tensor([0, 2]), [0, 1])),
            *(TwoTensor, 4, 3),
        ),
        "optional_tensor": (
            lambda x, mask=None: x + 1 if mask is None else (x + 1) * mask,
            lambda fn, x: (fn(x), fn(x, torch.zeros(3)), fn(x, None), fn(x, mask=make(Pair, 2, 3))),
            Pair,
        ),
        "varying_number_of_arguments": (
            lambda x, *others, scale=1, **named: (
                (x + sum(others)) * scale,
                [(name, value * 2) for name, value in named.items()],
            ),
            lambda fn, x: (
                (fn(x), fn(x, x), fn(x, x, 3, scale=2)),
                (fn(x, a=x), fn(x, b=x, a=1), fn(x, a=1, b=x)),
                fn(*[x] * 5, scale=3, c=x),
            ),
        ),
        "positional_and_keyword": (
            lambda x, /, y, *, z=2: x * y + z,
            lambda fn, x: (fn(x, x), fn(x, y=x), fn(x, z=x, y=3), raised(fn, x), fn(x, 1)),
            Pair,
        ),
        "nested_containers_in_and_out": (
            nested_containers,
            lambda fn, x: (fn({"x": (x, make(TwoTensor, 2, 3))[:n], "name": "a"}) for n in (1, 2)),
        ),
        "sizes_of_zero_and_one": (
            lambda x: (x * 2, x.sum(0), x.shape[0], torch.cat([x, x])),
            lambda fn, x: (trained(fn, make(TwoTensor, n, 3, grad=True)) for n in (3, 1, 0, 4, 1, 0, 5)),
        ),
        "number_of_dimensions": (
            lambda x: (x.reshape(-1) if x.dim() > 2 else x * x.dim(), x.numel(), list(x.shape)),
            lambda fn, x: (fn(make(Pair, *size)) for size in ((3,), (2, 3), (2, 2, 3), (5, 3))),
        ),
        "branches_on_sizes": (
            branches_on_sizes,
            lambda fn, x: (fn(make(TwoTensor, rows, 4)) for rows in (2, 3, 4, 5, 6, 3)),
        ),
        "one_tensor_twice": (
            lambda a, b: (a is b, a * b),
            lambda fn, x: [(fn(x, y), fn(x, x), fn(y, x)) for y in [make(TwoTensor, 2, 3)]],
        ),
        "strides_change": (
            lambda x: (x * 2, x.stride(), x.is_contiguous()),
            lambda fn, x: (fn(x), fn(x.t()), fn(make(TwoTensor, 8, 4)[::2])),
            *(TwoTensor, 4, 4),
        ),
    }
)


# ---------------------------------------------------------------------------------------------------- results


def results_of_every_type(x, kind):
    y = x * 2
    return {
        "namedtuple": Stats(y, len(x)),
        "dataclass": Output(y, kind),
        "size": (x.size(), x.dtype, x.device),
        "nested": {"a": [y, (kind, 1)], "b": {1: 2.5}},
        "slice": (slice(0, len(x)), ..., Mode.SINE, range(len(x)), 1j),
        "none": None,
    }[kind]


idioms_of_calls(
    {
        "results_of_every_type": (
            results_of_every_type,
            lambda fn, x: (
                fn(x, kind)
                for kind in ("namedtuple", "dataclass", "size", "nested", "slice", "none", "namedtuple")
            ),
        ),
        "a_closure_returned": (
            lambda x, scale: (lambda y: lambda z: z + y)(x * scale),
            lambda fn, x: (fn(x, scale)(x) for scale in (1, 2, 3)),
        ),
        "formatted_text": (
            lambda x, name: (
                x + 1,
                f"{name}: {tuple(x.shape)} {x.dtype} {len(x):>3}",
                "{:03d}".format(*x.shape),
            ),
            lambda fn, x: (fn(make(Pair, rows, 3), f"n{rows}") for rows in (2, 3, 4)),
        ),
        "formatted_float": (
            lambda x, rate, notes: (notes.append(f"{rate:.1f}"), x * rate)[1],
            lambda fn, x: ((fn(x, rate, notes), notes) for notes in [[]] for rate in (1.0, 2.0, 3.0)),
            Pair,
        ),
        "the_argument_itself": (
            lambda x, xs: (x, xs, x * 2, xs[0]),
            lambda fn, x: (
                (out, out[0] is x, out[1] is xs, x, xs)
                for xs in ([x, x], [make(Pair, 2, 3)])
                for out in [fn(x, xs)]
            ),
            Pair,
        ),
        "one_result_twice": (
            lambda x: (lambda y: (y, [y, y.view(6)], {"y": y}))(x * 2),
            lambda fn, x: (
                seen
                for _ in range(2)
                for out in [fn(make(TwoTensor, 2, 3))]
                for seen in between(lambda out=out: out, lambda out=out: out[0].add_(1))
            ),
        ),
    }
)


# ------------------------------------------------------------------------------------------ how it is called


def keywords_collected(x, /, *args, **kwargs):
    kwargs["n"] = len(kwargs)
    return x * len(args), kwargs, args


def containers_of_other_classes(point, options, stack):
    if "scale" in options:
        stack.append(point.x * options.scale)
    return Point(stack.top(), point.y), type(stack).__name__, options.get("shift")


def of_every_type(value):
    if isinstance(value, (list, tuple)):
        return [doubled(entry) for entry in value]
    return {"value": doubled(value)}


def doubled(value):
    return value * 2 if isinstance(value, (Tensor, int, float, str)) else value


def locals_deleted_and_reused(x, y):
    x = x * 2
    del y
    y = [x + 1 for x in (1, 2)]
    return x, y, sorted(locals())


idioms_of_calls(
    {
        "keywords_collected": (
            keywords_collected,
            lambda fn, x: [
                (fn(x, 1, 2, **options), fn(x, **options), options, fn(x, *[x, x], a=3))
                for options in [{"x": 1, "a": x}]
            ],
        ),
        "wrong_arguments": (
            lambda x, y=1, *, z=2: x * y + z,
            lambda fn, x: (
                (fn(x), raised(fn), raised(fn, x, 1, 2)),
                (raised(fn, x, w=1), raised(fn, x, x=1), fn(x, z=1)),
            ),
        ),
        "containers_of_other_classes": (
            containers_of_other_classes,
            lambda fn, x: (
                (fn(Point(x, y), options, stack), stack)
                for stack in [Stack()]
                for y, options in (
                    (x, Options(scale=2.0)),
                    (1, Options(shift=2.0)),
                    (1, Options(scale=3.0)),
                )
            ),
        ),
        "argument_of_every_type": (
            of_every_type,
            lambda fn, x: (
                fn(value)
                for value in (
                    *(x, 1, 2.5, "a", None, [x, 1], (x,), []),
                    *(b"a", 1j, torch.float32, {1}, range(2)),
                )
            ),
        ),
        "locals_deleted_and_reused": (
            locals_deleted_and_reused,
            lambda fn, x: (fn(x, n) for n in (1, 2)),
        ),
    }
)


# ---- containers that a function reads, fills and empties -----------------------------------------------------


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


def halves(x, n):
    for step in range(n):
        yield x / 2**step
    return


def of_a_generator(x, n):
    first, *rest = halves(x, n)
    return first, rest, next(halves(x, n)), any(h.dim() > 5 for h in rest)


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
        "deque_of_bounded_length": (
            lambda x, window: (window.append(x), sum(window) / len(window))[1],
            of_one_container(lambda: deque(maxlen=2), 4),
        ),
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
    }
)


# ---- containers around a function ----------------------------------------------------------------------------


def counting_by_name(counts, groups):
    def fn(x, name):
        counts[name] += 1
        groups[name].append(x * counts[name])
        return groups[name][-1]

    return fn


def caching(cache):
    def fn(x, key):
        if key in cache:
            cache.move_to_end(key)
        else:
            cache[key] = x * key
        while len(cache) > 2:
            cache.popitem(last=False)
        return cache[key]

    return fn


idioms_of_changes(
    {
        "tensor_default_argument": (
            lambda: torch.ones(3),
            lambda weight: lambda x, weight=weight, *, shift=torch.zeros(3): x * weight + shift,  # noqa: B008
            lambda fn, weight: (
                fn(wrapper()),
                fn(wrapper(), torch.full((3,), 2.0)),
                fn(wrapper(), shift=torch.ones(3)),
            ),
            lambda weight: weight.mul_(3),
        ),
        "set_changed": (
            set,
            lambda seen: lambda x, name: (x + 1 if name in seen else x * 2, seen.add(name))[0],
            lambda fn, seen: ((fn(wrapper(), name), seen) for name in ("a", "a", "b", "b", "a")),
        ),
        "counter_and_defaultdict": (
            lambda: (Counter(), defaultdict(list)),
            lambda held: counting_by_name(*held),
            lambda fn, held: ((fn(wrapper(), name), *map(dict, held)) for name in ("a", "b", "a")),
        ),
        "ordered_dict_as_cache": (
            OrderedDict,
            caching,
            lambda fn, cache: ((fn(make(Pair, 2, 3), key), cache) for key in (1, 2, 1, 3, 2)),
        ),
    }
)
