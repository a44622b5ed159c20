"""The tensor subclasses for the tests of desugar: three written by hand, six declared.

Both groups have a plain pair, a class with constant metadata, and a class whose outer size differs from its inner
sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from subclasses import Outer, TensorSubclass, arithmetic, dynamic, inner, static
from tests.subclasses.subjects import Int8Weight as Int8Like, Nested, Pair

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------ written by hand


def _map_inner(cls: Any, func: Any, args: Any, kwargs: Any, build: Any) -> Any:
    """The op once per inner tensor of the first wrapper, every wrapper replaced by its inner of that name."""
    (first, *_) = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
    picks = [
        lambda leaf, name=name: getattr(leaf, name) if isinstance(leaf, cls) else leaf
        for name in first.__tensor_flatten__()[0]
    ]
    outs = [func(*tree_map(pick, args), **tree_map(pick, kwargs)) for pick in picks]
    return tree_map(lambda *parts: build(*parts) if isinstance(parts[0], Tensor) else parts[0], *outs)


class Tagged(Tensor):
    """Written by hand: a pair with constant metadata, a tag that operands must share."""

    data_: Tensor
    extra: Tensor
    tag: str

    @staticmethod
    def __new__(cls, data_, extra, tag="plain"):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data_.size(),
            strides=data_.stride(),
            storage_offset=data_.storage_offset(),
            dtype=data_.dtype,
            device=data_.device,
        )

    def __init__(self, data_, extra, tag="plain"):
        self.data_, self.extra, self.tag = data_, extra, tag

    def __repr__(self):
        return f"Tagged({self.data_!r}, {self.extra!r}, {self.tag!r})"

    def __tensor_flatten__(self):
        return ["data_", "extra"], {"tag": self.tag}

    @staticmethod
    def __tensor_unflatten__(inner_tensors, context, outer_size, outer_stride):
        return Tagged(inner_tensors["data_"], inner_tensors["extra"], context["tag"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tags = {leaf.tag for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tagged)}
        if len(tags) > 1:
            raise ValueError(f"operands with different tags: {sorted(tags)}")
        tag = next(iter(tags))
        out = _map_inner(cls, func, args, kwargs, lambda a, b: Tagged(a, b, tag))
        return return_and_correct_aliasing(func, args, kwargs, out)


_EACH_HALF = [
    *(aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default),
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.copy_.default),
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default),
    *(aten.sin.default, aten.cos.default, aten.tanh.default, aten.exp.default, aten.tanh_backward.default),
    *(aten.mul_.Tensor, aten.add_.Tensor, aten.sin_.default, aten.zero_.default, aten.fill_.Scalar),
    *(aten.bernoulli_.float, aten.div_.Scalar, aten.div_.Tensor),
]


def _half(of: Any, name: str, leaf: Any) -> Any:
    """The left or the right half of a value of the class, or of a plain tensor as wide as `of`."""
    if isinstance(leaf, Halves | Beside):
        return getattr(leaf, name)
    width, total = of.left.shape[-1], of.shape[-1]
    if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[-1] == total:
        return leaf.narrow(-1, *((0, width) if name == "left" else (width, total - width)))
    return leaf


class Halves(Tensor):
    """Written by hand: `left` and `right` beside one another along the last dim, so the outer size is neither's.

    Some pointwise ops work on each half; for any other op the halves are joined and the result is plain.
    """

    left: Tensor
    right: Tensor

    @staticmethod
    def __new__(cls, left, right):
        size = (*left.shape[:-1], left.shape[-1] + right.shape[-1])
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=left.dtype, device=left.device)

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __repr__(self):
        return f"Halves({self.left!r}, {self.right!r})"

    def __tensor_flatten__(self):
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors, context, outer_size, outer_stride):
        return Halves(inner_tensors["left"], inner_tensors["right"])

    def joined(self):
        return torch.cat([self.left, self.right], -1)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        parts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Halves)]
        written = func._schema.is_mutable and isinstance(args[0], Halves)
        if func not in _EACH_HALF or (func._schema.is_mutable and not written):
            if written:
                raise NotImplementedError(f"{func} would write to Halves")
            args, kwargs = tree_map(lambda x: x.joined() if isinstance(x, Halves) else x, (args, kwargs))
            return func(*args, **kwargs)
        if any(part.left.shape[-1] != parts[0].left.shape[-1] for part in parts):
            raise ValueError("halves of different widths")
        picks = [functools.partial(_half, parts[0], name) for name in ("left", "right")]
        outs = [func(*tree_map(pick, args), **tree_map(pick, kwargs)) for pick in picks]
        return return_and_correct_aliasing(func, args, kwargs, Halves(*outs))


class Single(Tensor):
    """Written by hand: one inner tensor, on which each op runs. The tests derive classes with one oddity each."""

    a: Tensor
    options: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def __new__(cls, a):
        options = {"dtype": a.dtype, "strides": a.stride(), "device": a.device} | cls.options
        return torch.Tensor._make_wrapper_subclass(cls, a.size(), **options)

    def __init__(self, a):
        self.a = a

    def __tensor_flatten__(self):
        return ["a"], None

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, context, outer_size, outer_stride):
        return cls(inner_tensors["a"])

    def plain(self):
        """The tensor that ops run on."""
        return self.a

    @classmethod
    def wrap(cls, out):
        """The result for a result of an op."""
        return cls(out) if isinstance(out, Tensor) else out

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.plain() if isinstance(x, Single) else x, (args, kwargs or {}))
        return cls.wrap(func(*args, **kwargs))


# ------------------------------------------------------------------------------------------------- declared


class Labeled(TensorSubclass, fallback="map"):
    """Static and dynamic metadata, and an optional inner tensor."""

    data_: Tensor = inner()
    extra: Tensor | None = inner(optional=True)
    label: str = static(default="none")
    count: int = dynamic(default=2)


class Beside(TensorSubclass, fallback="materialize", kind="structure"):
    """`Halves`, declared: pointwise ops on each half where the operands allow it, else on the joined tensor."""

    left: Tensor = inner()
    right: Tensor = inner()

    @staticmethod
    def outer(left, right):
        return Outer((*left.shape[:-1], left.shape[-1] + right.shape[-1]))

    def materialize(self):
        return torch.cat([self.left, self.right], -1)


@Beside.implements(aten.sin.default, aten.cos.default, aten.neg.default, aten.tanh.default)
def _unary(func, x):
    return Beside(func(x.left), func(x.right))


@Beside.implements(aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor)
def _binary(func, x, y, **kwargs):
    of = x if isinstance(x, Beside) else y
    return Beside(*(func(_half(of, n, x), _half(of, n, y), **kwargs) for n in ("left", "right")))


class Tripled(TensorSubclass, fallback="materialize", kind="structure"):
    """Results of `+` and `*` are of the class, and all other ops make plain gradients of them."""

    third: Tensor = inner()

    def materialize(self):
        return self.third * 3


@Tripled.implements(arithmetic)
def _third(func, x, y):
    if func in (torch.add, torch.sub):
        return Tripled(func(*(t.third if isinstance(t, Tripled) else t / 3 for t in (x, y))))
    return Tripled(func(*(t.third if isinstance(t, Tripled) else t for t in (x, y))))


HAND_WRITTEN = (TwoTensor, Tagged, Halves)
DECLARED = (Pair, Labeled, Beside, Nested)
EVERY = (*HAND_WRITTEN, *DECLARED)

# ---------------------------------------------------------------------------------------- autograd functions


def autograd_function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an `autograd.Function` and returns its `apply`."""
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Function", (torch.autograd.Function,), members).apply  # type: ignore[attr-defined]


