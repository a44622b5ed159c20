"""Rules of both layouts for what is done to each element by itself: pointwise ops, copies, and comparing as a whole.

They run below autograd on what is stored, so that each is one node in the autograd graph as for plain tensors. Two
things must be settled above it, since a cotangent comes back as the result is: operands whose rows lie elsewhere, and
a dense operand with a value for each entry.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subclasses.autograd.python_functions import tagged_functions
from subclasses.errors import DispatchError

aten = torch.ops.aten

# ---- which ops -------------------------------------------------------------------------------------------------

# Pointwise all the same, and without the tag.
UNTAGGED = (
    aten._prelu_kernel,
    aten._prelu_kernel_backward,
    aten.complex,
    aten.elu_backward,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.floor_divide,
    aten.hardshrink_backward,
    aten.hardsigmoid_backward,
    aten.hardswish,
    aten.hardswish_backward,
    aten.hardtanh_backward,
    aten.leaky_relu_backward,
    aten.log_sigmoid_backward,
    aten.log_sigmoid_forward,
    aten.masked_fill.Tensor,
    aten.polar,
    aten.rrelu_with_noise_backward,
    aten.rsub.Scalar,
    aten.rsub.Tensor,
    aten.softplus_backward,
    aten.softshrink_backward,
    aten.zero.default,
)

# `max` and `min` of two tensors are pointwise, as is `rrelu`, and `equal` has the tag; their rules stand elsewhere.
ELSEWHERE = ("equal", "max", "min", "rrelu")
FUNCTIONS = [f for f in tagged_functions(torch.Tag.pointwise) if f.__name__ not in ELSEWHERE]
FUNCTIONS += [torch.floor_divide, torch.Tensor.floor_divide, torch.complex, torch.polar]
FUNCTIONS += [torch.where, torch.Tensor.where, torch.Tensor.copy_]
FUNCTIONS = list(dict.fromkeys(FUNCTIONS))

LIKENESSES = (
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten._to_copy.default,
)


# Random numbers that are written over what is there.
DRAWN = (
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
    aten.uniform_.default,
)


class Operands(NamedTuple):
    """How a layout stores elements, and what may stand beside them.

    Attributes:
        first: ``(values)``: the value among operands whose rows count.
        wrap: ``(x, stored)``: other elements for the same rows.
        beside: ``(op, x, a)``: a tensor as it stands beside what ``x`` stores; below autograd.
        aligned: ``(func, x, a)``: a tensor such that a cotangent comes back to it as what it is; above autograd.
        moved: ``(x, stored)``: elements on another device, with the rows brought there.
        write: ``(op, x, new, non_blocking)``: writes other elements for what exists; below autograd.
        check_writable: ``(func, x, *operands)``: raises where autograd could not record a write; above it.
        shown: a value in the words of an error.
    """

    first: Callable[[Any], Any]
    wrap: Callable[[Any, Tensor], Any]
    beside: Callable[[Any, Any, Tensor], Tensor]
    aligned: Callable[[Any, Any, Tensor], Tensor]
    moved: Callable[[Any, Tensor], Any]
    write: Callable[[Any, Any, Tensor, bool], None]
    check_writable: Callable[..., None]
    shown: Callable[[Any], str]


# ---- pointwise -------------------------------------------------------------------------------------------------


def implement_pointwise(cls: Any, ways: Operands) -> None:
    """The rules of pointwise ops, below autograd and above it."""
    first, wrap, beside, aligned, _, _, check_writable, shown = ways
    stored = attrgetter(cls.__spec__.size_from)

    def operand(op: Any, x: Any, a: Any) -> Any:
        if a is x:
            return stored(x)
        return beside(op, x, a) if isinstance(a, Tensor) else a

    @cls.implements(torch.Tag.pointwise, *UNTAGGED)
    def _(op: Any, *args: Any, **kwargs: Any) -> Any:
        x = first((*args, *kwargs.values()))
        given = {k: operand(op, x, a) for k, a in kwargs.items()} if kwargs else kwargs
        result = op(*[operand(op, x, a) for a in args], **given)
        return tuple(wrap(x, part) for part in result) if isinstance(result, tuple) else wrap(x, result)

    def settled(func: Any, x: Any, a: Any) -> Any:
        return aligned(func, x, a) if isinstance(a, Tensor) and a is not x else a

    @cls.implements(*FUNCTIONS)
    def _(func: Any, *args: Any, **kwargs: Any) -> Any:
        """Brings operands to the rows of the first ragged one; then the op as if without a rule."""
        if len(args) + len(kwargs) == 1:
            return cls.unruled(func, *args, **kwargs)
        x = first((*args, *kwargs.values()))
        if args and func.__name__.endswith("_"):
            if not isinstance(args[0], cls):
                raise DispatchError(
                    f"{func.__name__}: cannot write {shown(x)} into {shown(args[0])}; use to_dense()"
                )
            check_writable(func, *args)
        given = {k: settled(func, x, a) for k, a in kwargs.items()} if kwargs else kwargs
        return cls.unruled(func, *[settled(func, x, a) for a in args], **given)


# ---- copies ----------------------------------------------------------------------------------------------------


def implement_copies(cls: Any, ways: Operands) -> None:
    """The rules of copies and aliases: what is stored is copied, what says where the rows lie is shared.

    That is never written to, so a copy keeps the very same tensors, and ops on a value and its copy know that their
    rows match.
    """
    stored = attrgetter(cls.__spec__.size_from)

    @cls.implements(*LIKENESSES)
    def _(op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        inner = stored(x)
        if (
            kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d)
            and inner.dim() != x.dim()
        ):
            kwargs["memory_format"] = torch.preserve_format  # one that depends on the rank means nothing here
        result = op(inner, *args, **kwargs)
        return ways.wrap(x, result) if result.device == x.device else ways.moved(x, result)

    @cls.implements(aten.new_empty_strided.default)
    def _(op: Any, x: Any, size: Any, stride: Any, **kwargs: Any) -> Any:
        """Autograd asks for one like another, to write a cotangent to; any other size is that of a dense tensor."""
        if tuple(size) == tuple(x.shape):
            return ways.wrap(x, torch.empty_like(stored(x), **kwargs))
        return op(stored(x), size, stride, **kwargs)

    @cls.implements(
        aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default
    )
    def _(op: Any, x: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        """Dense tensors of the same dtype and device; `zeros_like` and the like give ragged ones."""
        return op(stored(x), size, *args, **kwargs)

    @cls.implements(aten.copy_.default)
    def _(op: Any, x: Any, source: Any, non_blocking: bool = False) -> Any:
        if not isinstance(x, cls):
            raise DispatchError(
                f"{op}: cannot write {ways.shown(source)} into a dense tensor; use to_dense()"
            )
        ways.write(op, x, ways.beside(op, x, source), non_blocking)
        return x

    @cls.implements(*DRAWN)
    def _(op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        ways.write(op, x, op(torch.empty_like(stored(x)), *args, **kwargs), False)
        return x

    @cls.implements(aten.size.default, aten.stride.default)
    def _(op: Any, x: Any) -> Any:
        """Autograd asks in this way where sizes are symbols, for a cotangent of zeros."""
        return list(x.size() if op is aten.size.default else x.stride())


# ---- comparing -------------------------------------------------------------------------------------------------


def implement_equal(cls: Any, ways: Operands) -> None:
    """The rule of ``torch.equal``: whether the rows are; where shapes or lengths differ they are not."""
    statics = [field.name for field in cls.__spec__.statics]

    @cls.implements(torch.equal)
    def _(func: Any, input: Any, other: Any) -> bool:
        for t in (input, other):
            if not isinstance(t, cls):
                raise DispatchError(f"{func.__name__}: expected two {cls.__name__}s, got {ways.shown(t)}")
        if input.shape != other.shape or any(getattr(input, n) != getattr(other, n) for n in statics):
            return False
        return torch.equal(input.row_lengths(), other.row_lengths()) and bool((input == other).all())
