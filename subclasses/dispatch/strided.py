"""``as_strided`` on a wrapper, with which ``torch.compile`` recreates views of its arguments.

Size, stride and storage offset describe the outer tensor. They select the same elements of an inner tensor with the
outer size and stride. The offset is then relative to the inner tensor's storage offset.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload, is_tracing, storage_key
from subclasses._torch_tracing import unseen
from subclasses.autograd.calling import CALLING
from subclasses.errors import DispatchError, one_of, way_out
from subclasses.op_schemas.aliasing import with_aliasing
from subclasses.op_schemas.schema import op_facts
from subclasses.rules.registry import all_rules, find_op_rule
from subclasses.spec.shapes import is_dense, tells_strides
from subclasses.spec.values import (
    innermost,
    known_to_differ,
    lies_within,
    memory_of,
    with_inners,
)

aten = torch.ops.aten

STRIDED_OPS = frozenset({aten.as_strided.default, aten.as_strided_copy.default})


def map_strided(cls: Any, op: OpOverload) -> Callable[..., Any]:
    """Returns the callable of ``as_strided`` for the ``"map"`` fallback.

    Raises:
        DispatchError: from the callable, if an inner tensor has another size or stride than the outer tensor.
    """
    spec = cls.__spec__

    def run(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        if list(size) == list(x.shape) and list(stride) == list(x.stride()):
            check_distinguishable(x)
        results = []
        for name in spec.attributes:
            t = x.__dict__[name]
            if t is not None:
                entries, sizes, strides = _further_dims(x, t)
                if not entries:
                    raise _strides_error(op, x, name, t)
                start = None
                if storage_offset is not None:
                    start = t.storage_offset() + entries * (storage_offset - x.storage_offset())
                t = op(t, [*size, *sizes], [*(entries * s for s in stride), *strides], start)
            results.append(t)
        return with_inners(x, results)

    return with_aliasing(op, run)


def _further_dims(x: Any, t: Any) -> tuple[int, Sequence[Any], Sequence[Any]]:
    """Returns how many entries of an inner tensor belong to one entry of the value, and their sizes and strides.

    The first is 0 if the strides of the value do not determine their place in memory.
    """
    count = x.dim()
    sizes, strides = t.shape[count:], t.stride()[count:]
    entries = math.prod(sizes)
    is_distinguished = t.shape[:count] == x.shape and t.stride()[:count] == tuple(
        [entries * s for s in x.stride()]
    )
    is_distinguished = is_distinguished and is_dense(sizes, strides) and (not sizes or tells_strides(type(x)))
    return entries if is_distinguished else 0, sizes, strides


def _strides_error(op: OpOverload, x: Any, name: str, t: Any) -> DispatchError:
    return DispatchError(
        f"{op} on a {type(x).__name__} of size {tuple(x.shape)} and stride {x.stride()}, whose inner tensor {name!r} "
        f"has size {tuple(t.shape)} and stride {t.stride()}: the same strides mean other elements there",
        code="strided-view",
        hint=strided_advice(type(x), op),
    )


def check_strided_copy(cls: Any, op: OpOverload) -> None:
    """Raises DispatchError if materializing ``as_strided`` would turn a view by a rule of the class into a copy."""
    viewing = [key for key, _ in all_rules(cls) if isinstance(key, OpOverload) and op_facts(key).viewed]
    if op in STRIDED_OPS and viewing:
        raise DispatchError(
            f"{cls.__name__} has a rule for {viewing[0]}, and none for {op}, with which torch.compile remakes views of "
            "its arguments",
            code="strided-view",
            hint=strided_advice(cls, op),
        )


def check_distinguishable(x: Any) -> None:
    """Raises DispatchError for a value in its own geometry if a view by a rule of its class may have the same geometry.

    A transpose of a square value has the value's size, and its strides if ``outer`` gives none. ``as_strided`` has the
    same arguments for the value and for the transpose.
    """
    cls = type(x)
    for op in _PERMUTING:
        # Sizes are compared for such a rule alone, since a trace guards on each comparison.
        for i, j in _equal_dims(x) if find_op_rule(cls, op) is not None else ():
            out = _swapped(op, x, i, j)
            if isinstance(out, cls) and _geometry(out) == _geometry(x) and _inners_of(out) != _inners_of(x):
                raise DispatchError(
                    f"{aten.as_strided.default} on {one_of(cls)} of size {tuple(x.shape)} and stride {x.stride()}, "
                    f"with which torch.compile remakes views of its arguments: the result of the rule for {op} has "
                    "the size and stride of the value, so as_strided cannot distinguish them",
                    code="strided-view",
                    hint=f"let {cls.__name__}.outer give the strides of a view, as Outer(size, stride=...), or "
                    f"{strided_advice(cls, aten.as_strided.default)}",
                )


_PERMUTING = (aten.t.default, aten.transpose.int, aten.permute.default)


def _equal_dims(x: Tensor) -> list[tuple[int, int]]:
    pairs = itertools.combinations(range(x.dim()), 2)
    return [(i, j) for i, j in pairs if x.shape[i] == x.shape[j] and x.shape[i] != 1]


def _swapped(op: OpOverload, x: Any, i: int, j: int) -> Any:
    """Returns a rule's result for a swap of two dims."""
    if op is aten.t.default:
        return op(x) if x.dim() == 2 else None
    if op is aten.transpose.int:
        return op(x, i, j)
    return op(x, [j if d == i else i if d == j else d for d in range(x.dim())])


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.storage_offset()


