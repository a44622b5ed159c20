"""Declared classes of every kind that the tests of the spec layer use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, TensorSubclass, dynamic, inner, static
from tests.doors import DOORS

aten = torch.ops.aten


# The ways to call a function of values.
MODES = DOORS


class Pair(TensorSubclass, fallback="map"):
    """Two tensors of one size, each op run on both."""

    a: Tensor = inner()
    b: Tensor = inner()


class Int8Weight(TensorSubclass, size_from="qdata", dtype_from="scale", fallback="materialize"):
    """The class of the design: quantized data, a scale, perhaps a zero point."""

    qdata: Tensor = inner(dtype=torch.int8)
    scale: Tensor = inner()
    zero: Tensor | None = inner(optional=True)
    axis: int = static(default=0)

    def materialize(self) -> Tensor:
        data = self.qdata.to(self.scale.dtype)
        return (data if self.zero is None else data - self.zero) * self.scale


@Int8Weight.implements(F.linear)
def _linear(func, x, w, bias=None):
    if not isinstance(w, Int8Weight):
        return func(x.materialize(), w, bias)
    (scale,) = [t for name, t in zip(("qdata", "scale", "zero"), w.unwrap(), strict=True) if name == "scale"]
    data = w.qdata.to(x.dtype) if w.zero is None else w.qdata.to(x.dtype) - w.zero
    y = func(x, data) * scale.squeeze(-1)
    return y if bias is None else y + bias


class Scaled(TensorSubclass, fallback="materialize"):
    """A tensor times a scalar tensor, both differentiable; it represents a plain tensor."""

    data_: Tensor = inner()
    factor: Tensor = inner()

    def materialize(self) -> Tensor:
        return self.data_ * self.factor


class LowRank(TensorSubclass, fallback="materialize", trainable=True):
    """A product of two factors of other sizes than itself; an op without a rule gives it a plain gradient."""

    left: Tensor = inner()
    right: Tensor = inner()

    @staticmethod
    def outer(left, right):
        return Outer((left.shape[0], right.shape[1]))

    def materialize(self):
        return self.left @ self.right


class Rows(TensorSubclass, fallback="map"):
    """Has ``count`` rows, all equal to the inner tensor; no inner tensor has this outer size."""

    row: Tensor = inner()
    count: int = dynamic()

    @staticmethod
    def outer(row: Tensor, count: int) -> Outer:
        return Outer((count, *row.shape))


class Tagged(TensorSubclass, fallback="map"):
    """Static and dynamic metadata beside one inner tensor."""

    held: Tensor = inner()
    tag: Any = static(default="none")
    mode: Any = static(default=0)
    length: int = dynamic(default=0)


class Nested(TensorSubclass, fallback="map"):
    """One inner tensor must be a Pair, the other may be anything."""

    pair: Pair = inner()
    rest: Tensor = inner()


class Optional(TensorSubclass, fallback="map"):
    """An inner tensor that may be absent."""

    base: Tensor = inner()
    extra: Tensor | None = inner(optional=True)


class Shadow(TensorSubclass, fallback="map"):
    """Names that are methods of Tensor, soft keywords of Python, or names that generated code might use."""

    values: Tensor = inner()
    match: Tensor = inner()
    sum: Tensor = inner()
    self: Tensor = inner()
    func: int = static(default=0)


class Hostile(TensorSubclass):
    """No rules and no fallback: whatever runs on it was derived from the schema."""

    secret: Tensor = inner()


def make_int8(zero: bool = False, size: tuple[int, int] = (4, 3), **meta: Any) -> Int8Weight:
    """Random quantized data with a positive scale."""
    qdata = torch.randint(-128, 128, size, dtype=torch.int8)
    scale = torch.rand(size[0], 1) + 0.1
    return Int8Weight(qdata, scale, torch.full((size[0], 1), 2.0) if zero else None, **meta)


def make_pair(*size: int) -> Pair:
    return Pair(torch.randn(size or (3, 4)), torch.randn(size or (3, 4)))


FACTORIES: dict[str, Callable[[], Any]] = {
    "pair": make_pair,
    "int8": make_int8,
    "int8 with zero": lambda: make_int8(zero=True, axis=1),
    "scaled": lambda: Scaled(torch.randn(3, 4), torch.tensor(2.0)),
    "rows": lambda: Rows(torch.randn(4), count=3),
    "tagged": lambda: Tagged(torch.randn(3, 4), tag="t", length=7),
    "nested": lambda: Nested(make_pair(), torch.randn(3, 4)),
    "nested twice": lambda: Nested(make_pair(), make_pair()),
    "optional, absent": lambda: Optional(torch.randn(3, 4)),
    "optional, there": lambda: Optional(torch.randn(3, 4), torch.randn(3, 4)),
    "shadow": lambda: Shadow(*torch.randn(4, 3, 4)),
    "hostile": lambda: Hostile(torch.randn(3, 4)),
}


def inners_of(x: Any) -> dict[str, Tensor]:
    """All plain tensors inside, by their path."""
    found = {}
    for name in x._layout.present:
        held = x.__dict__[name]
        if isinstance(held, TensorSubclass):
            found |= {f"{name}.{path}": t for path, t in inners_of(held).items()}
        else:
            found[name] = held
    return found


def assert_same(x: Any, y: Any) -> None:
    """Same class, metadata, dynamic ints, outer facts and inner values; plain tensors are compared as such."""
    assert type(x) is type(y)
    if not isinstance(x, TensorSubclass):
        torch.testing.assert_close(x, y, equal_nan=True)
        return
    assert x._layout is y._layout
    assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
    for field in type(x).__spec__.dynamics:
        assert x.__dict__[field.name] == y.__dict__[field.name]
    mine, theirs = inners_of(x), inners_of(y)
    assert mine.keys() == theirs.keys()
    for name, t in mine.items():
        torch.testing.assert_close(t, theirs[name], equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


# ---- classes from data -----------------------------------------------------------------------------------------


def declare(
    base: Any = TensorSubclass,
    /,
    *,
    name: str = "Made",
    rules: Mapping[Any, Callable[..., Any]] | None = None,
    keywords: Mapping[str, Any] | None = None,
    annotations: Mapping[str, Any] | None = None,
    **body: Any,
) -> Any:
    """Runs a class statement: a field has the annotation that it needs, unless another is given.

    A class that inherits no field and declares none has an inner tensor `held`. It is one of a module, which pickle
    finds there, where `__module__` is given.
    """
    needed = {n: _ANNOTATIONS[type(value)](value) for n, value in body.items() if type(value) in _ANNOTATIONS}
    needed |= annotations or {}
    if base is TensorSubclass and annotations is None and not needed:
        body, needed = {"held": inner()} | body, {"held": Tensor}
    namespace = {
        "__annotations__": needed,
        "__module__": __name__,
        "__qualname__": name if "__module__" in body else f"declare.<locals>.{name}",
        "__doc__": "Made.",
        **body,
    }
    cls: Any = type(TensorSubclass)(
        name, base if isinstance(base, tuple) else (base,), namespace, **(keywords or {})
    )
    for key, rule in (rules or {}).items():
        cls.implements(key)(rule)
    return cls


def counted(fn: Callable[..., Any], backend: str = "aot_eager") -> tuple[Any, Any]:
    """A compiled function, and the counter of its programs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, backend=counter, fullgraph=True), counter


_ANNOTATIONS: dict[type, Callable[[Any], Any]] = {
    type(inner()): lambda marker: Tensor | None if marker.optional else Tensor,
    type(static()): lambda marker: Any,
    type(dynamic()): lambda marker: int,
}
