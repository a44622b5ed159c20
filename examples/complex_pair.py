"""A complex tensor made of two real ones.

Useful where a device or a compiler does not support complex numbers. Rules cover arithmetic, products of matrices, and
ops that act on both parts alike. Every other op runs on the complex tensor that the pair represents. The script puts
the class to the conformance kit, and counts how many of PyTorch's own list of ops are right. It also counts them for
PyTorch's own class of this kind, if there is one.

    python examples/complex_pair.py
"""

import importlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner
from subclasses.testing import Verdicts, examine, sweep

aten = torch.ops.aten


class ComplexPair(TensorSubclass, fallback="materialize"):
    """Real and imaginary part, two real tensors of one size and dtype."""

    re: Tensor = inner()
    im: Tensor = inner()

    @staticmethod
    def outer(re: Tensor) -> Outer:
        offset = re.storage_offset()
        return Outer(re.shape, re.stride(), dtype=re.dtype.to_complex(), storage_offset=offset)

    def materialize(self) -> Tensor:
        return torch.complex(self.re, self.im)

    @classmethod
    def from_complex(cls, z: Tensor) -> "ComplexPair":
        return cls(*(part.clone(memory_format=torch.contiguous_format) for part in parts(z)))


def parts(value: Any) -> tuple[Any, Any]:
    """Real and imaginary part of a pair, of a plain tensor or of a number."""
    if isinstance(value, ComplexPair):
        return value.re, value.im
    if isinstance(value, Tensor) and value.is_complex():
        value = value.resolve_conj()  # no lazy bit below autograd: PyTorch does not look at it there
        return value.real, value.imag
    return (value.real, value.imag) if isinstance(value, complex) else (value, 0)


# ---------------------------------------------------------------------------------------------------------
# Ops that act on both parts alike
# ---------------------------------------------------------------------------------------------------------


def split(value: Any, which: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(split(v, which) for v in value)
    return parts(value)[which] if isinstance(value, Tensor) else value


@ComplexPair.implements(
    *(aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default),
    *(aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default),
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.neg.default, aten.flip.default),
    *(aten.cumsum.default, aten.index_select.default, aten.repeat.default),
)
def alike(func, x, *args, **kwargs):
    if kwargs.get("dtype") is not None:
        return func(x.materialize(), *args, **kwargs)
    return ComplexPair(func(x.re, *args, **kwargs), func(x.im, *args, **kwargs))


@ComplexPair.implements(aten.as_strided.default)
def as_strided(func, x, size, stride, offset=None):
    """Remakes a view in torch.compile; `im` may start elsewhere than `re`."""
    start = x.re.storage_offset() if offset is None else offset
    shift = x.im.storage_offset() - x.re.storage_offset()
    return ComplexPair(func(x.re, size, stride, start), func(x.im, size, stride, start + shift))


@ComplexPair.implements(aten.cat.default, aten.stack.default)
def together(func, tensors, dim=0):
    if not all(t.is_complex() for t in tensors):
        return func([t.materialize() if isinstance(t, ComplexPair) else t for t in tensors], dim)
    return ComplexPair(func(split(tensors, 0), dim), func(split(tensors, 1), dim))


# ---------------------------------------------------------------------------------------------------------
# Arithmetic
# ---------------------------------------------------------------------------------------------------------


def pair(re: Any, im: Any) -> ComplexPair:
    """A pair of two results, which a real number may have left with different sizes."""
    re, im = torch.broadcast_tensors(re, torch.as_tensor(im, dtype=re.dtype, device=re.device))
    return ComplexPair(re.contiguous(), im.contiguous())


def is_arithmetic(x: Any, y: Any) -> bool:
    """Whether the parts of the result have the dtype that PyTorch's rules of promotion give."""
    tensors = [t for t in (x, y) if isinstance(t, Tensor)]
    real = {
        t.dtype if t.is_complex() else t.dtype.to_complex() if t.is_floating_point() else None
        for t in tensors
    }
    return len(real) == 1 and None not in real


def plain(*values: Any) -> list[Any]:
    return [v.materialize() if isinstance(v, ComplexPair) else v for v in values]


@ComplexPair.implements(aten.add.Tensor, aten.sub.Tensor)
def add(func, x, y, *, alpha=1):
    if not is_arithmetic(x, y) or isinstance(alpha, complex):
        return func(*plain(x, y), alpha=alpha)
    (a, b), (c, d) = parts(x), parts(y)
    sign = alpha if func is aten.add.Tensor else -alpha
    return pair(a + sign * c, b + sign * d)


