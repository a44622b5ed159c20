"""The ``"views"`` fallback: which ops map over the inner tensors because they compute nothing.

A view, a copy, a conversion or a factory selects, moves or allocates elements. The schema of an op tells which of these
it is. Every other op computes values; what it means for a class is not known, and the op raises :class:`DispatchError`.

A view names dims and indices of the outer tensor. They mean the same elements of an inner tensor only if that tensor
has the outer size. A view of a value with another inner tensor, such as a scale of size ``[out, 1]``, needs a rule.

Under ``"map"`` every op maps; :func:`with_outer_dims` says which dims of an inner tensor with further ones are named.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload, canonicalize_dim, set_storage_of
from subclasses.dispatch.map_plan import further_dims_error, other_size_error, outer_dims_error
from subclasses.dispatch.per_inner import inner_of
from subclasses.dispatch.strided import STRIDED_OPS, strided_advice
from subclasses.errors import DispatchError, one_of
from subclasses.ops.aliasing import argument
from subclasses.ops.schema import functional_counterpart_of_view, op_facts
from subclasses.spec.collect import SubclassSpec
from subclasses.spec.values import (
    expands,
    fits_by_ones,
    has_one_size,
    known_to_differ,
    may_differ,
    tensors_in,
    with_inners,
)

aten = torch.ops.aten

# ---- which ops map -----------------------------------------------------------------------------------------

# Views by their schema that interpret the elements anew, or that are views of other layouts than the strided one.
_REINTERPRETING = frozenset(
    """_conj _neg_view _sparse_broadcast_to _indices _nested_get_values _nested_view_from_buffer
    _nested_view_from_jagged _values ccol_indices coalesce col_indices crow_indices indices row_indices values
    view_as_complex view_as_real""".split()
)
# Copies of views without the tag, which torch itself calls in place of views.
_UNTAGGED_COPIES = frozenset({"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"})
# The offset of as_strided_ counts in the storage of the outer tensor, and it has no plan of its own.
_UNMAPPED = frozenset({aten.as_strided_.default})

# The arguments of a factory beside the size and the fill value.
_FACTORY_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})
# Factories that leave the elements undefined. Any other factory fills the elements.
_NOT_FILLING = frozenset({"new_empty", "new_empty_strided"})
# Conversions that preserve the structure of a value; here come those to a dtype that the class cannot change to.
_CONVERSIONS = frozenset({"_to_copy", "empty_like"})


def maps_as_view(spec: SubclassSpec, op: OpOverload) -> bool:
    """Whether an op without a rule maps over the inner tensors of a class with ``fallback="views"``.

    A factory that fills its result (``zeros_like``, ``new_full``) maps only if the class has no ``materialize``: with
    it the value is known, and inner tensors of zeros are in general not a value of zeros.
    """
    if is_factory(op):
        if _name(op) in _CONVERSIONS:
            return False
        return _name(op) in _NOT_FILLING or not spec.has_materialize
    return is_view(op)


# What selects and joins elements along dims, beside views.
_ALONG_DIMS = frozenset(
    {
        *(aten.cat.default, aten.stack.default, aten.index_select.default, aten.index.Tensor),
        *(aten.flip.default, aten.roll.default, aten.repeat.default, aten.as_strided.default),
    }
)


def maps_leading_dims(spec: SubclassSpec, op: OpOverload) -> bool:
    """Whether an op maps over the inner tensors of a class that declares leading dims, as ``shape="... 4"``."""
    return spec.leads and (op in _ALONG_DIMS or maps_as_view(spec, op))


def joining_parts(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the plan of an op that joins cotangents: a part without a gradient arrives as plain zeros."""
    if op not in (aten.cat.default, aten.stack.default) or not cls._is_cotangent:
        return run

    def plan(parts: Any, *args: Any, **kwargs: Any) -> Any:
        like = next(t for t in parts if isinstance(t, cls))
        return run(
            [t if isinstance(t, cls) else _with_further_dims_of(like, t) for t in parts], *args, **kwargs
        )

    return plan


def _with_further_dims_of(x: Any, plain: Tensor) -> Any:
    """Returns a plain tensor as a value like another one: each inner tensor holds it, along its further dims."""
    held, inners = x.__dict__, []
    for name in type(x).__spec__.attributes:
        further = () if held[name] is None else held[name].shape[x.dim() :]
        t = plain.reshape([*plain.shape, *(1 for _ in further)]).expand([*plain.shape, *further])
        inners.append(None if held[name] is None else t)
    return with_inners(x, inners)


