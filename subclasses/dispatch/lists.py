"""Ops on lists of tensors, with which optimizers update many parameters in one call.

The lists of a model mix plain parameters with wrappers of several classes. Each *row*, the elements at one index of
all lists, is treated by itself: a row of a trainable class becomes one row for each differentiable inner tensor, and
rows of plain tensors stay. The op then runs once for all plain rows of one dtype and device. It runs once more for the
remaining rows of each class, and dispatches to that class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from subclasses._torch import OpOverload, is_traceable_wrapper_subclass_type
from subclasses.autograd.cotangent_class import is_cotangent
from subclasses.dispatch.mapping import check_alike, raise_writes_plain
from subclasses.dispatch.per_inner import (
    check_not_traced,
    check_operands,
    differentiable_names,
    inner_of,
    joint_norm,
    records,
    remade,
)
from subclasses.layout import cotangent_layout
from subclasses.op_schemas.aliasing import PLAIN, argument, bump_versions, may_overlap
from subclasses.op_schemas.schema import OpFacts, op_facts
from subclasses.op_schemas.write_checks import check_sizes, one_element
from subclasses.spec.values import OF_PARAMETER, is_of_parameter


class Row(NamedTuple):
    """One row to run: the index of the element, the name of its inner tensor (or ""), and its tensors."""

    index: int
    name: str
    tensors: tuple[Tensor, ...]


class Call(NamedTuple):
    """An op, its arguments, and which of them are lists of tensors.

    Attributes:
        op: the op.
        facts: the facts of its schema.
        values: the arguments in order of the schema; None for those not given.
        columns: indices of the lists that are not empty.
        written: which of these lists the op writes to.
        count: the number of elements of each list.
    """

    op: OpOverload
    facts: OpFacts
    values: list[Any]
    columns: list[int]
    written: list[int]
    count: int


# The result is the first operand, updated by the others.
_MOVING = frozenset({"_foreach_add", "_foreach_sub", "_foreach_addcmul", "_foreach_addcdiv"})


def run_lists(op: OpOverload, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs an op on lists of tensors row by row, or calls ``run`` if no row is of a trainable class."""
    call = _make_call(op, args, kwargs)
    elements = list(zip(*(call.values[i] for i in call.columns), strict=True))
    owners = [_owner(call, tensors) for tensors in elements]
    if not any(owners):
        return run(*args, **kwargs)
    rows = [
        row
        for k, (owner, tensors) in enumerate(zip(owners, elements, strict=True))
        for row in ([Row(k, "", tensors)] if owner is None else _split(call, owner, k, tensors))
    ]
    results: dict[int, dict[str, Any]] = {}
    _try_first(call, rows, len(args), kwargs)
    copies: list[tuple[Tensor, Tensor]] = []
    if op.overloadpacket.__name__.startswith("_fused_"):
        rows = [_with_strides_of_first(row, copies) for row in rows]
    for group in _group(rows):
        out = _run(call, group, len(args), kwargs)
        for row, one in zip(group, out or (), strict=bool(call.facts.returns)):
            results.setdefault(row.index, {})[row.name] = one
    for tensor, copy in copies:
        tensor.copy_(copy)
    bump_versions([row.tensors[j] for row in rows if row.name for j in call.written])
    if not call.facts.returns:
        return None
    return [_join(call, owners[k], tensors, results[k]) for k, tensors in enumerate(elements)]


def _make_call(op: OpOverload, args: Any, kwargs: Any) -> Call:
    facts = op_facts(op)
    values = [argument(facts, args, kwargs, i) for i in range(len(facts.arguments))]
    columns = [i for i, a in enumerate(facts.arguments) if a.role == "tensors" and values[i]]
    written = [columns.index(i) for i in facts.written if i in columns]
    return Call(op, facts, values, columns, written, len(values[0]))


def _owner(call: Call, tensors: tuple[Tensor, ...]) -> Any:
    """Returns the trainable class that a row belongs to; None if the row runs as it is."""
    owner: Any = next((type(t) for t in tensors if _is_trainable(type(t))), None)
    cls = None if owner is None else owner._value_cls
    if cls is None or cls._traits.is_mapped:
        return cls
    mine = [t for t in tensors if isinstance(t, cls)]
    written = [tensors[j] for j in call.written if isinstance(tensors[j], cls)]
    if any(is_cotangent(t) for t in mine):
        return cls
    if records(tensors) or not any(is_of_parameter(t) for t in written):
        return None
    check_not_traced(cls, call.op)
    return cls


def _is_trainable(cls: Any) -> bool:
    return cls is not Tensor and hasattr(cls, "__spec__") and cls._traits.trainable


