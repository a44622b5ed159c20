"""Ops above autograd: an op of a structure opens its operands, runs its rule once, and closes its results.

Above autograd means that autograd records the ops of a rule, and not the op that has the rule.

A value is *closed* where its user and autograd see it: it requires grad, and its inner tensors are raw. It is *open*
inside of a rule: it does not require grad, and its inner tensors are differentiable functions of the closed value.
Autograd differentiates the computation of the rule on them::

    closed operands --Unwrap--> open operands --the rule--> open results --Construct--> closed results

``__torch_function__`` takes each call where gradients are recorded. Around a function of PyTorch's the autograd keys
are excluded, so that its op is dispatched to the class, which opens the operands. A function of several ops runs under
a mode, which leaves ops on plain tensors to autograd. A view runs on closed values, with autograd, and PyTorch's
formula for it acts on each inner tensor. A write runs the op that makes a new value, and then PyTorch's ``copy_`` of
the new value into the old one. An op whose derivative is PyTorch's formula runs on closed values, too: of a
representation, of a rule with ``derivative="formula"``, or on materialized values. Its plain gradient is converted to a
cotangent of the operand at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from subclasses._torch import (
    DisableTorchFunctionSubclass,
    EnableTorchFunction,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    any_requires_grad,
    apply_function,
    autograd_enabled,
    autograd_excluded,
    call_unruled,
    current_transform,
    is_below_autograd,
    is_composite,
    is_differentiated_by_transform,
    is_dispatched,
)
from subclasses._torch_capture import is_exporting
from subclasses.autograd.calling import CALLING, in_rule
from subclasses.autograd.construct import Construct, as_operand, unwrap_recorded
from subclasses.autograd.gradient_errors import (
    TAKES_GRADIENTS,
    check_gradients,
    formula_error,
    open_formula_error,
    transformed_error,
    view_rule_error,
)
from subclasses.layout import BY_FORMULA, Layout
from subclasses.op_schemas.aliasing import is_same_memory, return_written, write_into
from subclasses.op_schemas.schema import OpFacts, op_facts
from subclasses.spec.values import dynamic_ints, inner_tensors, map_tensors, tensors_in, with_inners

aten = torch.ops.aten

Call = Callable[..., Any]


# ---- calls of functions ------------------------------------------------------------------------------------


class _Way(Enum):
    """How a function runs where gradients of its operands are recorded."""

    AS_IT_IS = "it computes nothing new of values, or calls other functions, which arrive one by one"
    VIEWS = "it takes views, which are PyTorch's outside of rules, unless the author has a rule for one"
    ONE_OP = "it runs one op"
    SEVERAL_OPS = "it runs several ops"


def call(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function without a rule, above autograd where rules of a structure are to be differentiated."""
    if is_dynamo_compiling() or func in _METADATA:
        return call_unruled(func, types, args, kwargs)
    runs_above = not types or any(map(_runs_above, types))
    if takes_gradients := func in TAKES_GRADIENTS:
        args, kwargs = check_gradients(func, args, kwargs)
    if is_below_autograd():
        return call_unruled(func, types, args, kwargs)
    before = CALLING.func, CALLING.target, CALLING.opens
    CALLING.func = None if takes_gradients else func
    CALLING.target = args[0] if func is Tensor.__setitem__ else None
    try:
        way = _way_of(func, args, kwargs) if runs_above else _Way.AS_IT_IS
        CALLING.opens = way is not _Way.AS_IT_IS
        if way is _Way.AS_IT_IS:
            return call_unruled(func, types, args, kwargs)
        with autograd_excluded():
            if way is _Way.ONE_OP:
                return call_unruled(func, types, args, kwargs)
            with _EachOp():
                return call_unruled(func, types, args, kwargs)
    finally:
        CALLING.func, CALLING.target, CALLING.opens = before