def is_view(op: OpOverload) -> bool:
    """Whether an op takes a view, copies one, turns its argument into one, or is the derivative of one."""
    if op in _UNMAPPED:
        return False
    if torch.Tag.inplace_view in op.tags:
        viewing = functional_counterpart_of_view(op)
        return viewing is not None and is_view(viewing)
    facts, name = op_facts(op), _name(op)
    if sum(a.kind != "other" and not a.written for a in facts.arguments) != 1:
        return False
    if torch.Tag.view_copy in op.tags:
        return _keeps_elements(name.removesuffix("_copy"), op)
    if facts.written:
        return False
    if facts.viewed:
        return _keeps_elements(name, op)
    return name in _UNTAGGED_COPIES or _is_derivative_of_view(name)


def _keeps_elements(name: str, op: OpOverload) -> bool:
    # view.dtype reinterprets the bytes, whichever class it is called on.
    return name not in _REINTERPRETING and not any(a.name == "dtype" for a in op_facts(op).arguments)


def _is_derivative_of_view(name: str) -> bool:
    """Whether a name is that of a derivative which puts a gradient at its place among zeros: ``slice_backward``."""
    if not name.endswith("_backward"):
        return False
    packet = getattr(aten, name.removesuffix("_backward"), None)
    return packet is not None and any(op_facts(getattr(packet, o)).viewed for o in packet.overloads())


def is_factory(op: OpOverload) -> bool:
    """Whether an op makes a tensor like its only tensor argument, with a dtype, a device and a layout to choose."""
    facts = op_facts(op)
    tensors = [a.name for a in facts.arguments if a.kind != "other"]
    return tensors == ["self"] and not facts.viewed and {a.name for a in facts.arguments} >= _FACTORY_OPTIONS


def _name(op: OpOverload) -> str:
    return op.overloadpacket.__name__


# ---- checks of sizes ---------------------------------------------------------------------------------------