# ---- rows --------------------------------------------------------------------------------------------------


def _split(call: Call, cls: Any, index: int, tensors: tuple[Tensor, ...]) -> list[Row]:
    """Returns one row for each inner tensor that the op runs on."""
    x: Any = next(t for t in tensors if isinstance(t, cls))
    # A state of the optimizer such as the number of steps is one tensor; the op only reads it.
    if any(not isinstance(t := tensors[j], cls) and t.dim() for j in call.written):
        raise_writes_plain(call.op, cls)
    names: Iterable[str] = x._layout.present
    if cls._traits.is_mapped:
        for t in tensors:
            if isinstance(t, cls):
                check_alike(call.op, x, t)
    else:
        check_operands(cls, call.op, tensors)
        if call.op.overloadpacket.__name__ != "_foreach_copy_":
            names = differentiable_names(x)
    return [Row(index, n, tuple(inner_of(cls, t, n) for t in tensors)) for n in names]


def _with_strides_of_first(row: Row, copies: list[tuple[Tensor, Tensor]]) -> Row:
    """Returns a row for a fused kernel, which goes through the memory of its tensors; adds (tensor, copy) to `copies`.

    Autograd gives the gradient of a plain Parameter the strides of the Parameter. Gradients of inner tensors may have
    any strides.
    """
    first, *others = row.tensors
    tensors = [first]
    for t in others:
        if t.dim() and t.shape == first.shape and t.stride() != first.stride():
            copies.append((t, t.new_empty_strided(first.size(), first.stride()).copy_(t)))
            t = copies[-1][1]
        tensors.append(t)
    return row._replace(tensors=tuple(tensors))


def _group(rows: list[Row]) -> Iterable[list[Row]]:
    """Groups rows that one call may take: all of one dtype, device and class."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        first = row.tensors[0]
        classes = [type(t) for t in row.tensors if is_traceable_wrapper_subclass_type(type(t))]
        groups.setdefault((*classes, first.dtype, first.device), []).append(row)
    return groups.values()


def _run(call: Call, group: list[Row], num_positional: int, names: Iterable[str]) -> Any:
    """Runs the op for a group."""
    given = [_select(call, i, group) for i in range(num_positional)]
    named = {a.name: i for i, a in enumerate(call.facts.arguments)}
    return call.op(*given, **{n: _select(call, named[n], group) for n in names})


def _try_first(call: Call, rows: list[Row], num_positional: int, names: Iterable[str]) -> None:
    """Raises the op's error for a row before the op has written to half of a wrapper."""
    if not call.written or not call.op.overloadpacket.__name__.startswith("_foreach_"):
        return
    plain = [row for row in rows if not any(type(t) not in PLAIN for t in row.tensors)]
    for row in plain:
        check_sizes(row.tensors, [row.tensors[j] for j in call.written])
    overlaps = any(may_overlap(row.tensors[j]) for row in plain for j in call.written)
    if overlaps or len({tuple([t.dtype for t in row.tensors]) for row in plain}) > 1:
        unlike = {tuple((t.dtype, t.dim(), may_overlap(t)) for t in row.tensors): row for row in plain}
        small = [Row(row.index, row.name, tuple(map(one_element, row.tensors))) for row in unlike.values()]
        for group in _group(small):
            _run(call, group, num_positional, names)


def _select(call: Call, i: int, group: list[Row]) -> Any:
    """Returns an argument for a group: the elements of its rows, of lists of numbers too."""
    value, role = call.values[i], call.facts.arguments[i].role
    if i in call.columns:
        return [row.tensors[call.columns.index(i)] for row in group]
    indices = [row.index for row in group]
    if role == "other" and isinstance(value, list | tuple) and len(value) == call.count:
        return [value[k] for k in indices]
    if isinstance(value, Tensor) and call.facts.arguments[i].name == "scalars":
        return value[indices]  # a tensor of one number for each element
    return value


def _join(call: Call, cls: Any, tensors: tuple[Tensor, ...], results: dict[str, Any]) -> Any:
    """Returns the result for an element from its rows' results."""
    if cls is None:
        return results[""]
    first: Any = tensors[0]
    x: Any = next(t for t in tensors if isinstance(t, cls))
    name = call.op.overloadpacket.__name__
    if name == "_foreach_norm" and is_cotangent(x):
        return joint_norm(x, results, call.values[1] if call.values[1] is not None else 2)
    if cls._traits.is_mapped:
        return remade(x, results, x._layout)
    if name in _MOVING and isinstance(first, cls) and is_of_parameter(first):
        return remade(first, results, first._layout, OF_PARAMETER)
    return remade(x, results, cotangent_layout(x._layout))