def _inners_of(x: Any) -> tuple[Any, ...]:
    """Returns the layout, memory and geometry that differ between a value and another view of its inner tensors."""
    return x._layout, [(storage_key(t), _geometry(t)) for t in innermost(x)]


def strided_advice(cls: Any, op: OpOverload) -> str:
    """Returns a hint for a view that ``torch.compile`` recreates."""
    name = cls.__name__
    rule = (
        f"add a rule with @{name}.implements(torch.ops.{op}). The rule gets the size, stride and "
        f"storage offset that {name}.outer returns for the view, so `outer` must return them for views. The view of an "
        f"inner tensor t of that size is func(t, size, stride, offset - x.storage_offset() + t.storage_offset())"
    )
    return (
        f"return such a view from no function that torch.compile compiles, or compile it with desugar.compile, which "
        f"replays views; or {way_out(cls, rule)}"
    )


def with_checked_views(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a view by a rule: it must share the memory of its operand if ``x[index] = value`` writes to it.

    Raises:
        DispatchError: from the callable, if it has memory of its own, to which the write would go and be lost.
    """

    def wrapped(x: Any, *args: Any, **kwargs: Any) -> Any:
        out = run(x, *args, **kwargs)
        target = CALLING.target
        if target is None or not isinstance(out, Tensor) or memory_of(target).isdisjoint(memory_of(x)):
            return out
        if not lies_within(out, x):
            result = "a plain tensor" if type(out) is Tensor else one_of(type(out))
            raise DispatchError(
                f"x[...] = value on {one_of(cls)}: the rule for {op} returned {result} with memory of its own, in "
                "place of a view, and a write to it would be lost",
                code="rule-write",
                hint=f"let it return a {cls.__name__} that holds views of the inner tensors, or use a functional op "
                "such as torch.where",
            )
        return out

    return wrapped


def with_checked_strides(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a view by a rule of a class with a rule for ``as_strided``: in a trace, its stride and offset are checked.

    Raises:
        DispatchError: from the callable, if they are not a view's, so that the rule for ``as_strided`` would make
            another.
    """
    if find_op_rule(cls, aten.as_strided.default) is None or op is aten.as_strided.default:
        return run
    first = cls.__spec__.attributes[0]

    def wrapped(x: Any, *args: Any, **kwargs: Any) -> Any:
        out = run(x, *args, **kwargs)
        # The inner tensors of a value in a trace are not plain.
        is_value = isinstance(x, cls) and isinstance(out, cls)
        if is_value and x.__dict__[first].__class__ is not Tensor and is_tracing():
            # A rule on open values runs above autograd, where a trace sees each function.
            with unseen():
                like = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
                _check_strides(cls, op, x, out, op(like, *args, **kwargs))
        return out

    return wrapped


def _check_strides(cls: Any, op: OpOverload, x: Tensor, out: Tensor, view: Tensor) -> None:
    given, expected = _strides(out, x.storage_offset()), _strides(view, 0)
    if not known_to_differ(out.shape, view.shape) and known_to_differ(given, expected):
        raise DispatchError(
            f"{op} on {one_of(cls)} of size {tuple(x.shape)}: the rule's result has stride {out.stride()} and offset "
            f"{given[-1]}, and the view has stride {view.stride()} and offset {expected[-1]}. torch.compile remakes "
            "views by these with the rule for as_strided",
            code="strided-view",
            hint=f"let {cls.__name__}.outer give them, as Outer(size, stride=..., storage_offset=...)",
        )


def _strides(t: Tensor, offset: Any) -> list[Any]:
    """The strides of a tensor and its storage offset behind another one; a dim of one entry has any stride."""
    strides = [
        0 if type(size) is int and size == 1 else n for size, n in zip(t.shape, t.stride(), strict=True)
    ]
    return [*strides, t.storage_offset() - offset]