# Functions that run no op: rules read the size and the dtype of a value several times for an op.
_METADATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
        *(Tensor.dim, Tensor.size, Tensor.stride, Tensor.numel),
        *(Tensor.is_floating_point, Tensor.is_complex),
    }
)


def _way_of(func: Any, args: Any, kwargs: Any) -> _Way:
    way = _find_way(func)
    if way is _Way.AS_IT_IS or not torch.is_grad_enabled():
        return _Way.AS_IT_IS
    values: list[Any] = []
    plain: list[Any] = []
    for t in tensors_in(args, kwargs):
        (values if is_above(t) else plain).append(t)
    is_transforming = current_transform() is not None
    is_beside = values and is_transforming and not _has_no_derivative(func)
    if is_beside and any(map(is_differentiated_by_transform, plain)):
        raise transformed_error(type(values[0]), func)
    # Autocast, and lazy bits, make PyTorch run other ops on a plain operand that requires grad first.
    plain_records = any_requires_grad(*plain)
    if not values or not (plain_records or any_requires_grad(*values) or in_rule()):
        return _Way.AS_IT_IS
    if is_transforming or is_exporting():
        return _Way.AS_IT_IS
    is_view = way is _Way.VIEWS or (func is Tensor.__getitem__ and _takes_views(args[1]))
    if is_view and not (any(type(t)._rules_views for t in values) or in_rule()):
        return _Way.AS_IT_IS
    return _Way.ONE_OP if way is _Way.ONE_OP and not plain_records else _Way.SEVERAL_OPS


def _has_no_derivative(func: Any) -> bool:
    """Whether a function compares, or takes only the size or type of its second operand."""
    name = getattr(func, "__name__", "").strip("_")
    return name in _COMPARING or name.endswith("_as")


_COMPARING = frozenset("eq ne gt ge lt le isclose greater greater_equal less less_equal not_equal".split())


@functools.cache
def _find_way(func: Any) -> _Way:
    """Returns how a function runs, from the schemas of the ops that have its name."""
    name = getattr(func, "__name__", "")
    if name == "__get__" and getattr(func.__self__, "__name__", "") in _COMPUTED:
        return _Way.VIEWS
    if name == "requires_grad_" or not isinstance(func, _IN_C):
        return _Way.AS_IT_IS
    ops = _ops_of(func)
    facts = [op_facts(op) for op in ops]
    if any(op.namespace == "export" for op in ops):  # an exported program reads an inner tensor
        return _Way.AS_IT_IS
    if facts and all(set(f.returns) <= {"other"} and not f.written for f in facts):
        return _Way.AS_IT_IS
    if not ops or any(map(is_composite, ops)):
        return _Way.SEVERAL_OPS
    return _Way.VIEWS if all(f.viewed and not f.written for f in facts) else _Way.ONE_OP


_COMPUTED = frozenset({"T", "mT", "H", "mH", "real", "imag"})  # attributes of a tensor that are views of it
_IN_C = (OpOverload, OpOverloadPacket, type(torch.add), type(Tensor.add), type(Tensor.__getitem__))


def _ops_of(func: Any) -> list[OpOverload]:
    """Returns the ops that a function in C may run, if it is known to run one of them; an ``out=`` form is not one."""
    if isinstance(func, OpOverload):
        return [func]
    packet = func if isinstance(func, OpOverloadPacket) else getattr(aten, func.__name__, None)
    if not isinstance(packet, OpOverloadPacket):
        return []
    ops = [op for name in packet.overloads() if is_dispatched(op := getattr(packet, name))]
    return [op for op in ops if not any(op_facts(op).arguments[i].keyword for i in op_facts(op).written)]


def _takes_views(index: Any) -> bool:
    """Whether an index only names elements by numbers and slices."""
    indices = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or type(i) in (int, slice) for i in indices)


