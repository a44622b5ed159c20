"""Which ops a traced function runs, and which nodes of the graph each became.

Two things see an op: the torch function mode that watches the function (`Capture`), above autograd, and a dispatch
mode, on the op's way to a tensor subclass. Each notes the nodes that the graph grew by meanwhile, the innermost
first. A node of the backward belongs to the op whose autograd node was running: autograd numbers its nodes in the
order of their making, so each op has a range of numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private
from desugar.ir.fx_utils import autograd_nodes
from desugar.ir.pytree import flatten
from desugar.ir.values import is_wrapper
from desugar.recording.listeners import Op, Recording, current
from desugar.user_code import Line, find_line
from subclasses import TensorSubclass, strict_mode
from subclasses._torch import OpOverload, is_traceable_wrapper_subclass_type
from subclasses.dispatch.resolution import find_step
from subclasses.dispatch.rules import collect_function_rules, describe, find_op_rule
from subclasses.errors import DispatchError

OP = "desugar_op"  # in a node's metadata: the number of the op that it came from
BACKWARD = "desugar_backward"  # and whether it belongs to that op's backward

# ------------------------------------------------------------------------------------------------ the notes


class Notes:
    """Fills `recording.ops` during one traced run."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.recording.ops.clear()
        self.recording.materialized.clear()
        self._open: list[int] = []
        self._ranges: list[tuple[int, int, int]] = []  # autograd's numbers, and the op that made them
        self._backward: int | None = None
        self._last: fx.Node | None = None

    def call(self, run: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """A Python-level function, about to run as `run(func, args, kwargs)`."""
        name = torch.overrides.resolve_name(func) or getattr(func, "__qualname__", str(func))
        operands = _tensors((args, kwargs))
        how = _rule_above(func, operands) if any(map(is_wrapper, operands)) else "plain"
        with self._noting(name, how, operands, find_line()):
            return run(func, args, kwargs)

    def dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op on its way to a subclass."""
        operands = _tensors((args, kwargs))
        with self._noting(str(func), _step(func, operands), operands, find_line()):
            return func(*args, **kwargs)

    def materialized(self, cls: type, op: Any) -> None:
        """A subclass gave way to the plain tensor that it stands for, in whatever thread."""
        if notes_in_progress() is self:
            inside = self._open[-1] if self._open else self._backward
            line = find_line() if inside is None else self.recording.ops[inside].line
            self.recording.materialized.append((cls.__name__, str(op), line))

    @contextlib.contextmanager
    def _noting(self, name: str, how: str, operands: Sequence[Tensor], line: Line | None) -> Iterator[None]:
        ops = self.recording.ops
        parent = self._open[-1] if self._open else self._backward
        op = Op(len(ops), name, how, ", ".join(map(_show, operands)), line, parent)
        ops.append(op)
        if self._backward is not None and parent is not None:
            op.line = ops[parent].line  # what stands on the stack is whoever called the trace
        self._open.append(op.number)
        last, start = _last_node(), private.sequence_number()
        try:
            yield
        finally:
            self._open.pop()
            if self._backward is None:
                self._ranges.append((start, private.sequence_number(), op.number))
            _mark(last, op.number, self._backward is not None)

    # ............................................................................................. backward

    @contextlib.contextmanager
    def backward(self, results: Sequence[Tensor]) -> Iterator[None]:
        """The backward from some results; every autograd node tells when it runs."""
        hooks = [
            node.register_prehook(functools.partial(self._enter, self._owner(node)))
            for node in autograd_nodes(results)
        ]
        self._last = _last_node()
        try:
            yield
        finally:
            self._enter(None)
            for hook in hooks:
                hook.remove()

    def _owner(self, node: Any) -> int | None:
        """The innermost op during which an autograd node was made: inner ones end first."""
        number = node._sequence_nr()
        return next((op for start, end, op in self._ranges if start <= number < end), None)

    def _enter(self, op: int | None, *gradients: Any) -> None:
        if self._backward is not None:
            _mark(self._last, self._backward, True)
        self._backward, self._last = op, _last_node()


class OuterOps(private.TorchDispatchMode):
    """Shows ops to the notes on their way to a subclass."""

    supports_higher_order_operators = True

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op; one without a subclass among its arguments is plain already."""
        if not any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return func(*args, **(kwargs or {}))
        return self.notes.dispatched(func, args, kwargs or {})


_in_progress: dict[int, Notes] = {}  # by id of the recording


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """The recorded run of the function, if anybody looks on."""
    recording = current()
    if recording is None:
        yield
        return
    outer = _in_progress.pop(id(recording), None)
    if (
        outer is not None
    ):  # a branch of a higher-order op, traced by itself: a part of the op that is noted already
        try:
            yield
        finally:
            _in_progress[id(recording)] = outer
        return
    notes = _in_progress[id(recording)] = Notes(recording)
    strict_mode.watchers.append(notes.materialized)
    try:
        with OuterOps(notes):
            yield
    finally:
        strict_mode.watchers.remove(notes.materialized)
        _in_progress.pop(id(recording), None)


def notes_in_progress() -> Notes | None:
    """The notes of the run that is recorded in this thread, if any."""
    recording = current()
    return None if recording is None else _in_progress.get(id(recording))


def noting_backward(results: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """The backward of the run that is recorded, if anybody looks on."""
    notes = notes_in_progress()
    return contextlib.nullcontext() if notes is None else notes.backward(results)


# -------------------------------------------------------------------------------------------------- helpers


def _tensors(call: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(call)[0] if isinstance(leaf, Tensor)]


def _show(tensor: Tensor) -> str:
    kind = type(tensor).__name__ if is_wrapper(tensor) and not _is_functional(tensor) else "Tensor"
    return f"{kind}[{', '.join(map(str, tensor.shape))}]"


def _is_functional(tensor: Tensor) -> bool:
    return isinstance(tensor, private.FunctionalTensor)


def _classes(operands: Sequence[Tensor]) -> list[type]:
    return list(dict.fromkeys(type(t) for t in operands if is_wrapper(t) and not _is_functional(t)))


def _rule_above(func: Any, operands: Sequence[Tensor]) -> str:
    """The rule for a Python-level function, if a class has one."""
    for cls in _classes(operands):
        rule = collect_function_rules(cls).get(func) if issubclass(cls, TensorSubclass) else None
        if rule is not None:
            return f"rule of {cls.__name__}: {describe(rule)}"
    return "" if _classes(operands) else "plain"


def _step(op: Any, operands: Sequence[Tensor]) -> str:
    """The step of the op resolution that applies."""
    declared = [cls for cls in _classes(operands) if issubclass(cls, TensorSubclass)]
    if not declared:
        return f"__torch_dispatch__ of {', '.join(cls.__name__ for cls in _classes(operands))}"
    cls = declared[0]
    if any(t._layout.cotangent for t in operands if isinstance(t, TensorSubclass)):
        return f"arithmetic of cotangents of {cls.__name__}"
    if not isinstance(op, OpOverload):
        return "higher-order op"
    try:
        step = find_step(cls, op)
    except DispatchError:
        return f"two rules of {cls.__name__}"
    rule = find_op_rule(cls, op) if step == "rule" else None
    return f"{step} of {cls.__name__}" + (f": {describe(rule)}" if rule is not None else "")


def _graph() -> fx.Graph | None:
    mode = private.get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def _last_node() -> fx.Node | None:
    graph = _graph()
    return None if graph is None else next(iter(reversed(graph.nodes)), None)


def _mark(last: fx.Node | None, op: int, is_backward: bool) -> None:
    """Marks the nodes after `last` that no inner op has marked."""
    graph = _graph()
    for node in reversed(graph.nodes) if graph is not None else ():
        if node is last:
            return
        if OP not in node.meta:
            node.meta[OP], node.meta[BACKWARD] = op, is_backward
