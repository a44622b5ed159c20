"""Records which ops a traced function runs, and which nodes of the graph each op became.

Two modes record an op: the torch function mode of the trace (`Capture`), above autograd, and a dispatch mode, before a
tensor subclass handles the op. When an op ends, the nodes added to the graph since its start are marked with its
number, unless an inner op has marked them. A node of the backward belongs to the op whose autograd node was running.
Autograd numbers its nodes in the order of their creation, so each op has a range of numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as torch_private
from desugar.ir.fx_utils import autograd_nodes, tensor_leaves
from desugar.ir.values import is_wrapper
from desugar.recording.listeners import Op, Recording, current
from desugar.user_code import Line, find_line
from subclasses import TensorSubclass, strict_mode
from subclasses._torch import OpOverload, is_traceable_wrapper_subclass_type
from subclasses.dispatch.resolution import find_step
from subclasses.errors import DispatchError
from subclasses.rules.registry import collect_function_rules, describe, find_op_rule

# Keys of a node's metadata: the number of the op that the node came from; whether it belongs to that op's backward.
OP = "desugar_op"
BACKWARD = "desugar_backward"

# --------------------------------------------------------------------------------------------- the recorder


class OpRecorder:
    """Fills `recording.ops` and `recording.materialized` during one traced run."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.recording.ops.clear()
        self.recording.materialized.clear()
        self._open: list[int] = []  # the ops in progress, innermost last
        self._ranges: list[tuple[int, int, int]] = []  # (first autograd number, end of the range, op)
        self._backward: int | None = None  # the op whose autograd node is running
        self._last: fx.Node | None = None  # the last node of the graph before that autograd node

    def call(self, run: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Runs `run(func, args, kwargs)` and records it as a call of the Python-level function `func`."""
        name = torch.overrides.resolve_name(func) or getattr(func, "__qualname__", str(func))
        operands = tensor_leaves((args, kwargs))
        how = _function_rule(func, operands) if any(map(is_wrapper, operands)) else "plain"
        with self._recording(name, how, operands, find_line()):
            return run(func, args, kwargs)

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs and records an op that a tensor subclass handles."""
        operands = tensor_leaves((args, kwargs))
        with self._recording(str(func), _resolution_step(func, operands), operands, find_line()):
            return func(*args, **kwargs)

    def add_materialization(self, cls: type, op: Any) -> None:
        """Records a materializing fallback if this thread runs the recorded function."""
        if current_op_recorder() is self:
            parent = self._open[-1] if self._open else self._backward
            line = find_line() if parent is None else self.recording.ops[parent].line
            self.recording.materialized.append((cls.__name__, str(op), line))

    @contextlib.contextmanager
    def _recording(
        self, name: str, how: str, operands: Sequence[Tensor], line: Line | None
    ) -> Iterator[None]:
        """Records an op that runs inside the context."""
        ops = self.recording.ops
        parent = self._open[-1] if self._open else self._backward
        op = Op(len(ops), name, how, ", ".join(map(_show, operands)), line, parent)
        ops.append(op)
        if self._backward is not None and parent is not None:
            op.line = ops[
                parent
            ].line  # in the backward, the stack shows the line that called the compiled function
        self._open.append(op.number)
        last, start = _last_node(), torch_private.sequence_number()
        try:
            yield
        finally:
            self._open.pop()
            if self._backward is None:
                self._ranges.append((start, torch_private.sequence_number(), op.number))
            _mark_nodes_after(last, op.number, self._backward is not None)

    # ............................................................................................. backward

    @contextlib.contextmanager
    def backward(self, results: Sequence[Tensor]) -> Iterator[None]:
        """Records the backward from `results` that runs inside the context, with a pre-hook on every autograd node."""
        hooks = [
            node.register_prehook(functools.partial(self._start_backward, self._op_of(node)))
            for node in autograd_nodes(results)
        ]
        self._last = _last_node()
        try:
            yield
        finally:
            self._start_backward(None)
            for hook in hooks:
                hook.remove()

    def _op_of(self, node: Any) -> int | None:
        """Returns the innermost op that created an autograd node: inner ops end first, so their ranges come first."""
        number = node._sequence_nr()
        return next((op for start, end, op in self._ranges if start <= number < end), None)

    def _start_backward(self, op: int | None, *gradients: Any) -> None:
        """Marks the nodes of the autograd node that ran last, and starts the backward of `op`."""
        if self._backward is not None:
            _mark_nodes_after(self._last, self._backward, True)
        self._backward, self._last = op, _last_node()


class OuterOpMode(torch_private.TorchDispatchMode):
    """Records ops before a tensor subclass handles them."""

    supports_higher_order_operators = True

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op, and records it if an argument is a subclass; any other op is plain already."""
        if not any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return func(*args, **(kwargs or {}))
        return self.recorder.dispatch(func, args, kwargs or {})


_in_progress: dict[int, OpRecorder] = {}  # by id of the recording


@contextlib.contextmanager
def record_ops() -> Iterator[None]:
    """Records the ops of the function that is traced inside the context, if the compilation is recorded."""
    recording = current()
    if recording is None:
        yield
        return
    outer = _in_progress.pop(id(recording), None)
    if outer is not None:
        # A separate trace of a branch of a higher-order op, which is part of an op that is recorded already.
        try:
            yield
        finally:
            _in_progress[id(recording)] = outer
        return
    recorder = _in_progress[id(recording)] = OpRecorder(recording)
    strict_mode.watchers.append(recorder.add_materialization)
    try:
        with OuterOpMode(recorder):
            yield
    finally:
        strict_mode.watchers.remove(recorder.add_materialization)
        _in_progress.pop(id(recording), None)


def current_op_recorder() -> OpRecorder | None:
    """Returns the recorder of the traced run in this thread; None if nothing is recorded."""
    recording = current()
    return None if recording is None else _in_progress.get(id(recording))


def record_backward(results: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Records the backward that runs inside the context, if the traced run is recorded."""
    recorder = current_op_recorder()
    return contextlib.nullcontext() if recorder is None else recorder.backward(results)


# -------------------------------------------------------------------------------------------------- helpers


def _show(tensor: Tensor) -> str:
    kind = type(tensor).__name__ if is_wrapper(tensor) and not _is_functional(tensor) else "Tensor"
    return f"{kind}[{', '.join(map(str, tensor.shape))}]"


def _is_functional(tensor: Tensor) -> bool:
    return isinstance(tensor, torch_private.FunctionalTensor)


def _classes(operands: Sequence[Tensor]) -> list[type]:
    return list(dict.fromkeys(type(t) for t in operands if is_wrapper(t) and not _is_functional(t)))


def _function_rule(func: Any, operands: Sequence[Tensor]) -> str:
    """Names the rule of a class for a Python-level function.

    Returns an empty string where no class has a rule, and "plain" where no operand is a wrapper.
    """
    for cls in _classes(operands):
        rule = collect_function_rules(cls).get(func) if issubclass(cls, TensorSubclass) else None
        if rule is not None:
            return f"rule of {cls.__name__}: {describe(rule)}"
    return "" if _classes(operands) else "plain"


def _resolution_step(op: Any, operands: Sequence[Tensor]) -> str:
    """Names the step of the op resolution that applies to an op, and its class."""
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
    mode = torch_private.get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def _last_node() -> fx.Node | None:
    graph = _graph()
    return None if graph is None else next(iter(reversed(graph.nodes)), None)


def _mark_nodes_after(last: fx.Node | None, op: int, is_backward: bool) -> None:
    """Marks each node after `last` with an op, unless an inner op has marked it."""
    graph = _graph()
    for node in reversed(graph.nodes) if graph is not None else ():
        if node is last:
            return
        if OP not in node.meta:
            node.meta[OP], node.meta[BACKWARD] = op, is_backward