class _EachOp(TorchDispatchMode):
    """Sees each op of a function, with the autograd keys excluded around it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if any(map(is_above, tensors_in(args, kwargs))):
                return func(*args, **kwargs)
            with autograd_enabled():
                return func(*args, **kwargs)


# ---- opening and closing -----------------------------------------------------------------------------------


def is_above(t: Any) -> bool:
    """Whether a tensor is a value whose ops run above autograd: it has rules for ops, or materializes."""
    return getattr(type(t), "_runs_above", False)


def _runs_above(cls: type) -> bool:
    return getattr(cls, "_runs_above", False)


def is_open(x: Any) -> bool:
    """Whether a value does not require grad and an inner tensor of it does."""
    return is_above(x) and not any_requires_grad(x) and _holds_open(x._layout, inner_tensors(x))


def _holds_open(layout: Layout, inners: list[Tensor | None]) -> bool:
    return any_requires_grad(*inners) or (bool(layout.nested) and any(map(is_open, inners)))


def close(x: Any, source: Any = None) -> Any:
    """Returns a closed value for an open one, which may be a copy of another; any other tensor as it is."""
    if not is_above(x) or any_requires_grad(x):
        return x
    layout, inners = x._layout, inner_tensors(x)
    if not _holds_open(layout, inners):
        return x
    if layout.nested:
        inners = [close(t) for t in inners]
    return apply_function(Construct, layout, dynamic_ints(x), close(source), *inners)


class _recording:
    """Context in which autograd records, and an op that is dispatched to a class opens no operand."""

    __slots__ = ("before", "guard")

    def __enter__(self) -> None:
        self.before, CALLING.opens = CALLING.opens, False
        self.guard = autograd_enabled() if is_below_autograd() else None
        if self.guard is not None:
            self.guard.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.guard is not None:
            self.guard.__exit__(*error)
        CALLING.opens = self.before


def _run_rule(rule: Call, args: Any, kwargs: Any) -> Any:
    """Runs a rule where autograd records: functions that it calls are intercepted here, and its values stay open."""
    CALLING.rules += 1
    try:
        with EnableTorchFunction():
            return rule(*args, **kwargs)
    finally:
        CALLING.rules -= 1


class _Operands:
    """The operands of an op, open.

    Attributes:
        opens: Whether a value is opened.
        source: The operand that the op copies, if its derivative is PyTorch's formula for copies.
        open: id of a closed value -> it, and the open one.
    """

    def __init__(self, opens: Callable[[Any], bool] = is_above, source: Any = None) -> None:
        self.opens, self.source = opens, source
        self.open: dict[int, Any] = {}

    def open_one(self, t: Any) -> Any:
        """Returns the open form of a closed value that requires grad; any other tensor as it is."""
        if not self.opens(t):
            return t
        if (known := self.open.get(id(t))) is not None:
            return known[1]
        if not any_requires_grad(t):
            return t
        if BY_FORMULA in t.__dict__:
            raise formula_error(type(t))
        new = with_inners(t, unwrap_recorded(t, type(t).__spec__.attributes))
        self.open[id(t)] = t, new
        return new

    def close(self, t: Any) -> Any:
        """Returns a result closed; an operand that a rule above autograd returns is the same object."""
        for x, new in self.open.values():
            if t is new:
                return x
        return close(t, self.open_one(self.source))


# ---- wrapped callables -----------------------------------------------------------------------------------------


def with_autograd(op: OpOverload, run: Call) -> Call:
    """Wraps the callable of an op that PyTorch runs on closed values, with autograd: a view, a factory, a predicate."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not CALLING.opens:
            return run(*args, **kwargs)
        if any(map(is_open, tensors_in(args, kwargs))):
            with _recording():
                return _run_rule(run, args, kwargs)
        return _call_with_autograd(op, args, kwargs)

    return wrapped


