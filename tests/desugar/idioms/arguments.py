"""Idioms of arguments and results of every kind."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Pair, make
from tests.desugar.idioms.running import idiom, raised
from tests.desugar.judge import backward


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


class Stats(NamedTuple):
    value: Tensor
    count: int


@dataclasses.dataclass(frozen=True)
class Output:
    value: Tensor
    label: str | None = None


# -------------------------------------------------------------------------------------------------- arguments


@idiom
def int_argument_changed_often(compile_):
    fn, x = compile_(lambda x, n: (x * n + n % 3, n + 1)), make(TwoTensor, 2, 3)
    for n in range(20):
        yield fn(x, n)


@idiom
def float_argument_changed_often(compile_):
    fn, x = compile_(lambda x, rate: (x * rate, rate / 2)), make(TwoTensor, 2, 3)
    for step in range(20):
        yield fn(x, 1.0 / (step + 1))
    for rate in (0.0, -0.0, math.inf, math.nan):
        yield fn(x, rate)[0]


@idiom
def int_and_float_and_bool_arguments(compile_):
    fn, x = compile_(lambda x, n: x * n if n else x), make(Pair, 2, 3)
    for n in (1, 1.0, True, 0, 0.0, False, None, 2):
        yield fn(x, n)


@idiom
def integer_decides_a_branch(compile_):
    def fn(x, n):
        if n > 5:
            return x * n
        return x[:, :n] if n % 2 else x + n

    fn, x = compile_(fn), make(TwoTensor, 2, 9)
    for n in (1, 2, 7, 4, 5, 3, 9, 8):
        yield fn(x, n)


@idiom
def string_argument(compile_):
    def fn(x, mode, *, other="none"):
        return {"sin": torch.sin, "cos": torch.cos}.get(mode, torch.neg)(x), f"{mode}-{other}".upper()

    fn, x = compile_(fn), make(Pair, 2, 3)
    for mode in ("sin", "cos", "tan"):
        yield fn(x, mode), fn(x, mode, other=mode)


@idiom
def enum_argument(compile_):
    def fn(x, mode, flags=NO_FLAGS):
        y = x.sin() if mode is Mode.SINE else x.cos()
        return (y * 2 if flags & Flags.DOUBLE else y), mode.value, flags | Flags.SHIFT

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for mode in (Mode.SINE, Mode.COSINE):
        yield fn(x, mode), fn(x, mode, Flags.DOUBLE)


@idiom
def dtype_and_device_arguments(compile_):
    def fn(x, dtype, device):
        return x.to(dtype), torch.zeros(3, dtype=dtype, device=device), x.dtype == dtype, str(device)

    fn = compile_(fn)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        yield fn(make(TwoTensor, 2, 3), dtype, torch.device("cpu")), fn(make(Pair, 2, 3), dtype, "cpu")


@idiom
def slices_and_indices(compile_):
    fn, x = compile_(lambda x, index: x[index]), make(TwoTensor, 4, 3)
    indices = [slice(1), slice(1, 3), slice(None, None, 2), ..., 0, -1, (..., 1), None, (slice(2), None, 0)]
    for index in (*indices, torch.tensor([0, 2]), [0, 1]):
        yield fn(x, index)


@idiom
def optional_tensor(compile_):
    def fn(x, mask=None):
        y = x + 1
        return y if mask is None else y * mask

    fn, x = compile_(fn), make(Pair, 2, 3)
    yield fn(x), fn(x, torch.zeros(3)), fn(x, None), fn(x, mask=make(Pair, 2, 3))


@idiom
def tensor_default_argument(compile_):
    weight = torch.ones(3)

    def fn(x, weight=weight, *, shift=torch.zeros(3)):  # noqa: B008 - this is the idiom
        return x * weight + shift

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    yield fn(x)
    weight.mul_(3)
    yield fn(x), fn(x, torch.full((3,), 2.0)), fn(x, shift=torch.ones(3))


@idiom
def varying_number_of_arguments(compile_):
    def fn(x, *others, scale=1, **named):
        total = x + sum(others)
        return total * scale, [(name, value * 2) for name, value in named.items()]

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    yield fn(x), fn(x, x), fn(x, x, 3, scale=2)
    yield fn(x, a=x), fn(x, b=x, a=1), fn(x, a=1, b=x)
    yield fn(*[x] * 5, scale=3, c=x)


@idiom
def positional_and_keyword(compile_):
    def fn(x, /, y, *, z=2):
        return x * y + z

    fn, x = compile_(fn), make(Pair, 2, 3)
    yield fn(x, x), fn(x, y=x), fn(x, z=x, y=3)
    yield raised(fn, x), fn(x, 1)


@idiom
def nested_containers_in_and_out(compile_):
    def fn(tree):
        tree = {**tree, "n": len(tree)}
        return [tree, (tree["x"][0] * 2, {"y": tree["x"][-1]}), None]

    fn = compile_(fn)
    for n in (1, 2):
        yield fn({"x": tuple(make(TwoTensor, 2, 3) for _ in range(n)), "name": "a"})


@idiom
def sizes_of_zero_and_one(compile_):
    fn = compile_(lambda x: (x * 2, x.sum(0), x.shape[0], torch.cat([x, x])))
    for rows in (3, 1, 0, 4, 1, 0, 5):
        x = make(TwoTensor, rows, 3, grad=True)
        out = fn(x)
        backward(out)
        yield out, x


@idiom
def number_of_dimensions(compile_):
    fn = compile_(lambda x: (x.reshape(-1) if x.dim() > 2 else x * x.dim(), x.numel(), list(x.shape)))
    for size in ((3,), (2, 3), (2, 2, 3), (5, 3)):
        yield fn(make(Pair, *size))


@idiom
def branches_on_sizes(compile_):
    def fn(x):
        rows, cols = x.shape
        y = x * 2 if rows > cols else x + rows
        return y if rows % 2 else (y, f"{rows}x{cols}")

    fn = compile_(fn)
    for rows in (2, 3, 4, 5, 6, 3):
        yield fn(make(TwoTensor, rows, 4))


@idiom
def one_tensor_twice(compile_):
    fn, x, y = compile_(lambda a, b: (a is b, a * b)), make(TwoTensor, 2, 3), make(TwoTensor, 2, 3)
    yield fn(x, y), fn(x, x), fn(y, x)


@idiom
def strides_change(compile_):
    fn = compile_(lambda x: (x * 2, x.stride(), x.is_contiguous()))
    yield fn(make(TwoTensor, 4, 4)), fn(make(TwoTensor, 4, 4).t()), fn(make(TwoTensor, 8, 4)[::2])


# ---------------------------------------------------------------------------------------------------- results


@idiom
def results_of_every_type(compile_):
    def fn(x, kind):
        y = x * 2
        match kind:
            case "namedtuple":
                return Stats(y, len(x))
            case "dataclass":
                return Output(y, kind)
            case "size":
                return x.size(), x.dtype, x.device
            case "nested":
                return {"a": [y, (kind, 1)], "b": {1: 2.5}}
            case "slice":
                return slice(0, len(x)), ..., Mode.SINE, range(len(x)), 1j
            case "none":
                return None

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for kind in ("namedtuple", "dataclass", "size", "nested", "slice", "none", "namedtuple"):
        yield fn(x, kind)


@idiom
def the_argument_itself(compile_):
    fn, x = compile_(lambda x, xs: (x, xs, x * 2, xs[0])), make(Pair, 2, 3)
    xs = [x, x]
    out = fn(x, xs)
    yield out, out[0] is x, out[1] is xs, x, xs
    yield fn(x, [make(Pair, 2, 3)]), x


@idiom
def one_result_twice(compile_):
    def fn(x):
        y = x * 2
        return y, [y, y.view(6)], {"y": y}

    fn = compile_(fn)
    for _ in range(2):
        out = fn(make(TwoTensor, 2, 3))
        yield out
        out[0].add_(1)
        yield out


@idiom
def a_closure_returned(compile_):
    def fn(x, scale):
        y = x * scale
        return lambda z: z + y

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for scale in (1, 2, 3):
        yield fn(x, scale)(x)


@idiom
def formatted_text(compile_):
    fn = compile_(
        lambda x, name: (x + 1, f"{name}: {tuple(x.shape)} {x.dtype} {len(x):>3}", "{:03d}".format(*x.shape))
    )
    for rows in (2, 3, 4):
        yield fn(make(Pair, rows, 3), f"n{rows}")


@idiom
def formatted_float(compile_):
    fn, x = compile_(lambda x, rate, notes: (notes.append(f"{rate:.1f}"), x * rate)[1]), make(Pair, 2, 3)
    notes = []
    for rate in (1.0, 2.0, 3.0):
        yield fn(x, rate, notes), notes


# ------------------------------------------------------------------------------------------ how it is called


@idiom
def keywords_collected(compile_):
    def fn(x, /, *args, **kwargs):
        kwargs["n"] = len(kwargs)
        return x * len(args), kwargs, args

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    options = {"x": 1, "a": x}
    yield fn(x, 1, 2, **options), options
    yield fn(x, **options), options
    yield fn(x, *[x, x], a=3)


@idiom
def wrong_arguments(compile_):
    fn, x = compile_(lambda x, y=1, *, z=2: x * y + z), make(TwoTensor, 2, 3)
    yield fn(x), raised(fn), raised(fn, x, 1, 2)
    yield raised(fn, x, w=1), raised(fn, x, x=1), fn(x, z=1)


@idiom
def containers_of_other_classes(compile_):
    def fn(point, options, stack):
        if "scale" in options:
            stack.append(point.x * options.scale)
        return Point(stack.top(), point.y), type(stack).__name__, options.get("shift")

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    yield fn(Point(x, x), Options(scale=2.0), Stack())
    stack = Stack([x])
    yield fn(Point(x, 1), Options(shift=2.0), stack), stack
    yield fn(Point(x, 1), Options(scale=3.0), stack), stack


@idiom
def argument_of_every_type(compile_):
    def fn(value):
        if isinstance(value, (list, tuple)):
            return [fn_of(entry) for entry in value]
        return {"value": fn_of(value)}

    def fn_of(value):
        return value * 2 if isinstance(value, (Tensor, int, float, str)) else value

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for value in (x, 1, 2.5, "a", None, [x, 1], (x,), [], b"a", 1j, torch.float32, {1}, range(2)):
        yield fn(value)


@idiom
def locals_deleted_and_reused(compile_):
    def fn(x, y):
        x = x * 2
        del y
        y = [x + 1 for x in (1, 2)]
        return x, y, sorted(locals())

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for n in (1, 2):
        yield fn(x, n)