def saving(ctx: Any, x: Tensor, out: Tensor) -> Tensor:
    """Saves a tensor for the backward, and returns another."""
    ctx.save_for_backward(x)
    return out


# ------------------------------------------------------------------------------------------------ factories


# By class how a wrapper of an outer size is made of random tensors; of the others, every inner tensor has that size.
_MAKERS: dict[type, Callable[..., Any]] = {
    Tensor: lambda rand, *size: rand(*size),
    Tagged: lambda rand, *size: Tagged(rand(*size), rand(*size), "left"),
    Labeled: lambda rand, *size: Labeled(rand(*size), rand(*size), label="x", count=3),
    Nested: lambda rand, *size: Nested(Pair(rand(*size), rand(*size)), rand(*size)),
    Int8Like: lambda rand, *size: Int8Like(
        torch.randint(-8, 8, size, dtype=torch.int8), rand(size[0], 1).abs() + 0.5
    ),
}


def make(cls: type, *size: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A wrapper of outer size `size` with random content."""

    def rand(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype)

    if cls in (Halves, Beside):
        *rows, columns = size
        made = cls(rand(*rows, columns // 3), rand(*rows, columns - columns // 3))
    else:
        made = _MAKERS.get(cls, lambda rand, *size: cls(rand(*size), rand(*size)))(rand, *size)
    return made.requires_grad_() if grad else made


def rebuilt(x: Any) -> Any:
    """Another wrapper around the same inner tensors."""
    names, context = x.__tensor_flatten__()
    return type(x).__tensor_unflatten__(
        {name: getattr(x, name) for name in names}, context, x.size(), x.stride()
    )


def inner_names(x: Any) -> list[str]:
    """Names of the inner tensors that are there; empty for a plain tensor."""
    if isinstance(x, TensorSubclass):
        return list(x._layout.present)  # flatten has the carriers of dynamic ints besides
    return list(x.__tensor_flatten__()[0]) if hasattr(type(x), "__tensor_flatten__") else []


def plain_parts(x: Tensor) -> list[Tensor]:
    """The plain tensors inside, in flatten order."""
    names = inner_names(x)
    if not names:
        return [x]
    return [part for name in names for part in plain_parts(getattr(x, name))]


def metadata(x: Any) -> Any:
    """Type and metadata, nested, without the tensors."""
    names = inner_names(x)
    context = x.__tensor_flatten__()[1] if names else None
    dynamics = (
        [getattr(x, field.name) for field in x.__spec__.dynamics] if isinstance(x, TensorSubclass) else []
    )
    return type(x), context, dynamics, tuple((name, metadata(getattr(x, name))) for name in names)


def targets(graph: torch.fx.GraphModule) -> list[Any]:
    """The functions that a graph calls."""
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]