def with_formula(op: OpOverload, run: Call, *, makes_views: bool = False) -> Call:
    """Wraps the callable of an op whose derivative is PyTorch's formula, which runs on closed values, with autograd.

    Args:
        op: The op.
        run: Its callable.
        makes_views: Whether its results are views of its operands, whose gradients stay plain.
    """
    recorded, facts = with_autograd(op, run), op_facts(op)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if CALLING.opens and not makes_views:
            written = {id(t) for t in _targets(facts, args, kwargs)} if facts.written else ()
            with _recording():
                args, kwargs = (
                    map_tensors(v, lambda t: t if id(t) in written else as_operand(t)) for v in (args, kwargs)
                )
        return recorded(*args, **kwargs)

    return wrapped


def with_formula_of_rule(op: OpOverload, run: Call) -> Call:
    """Wraps the callable of an op with ``derivative="formula"``, or of a rule of a representation.

    Raises:
        DispatchError: from the callable, if a rule calls it on a value that it differentiates by its inner tensors.
    """
    by_formula = with_formula(op, run, makes_views=bool(op_facts(op).viewed))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for x in tensors_in(args, kwargs):
            if is_open(x):
                raise open_formula_error(type(x), op)
        return by_formula(*args, **kwargs)

    return wrapped


def with_run_above(opened: Call, run: Call) -> Call:
    """Returns a callable that calls the first argument above autograd, and the second below it."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return (opened if CALLING.opens else run)(*args, **kwargs)

    return wrapped


def _call_with_autograd(op: OpOverload, args: Any, kwargs: Any) -> Any:
    with _recording(), DisableTorchFunctionSubclass():
        return op(*args, **kwargs)


def with_each_op(run: Call) -> Call:
    """Wraps a callable that decomposes an op: each op of the decomposition is dispatched by itself."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not CALLING.opens:
            return run(*args, **kwargs)
        with _EachOp():
            return run(*args, **kwargs)

    return wrapped


def with_open_operands(run: Call) -> Call:
    """Wraps the callable of an op that makes values: it runs on open operands, and its results are closed."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not CALLING.opens:
            return run(*args, **kwargs)
        return call_open(run, args, kwargs)

    return wrapped


def with_formula_of_copy(op: OpOverload, run: Call, *, by_formula: bool) -> Call:
    """Wraps the callable of a copy: if the operand is a result by formula, PyTorch's formula for the copy applies.

    Args:
        op: The op.
        run: Its callable.
        by_formula: Whether the formula applies to plain gradients in any case.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not CALLING.opens:
            return run(*args, **kwargs)
        if BY_FORMULA in vars(args[0]):
            return _call_with_autograd(op, args, kwargs)
        source = args[0] if by_formula and any_requires_grad(args[0]) else None
        return call_open(run, args, kwargs, source=source)

    return wrapped


def call_open(
    run: Call, args: Any, kwargs: Any, opens: Callable[[Any], bool] = is_above, source: Any = None
) -> Any:
    """Runs a rule on open operands; its results are closed, unless another rule on open values calls it.

    Args:
        run: The rule.
        args: Its arguments.
        kwargs: Its keyword arguments.
        opens: Whether a value among them is opened.
        source: The value that a copy by PyTorch's formula copies.
    """
    operands = _Operands(opens, source)
    with _recording():
        args = map_tensors(args, operands.open_one)
        out = _run_rule(run, args, map_tensors(kwargs, operands.open_one) if kwargs else kwargs)
        return out if in_rule() else map_tensors(out, operands.close)


def with_checked_view_rule(op: OpOverload, run: Call) -> Call:
    """Wraps an author's rule for a view: it may return a plain tensor, whose derivative follows from the rule.

    Raises:
        DispatchError: from the callable, if it returns a value where gradients are recorded: PyTorch's formula for the
            view, which takes a later write into account, is not the derivative of the rule.
    """
    opened = with_open_operands(run)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = opened(*args, **kwargs)
        if CALLING.opens and not in_rule():
            for t in tensors_in((out,), None):
                if is_above(t) and any_requires_grad(t):
                    raise view_rule_error(type(t), op)
        return out

    return wrapped