@ComplexPair.implements(aten.mul.Tensor)
def mul(func, x, y):
    if not is_arithmetic(x, y):
        return func(*plain(x, y))
    (a, b), (c, d) = parts(x), parts(y)
    return pair(a * c - b * d, a * d + b * c)


@ComplexPair.implements(aten.mm.default, aten.bmm.default)
def matmul(func, x, y):
    (a, b), (c, d) = parts(x), parts(y)
    if not (isinstance(b, Tensor) and isinstance(d, Tensor)):
        return func(*plain(x, y))
    return ComplexPair(func(a, c) - func(b, d), func(a, d) + func(b, c))


@ComplexPair.implements(aten.exp.default)
def exp(func, x):
    size = func(x.re)
    return ComplexPair(size * x.im.cos(), size * x.im.sin())


@ComplexPair.implements(aten._softmax.default)
def softmax(func, x, dim, half_to_float):
    """Of which PyTorch has no complex kernel."""
    powers = exp(aten.exp.default, ComplexPair(x.re - x.re.amax(dim, keepdim=True), x.im)).materialize()
    return ComplexPair.from_complex(powers / powers.sum(dim, keepdim=True))


@ComplexPair.implements(aten.abs.default)
def absolute(func, x):
    return torch.hypot(x.re, x.im)


# ---------------------------------------------------------------------------------------------------------
# How much of PyTorch works
# ---------------------------------------------------------------------------------------------------------

Rejoin = Callable[[Any], Tensor]

# Ops with which PyTorch's own class fails, and their meaning for complex numbers.
KNOWN_TROUBLE: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "softmax": (lambda x: x.softmax(-1), lambda z: z.exp() / z.exp().sum(-1, keepdim=True)),
    "addr": (lambda x: torch.addr(x, x[:, 0], x[0]), lambda z: z + z[:, :1] * z[:1]),
    "inv": (lambda x: torch.linalg.inv(x), lambda z: torch.linalg.solve(z, torch.eye(len(z), dtype=z.dtype))),
}


def make() -> ComplexPair:
    return ComplexPair(torch.randn(4, 6), torch.randn(4, 6))


def rejoin_pair(x: Any) -> Tensor:
    return x.materialize() if isinstance(x, ComplexPair) else x


def pytorch_class() -> tuple[Callable[[Tensor], Tensor], Rejoin] | None:
    """How to make and to rejoin PyTorch's own complex tensor, which is private and not in every release."""
    try:
        cls = importlib.import_module("torch._subclasses.complex_tensor").ComplexTensor
    except (ImportError, AttributeError):
        return None

    def rejoin(x: Any) -> Tensor:
        return torch.complex(x.re, x.im) if isinstance(x, cls) and x.is_complex() else getattr(x, "re", x)

    return lambda z: cls(z.real.clone(), z.imag.clone()), rejoin


def count(wrap: Callable[[Tensor], Tensor], rejoin: Rejoin, ops: Collection[str] | str = "all") -> Verdicts:
    """How many of PyTorch's own list of ops, or of the named ones, are right, refused or wrong."""
    return sweep(lambda: wrap(torch.randn(4, 6, dtype=torch.complex64)), wrap=wrap, reference=rejoin, ops=ops)


def judge(name: str, wrap: Callable[[Tensor], Tensor], rejoin: Rejoin) -> str:
    """The same for one op of `KNOWN_TROUBLE`."""
    z, (run, meaning) = torch.randn(4, 4, dtype=torch.complex64), KNOWN_TROUBLE[name]
    try:
        right = torch.allclose(rejoin(run(wrap(z))), meaning(z), atol=1e-4)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        return f"raises {type(error).__name__}"
    return "right" if right else "wrong"


def main(ops: Collection[str] | str = "all") -> None:
    classes = {
        "ComplexPair": (ComplexPair.from_complex, rejoin_pair),
        "PyTorch's ComplexTensor": pytorch_class(),
    }
    for title, functions in classes.items():
        if functions is not None:
            verdicts = count(*functions, ops)
            trouble = ", ".join(f"{name} {judge(name, *functions)}" for name in KNOWN_TROUBLE)
            print(f"{title}: of {len(verdicts)} op entries {verdicts}; {trouble}")
    report = examine(make)
    broken = f"breaks {', '.join(report.broken)}" if report.broken else "breaks none"
    print(f"ComplexPair keeps {len(report.of('kept'))} promises of the conformance kit, {broken}")


if __name__ == "__main__":
    main()