def with_equal_sizes(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the plan of a mapped op that names dims or sizes of the outer tensor.

    Raises:
        DispatchError: from the plan, if an inner tensor has another size than the outer tensor, or the outer size of
            the result is not that of its inner tensors.
    """
    facts = op_facts(op)
    if is_factory(op) and not any(a.name == "size" for a in facts.arguments):
        return run
    (index,) = (i for i, a in enumerate(facts.arguments) if a.kind == "tensor" and not a.keyword)

    def plan(*args: Any, **kwargs: Any) -> Any:
        x = argument(facts, args, kwargs, index)
        _check_sizes(op, x, "argument")
        out = run(*args, **kwargs)
        if cls.__spec__.has_outer:
            for result in out if isinstance(out, list | tuple) else (out,):
                _check_sizes(op, result, "result")
        return out

    return plan


def _check_sizes(op: OpOverload, x: Tensor, which: str) -> None:
    cls: Any = type(x)
    for field in cls.__spec__.inners:
        t = x.__dict__[field.attribute]
        if t is not None and t.shape != x.shape:
            if op in STRIDED_OPS:
                raise DispatchError(
                    f"{op}, with which torch.compile remakes views of its arguments, on {one_of(cls)} of size "
                    f"{tuple(x.shape)}, whose inner tensor {field.name!r} has size {tuple(t.shape)}; "
                    f"{strided_advice(cls, op)}"
                )
            raise DispatchError(
                f"{op}: the {which} is {one_of(cls)} of size {tuple(x.shape)}, and its inner tensor {field.name!r} "
                f'has size {tuple(t.shape)}. fallback="views" maps an op that names dims or sizes only over inner '
                f"tensors of the outer size, since the same dims mean other elements there; where a rule that "
                f"broadcasts made the value, let it broadcast {field.name!r} too; else say what the result has in a "
                f"rule: @{cls.__name__}.implements(torch.ops.{op})"
            )


def or_whole(run: Callable[..., Any], make_alias: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Wraps the plan of a slice: of a whole dimension, it is the value itself.

    PyTorch asks for no such slice where it knows the size, as in ``x[:, 1]``, and asks for it where that is a symbol.

    Raises:
        DispatchError: from the plan, if an inner tensor that is shorter than the value has fewer of the elements.
    """
    alias = functools.cache(make_alias)

    def plan(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
        is_whole = _is_default(start, 0) and _is_default(end, sys.maxsize) and _is_default(step, 1)
        if is_whole:
            return alias()(x)
        out = run(x, dim, start, end, step)
        _check_not_cut(x, out, dim)
        return out

    return plan


def _check_not_cut(x: Any, out: Any, dim: int) -> None:
    cls = type(x)
    for field in cls.__spec__.inners if type(out) is cls else ():  # not what was materialized
        t, part = x.__dict__[field.attribute], out.__dict__[field.attribute]
        if t is None or part is None or t.dim() != x.dim() or type(out.shape[dim]) is not int:
            continue
        if (
            known_to_differ(t.shape[dim : dim + 1], x.shape[dim : dim + 1])
            and part.shape[dim] < out.shape[dim]
        ):
            raise DispatchError(
                f"aten.slice on {one_of(cls)} of size {tuple(x.shape)}, mapped over its inner tensors, of which "
                f"{field.name!r} of size {tuple(t.shape)} has fewer of these elements along dim {dim}; write a rule: "
                f"@{cls.__name__}.implements(torch.ops.aten.slice)"
            )


def or_same(run: Callable[..., Any], make_alias: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Wraps the plan of ``view``: of its own size, a value is itself.

    So an autograd function returns an argument, such as the one that calls the backward hooks of a module.
    """
    alias = functools.cache(make_alias)

    def plan(x: Any, size: Any) -> Any:
        is_same = len(size) == x.dim() and not any(map(may_differ, size, x.shape))
        return alias()(x) if is_same else run(x, size)

    return plan


# Ops that may be asked for a value as it is.
WHOLE = {aten.slice.Tensor: or_whole, aten.view.default: or_same}


def _is_default(given: Any, number: int) -> bool:
    return given is None or (type(given) is int and given == number)


# ---- dims --------------------------------------------------------------------------------------------------

_DIMS = frozenset(
    {"dim", "dimension", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "source", "destination"}
)
_SIZES = frozenset({"size", "input_sizes", "repeats"})
_ADDING_A_DIM = frozenset({aten.unsqueeze.default, aten.unsqueeze_.default, aten.stack.default})
# The last two dims, which their arguments do not name.
_OF_LAST_DIMS = frozenset({aten.tril.default, aten.triu.default, aten.tril_.default, aten.triu_.default})
# Their result has a dim more, the last one.
_APPENDING = frozenset(
    {aten.diagonal.default, aten.diagonal_copy.default, aten.unfold.default, aten.unfold_copy.default}
)


def with_outer_dims(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the plan of a mapped op: where an inner tensor has further dims, those of the outer tensor are its first.

    A negative dim counts from the last one, which is another in such an inner tensor. Sizes, and repeats, are of the
    first dims too.

    Raises:
        DispatchError: from the plan, if the op changes the further dims, as a sum over all dims does, or means other
            elements of an inner tensor of another size than of the value.
    """
    facts, cls = op_facts(op), cls._value_cls
    is_sized = any(a.name in _SIZES for a in facts.arguments)
    if torch.Tag.pointwise in op.tags:
        return _with_plain_operands(cls, op, run)
    if (is_factory(op) and not is_sized) or op in STRIDED_OPS or has_one_size(cls):
        return run
    attributes = cls.__spec__.attributes
    # A scale of size [out, 1] has the dims of the value, which a view moves with them.
    keeps_ones = (is_view(op) and not is_sized) or op is aten.expand.default

    def plan(*args: Any, **kwargs: Any) -> Any:
        x: Any = args[0]
        if not isinstance(x, cls):
            x = next(t for t in tensors_in(args, kwargs) if isinstance(t, cls))
        others = _of_other_sizes(x, attributes)
        further = _with_further_dims(op, x, others, keeps_ones) if others else ()
        if not further:
            return run(*args, **kwargs)
        rolls_as_one_row = op is aten.roll.default and len(args) < 3
        if op in _OF_LAST_DIMS or op in _APPENDING or rolls_as_one_row:
            raise further_dims_error(op, x, further[0])
        if any(
            t.is_floating_point() and t.dim() and not isinstance(t, cls) for t in tensors_in(args, kwargs)
        ):
            raise other_size_error(op, x, further[0], "than a plain operand")
        out = _run_from_front(op, run, x, [*args], kwargs)
        for result in out if isinstance(out, list | tuple) else (out,):
            if isinstance(result, cls):
                _check_further_dims(op, x, result, further)
        return out

    return plan


def _with_further_dims(op: OpOverload, x: Any, others: list[str], keeps_ones: bool) -> list[str]:
    """Returns which inner tensors of another size have the dims of a value, and further ones.

    Raises:
        DispatchError: the op would mean other elements of one of them than of the value.
    """
    held, size = x.__dict__, x.shape
    further = [n for n in others if not known_to_differ(held[n].shape[: len(size)], size)]
    for n in others:
        if n not in further and not (keeps_ones and fits_by_ones(held[n].shape, size)):
            raise other_size_error(op, x, n, "where the op names dims, sizes or all of them")
    return further


def _with_plain_operands(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the plan of a pointwise op: the elements of a plain operand are those of the value.

    Raises:
        DispatchError: from the plan, if an inner tensor has other elements than the value: of its size are those of
            the value, and of a size that expands to it, as one row for all, those to which the operand adds none.
    """
    if sum(a.kind != "other" for a in op_facts(op).arguments) < 2 or has_one_size(cls):
        return run
    attributes = cls.__spec__.attributes

    def plan(*args: Any, **kwargs: Any) -> Any:
        plain, x = None, None
        for t in args:
            if isinstance(t, cls):
                x = t
            elif isinstance(t, Tensor):
                plain = t
        if plain is not None and x is not None and (others := _of_other_sizes(x, attributes)):
            _check_same_elements(
                op, x, others, [t for t in tensors_in(args, kwargs) if not isinstance(t, cls)]
            )
        return run(*args, **kwargs)

    return plan


def _of_other_sizes(x: Any, attributes: tuple[str, ...]) -> list[str]:
    """Returns which inner tensors have another size than the value; it is asked at each call of a mapped op."""
    held, size, found = x.__dict__, x.shape, []
    for name in attributes:
        t = held[name]
        if t is None:
            continue
        if t.__class__ is Tensor or all(n.__class__ is int for n in (*size, *t.shape)):
            if t.shape != size:
                found.append(name)
        elif known_to_differ(t.shape, size):  # a comparison of symbols would guard on them
            found.append(name)
    return found


def _check_same_elements(op: OpOverload, x: Any, others: list[str], plains: list[Tensor]) -> None:
    for name in others:
        size = x.__dict__[name].shape
        if not all(expands(size, x.shape) and expands(t.shape, size) for t in plains if t.dim()):
            raise other_size_error(op, x, name, "than a plain operand")


def _run_from_front(
    op: OpOverload, run: Callable[..., Any], x: Any, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs the plan of an op with dims that are counted from the front."""
    arguments = op_facts(op).arguments
    named = [i for i, a in enumerate(arguments) if a.name in _DIMS and a.kind == "other"]
    while named and len(args) <= named[-1] and (default := arguments[len(args)].default):
        args += default
    is_sized = op is not aten.unfold.default and not op_facts(op).written  # whose size is that of a window
    sized = next((i for i, a in enumerate(arguments) if a.name in _SIZES), None) if is_sized else None
    if op is aten.permute.default:
        sized = 1  # it names all dims
    count = x.dim() + (op in _ADDING_A_DIM)
    if sized is not None and arguments[sized].name == "input_sizes":  # the derivative of a view
        count = len(args[sized])
    for i in (i for i in named if i < len(args)):
        args[i] = _from_front(count, args[i])
    return run(*args, **kwargs) if sized is None else _run_sized(op, x, sized, args, kwargs)


def _run_sized(op: OpOverload, x: Any, index: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an op on each inner tensor with the sizes that it names, and those of the further dims."""
    facts, results = op_facts(op), {}
    for name in x._layout.present:
        t = x.__dict__[name]
        further = t.shape[x.dim() :]
        match facts.arguments[index].name:
            case "repeats":
                further = [1 for _ in further]
            case "dims":
                further = range(x.dim(), t.dim())
        given = [inner_of(type(x), v, name) for v in args]
        given[index] = [*args[index], *further]
        results[name] = op(*given, **kwargs)
    out = with_inners(x, [results.get(name) for name in type(x).__spec__.attributes])
    return set_storage_of(out, x) or out if facts.viewed else out


def _from_front(count: int, dims: Any) -> Any:
    if isinstance(dims, list | tuple):
        return [canonicalize_dim(count, d) for d in dims]
    return dims if dims is None else canonicalize_dim(count, dims)


def _check_further_dims(op: OpOverload, x: Any, result: Any, further: list[str]) -> None:
    for name in further:
        before, after = x.__dict__[name].shape, result.__dict__[name].shape
        count = len(before) - x.dim()
        if len(after) < count or known_to_differ(after[len(after) - count :], before[len(before) - count :]):
            raise further_dims_error(op, x, name)
        if len(after) - result.dim() != count:
            raise outer_dims_error(op, x, result, name)