def with_written_copies(op: OpOverload, run: Call, make: Call | None, *, by_rule: bool) -> Call:
    """Wraps the callable of an op that writes to values: it runs on open copies, which PyTorch's ``copy_`` then writes.

    Args:
        op: The op.
        run: Its callable.
        make: The callable of the op that makes the new value, if this op follows from it.
        by_rule: Whether the callable is a rule of the author.
    """
    facts, is_copy = op_facts(op), op is aten.copy_.default
    write = _Write(op, facts, run, make)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if is_copy and (written_op := CALLING.writing) is not None:
            CALLING.writing = None
            write_into(written_op, args[0], args[1])
            return args[0]
        if not CALLING.opens:
            return run(*args, **kwargs)
        targets = _targets(facts, args, kwargs)
        if not any(map(is_above, targets)):  # a plain tensor is written to
            return with_open_operands(run)(*args, **kwargs)
        if any(map(is_open, targets)):
            with _recording():
                return _run_rule(run, args, kwargs)
        if is_copy and not by_rule and type(args[0]) is type(args[1]) and args[0]._layout is args[1]._layout:
            return _call_with_autograd(op, args, kwargs)
        return write(targets, args, kwargs)

    return wrapped


def _targets(facts: OpFacts, args: Any, kwargs: Any) -> list[Any]:
    names = [a.name for a in facts.arguments]
    return tensors_in([args[i] if i < len(args) else kwargs.get(names[i]) for i in facts.written], None)


class _Write(NamedTuple):
    op: OpOverload
    facts: OpFacts
    run: Call
    make: Call | None

    def __call__(self, targets: list[Any], args: Any, kwargs: Any) -> Any:
        operands = _Operands()
        with _recording():
            for x in targets:
                if is_above(x) and id(x) not in operands.open:
                    operands.open[id(x)] = x, _open_copy(x)
            copies = {id(x): (x, dict(new.__dict__)) for x, new in operands.open.values()}
            new_args, new_kwargs = (map_tensors(v, operands.open_one) for v in (args, kwargs))
            out = _run_rule(self.make or self.run, new_args, new_kwargs)
        if out is NotImplemented:
            return out
        for x, before in copies.values():
            new = operands.open[id(x)][1] if self.make is None else out
            with _recording():
                closed = close(new)
            _keep_unchanged(x, before, closed)
            _write(self.op, x, closed)
        return return_written(self.facts, args, kwargs, out)


def _open_copy(x: Any) -> Any:
    """Returns an open copy, since a rule may save tensors of the value, which is written to afterwards."""
    names = type(x).__spec__.attributes
    if BY_FORMULA in x.__dict__:
        raise formula_error(type(x))
    inners = unwrap_recorded(x, names, written=True) if any_requires_grad(x) else inner_tensors(x)
    return with_inners(x, [None if t is None else copied(t) for t in inners])


def copied(t: Any) -> Any:
    """Returns a copy of a tensor; of a value of a structure, one inner tensor at a time."""
    return _open_copy(t) if is_above(t) else t.clone()


def _keep_unchanged(x: Any, copies: dict[str, Any], closed: Any) -> None:
    """Restores an inner tensor that a rule did not change: a write would be an error for a backward that saved it."""
    if type(closed) is not type(x):
        return
    for name in type(x).__spec__.attributes:
        t, copy, new = x.__dict__[name], copies[name], closed.__dict__[name]
        if t is None or new is None or _is_written(copy):
            continue
        if new is copy or (new.shape == copy.shape and is_same_memory(new, copy)):
            closed.__dict__[name] = t


def _is_written(t: Any) -> bool:
    return not t.is_inference() and t._version > 0


def _write(op: OpOverload, x: Any, new: Any) -> None:
    """Writes a closed value into another by PyTorch's ``copy_``, which passes the gradient to the written value."""
    if type(new) is not type(x):
        write_into(op, x, new)  # raises
    CALLING.writing = op
    try:
        _call_with_autograd(aten.copy_.default, (x, new), {})
    finally:
        CALLING.writing = None
