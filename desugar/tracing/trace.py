"""Traces a Python function into one graph over plain tensors: the forward, or the joint graph with the backward.

The function runs twice on fake tensors. The first run (`discover`) finds the tensors from outside that the function
uses and the structure of its result. `make_fx` records the second run (`trace_graph`). The tangents are inputs of the
joint graph, so their number and structure must be known before that run, and they follow from the result. Where
gradients are off, the recorded run may be the only one (`trace_once`). Each run has these steps:

1. The inputs are plain inner tensors, which become functional tensors.
2. The subclasses are rebuilt around them, and the function runs.
3. The results are unwrapped.
4. If a result requires grad, `torch.autograd.grad` runs, with subclasses rebuilt around the tangents.

The recorded graph holds plain tensors only. Functionalization is below the subclasses, so it finds mutation and
aliasing among *inner* tensors. AOTAutograd functionalizes inner tensors, too. But its synthetic bases and its runtime
epilogue use metadata of mutated inputs and of aliases that it collects by outer tensor before the trace. In
`aot_dispatch_subclass` it collects metadata by inner tensor as well, for the partitioner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from desugar import _torch as torch_private
from desugar.errors import DesugarError
from desugar.flatten.inputs import Inputs
from desugar.ir.fx_utils import depends_on_offsets, multiply_in_pairs
from desugar.ir.stages import GradientCall, LeafFunction, Outputs, Traced
from desugar.ir.values import Flat, Value, View, requires_grad
from desugar.recording.ops import record_backward, record_ops
from desugar.tracing import unsupported
from desugar.tracing.captured_tensors import Capture, build_input_leaf, to_functional
from desugar.tracing.modes import tracing_modes
from desugar.tracing.outputs import unwrap_result
from desugar.tracing.run import InputLeaf, Run, from_functional, identity, storages_of
from desugar.tracing.side_effects import check_rng, end_effects, start_effects
from desugar.tracing.tangents import (
    as_gradient_of_parameter,
    build_tangent,
    make_tangents,
    record_backward_calls,
    recorded_tensors,
    resolve_calls,
    unwrap_gradient,
)

# ------------------------------------------------------------------------------------- running the function


def run_function(call: LeafFunction, inputs: Inputs, primals: Sequence[Any]) -> Run:
    """Rebuilds the arguments around functional tensors and calls the function on them."""
    items = [to_functional(primal) for primal in primals]
    versions = [item._version if isinstance(item, Tensor) else 0 for item in items]
    input_leaves: list[InputLeaf] = []
    for value in inputs.values:
        input_leaves.append(build_input_leaf(value, inputs, items, input_leaves))
        if len(input_leaves) - 1 in inputs.parameters:
            input_leaves[-1].argument._is_param = True  # isinstance(leaf, nn.Parameter) reads it
    storages = [storages_of(item) for item in items]
    arguments, captured = input_leaves[: inputs.num_arguments], input_leaves[inputs.num_arguments :]
    capture = Capture(inputs, items, storages, arguments)
    capture.captured_leaves = {id(t): leaf for t, leaf in zip(inputs.captured, captured, strict=True)}
    tokens = start_effects()
    with capture, unsupported.restored_grad_mode():
        result = call([leaf.argument for leaf in arguments])
        result = optree.tree_map(capture.replace_leaf, result, none_is_leaf=True)
    end_effects()
    input_leaves += [capture.captured_leaves[id(tensor)] for tensor in inputs.captured[len(captured) :]]
    versions += [0] * (len(items) - len(versions))
    return Run(items, versions, storages, input_leaves, result, tuple(tokens.values()), capture.detached)


# --------------------------------------------------------------------------------------------- the two runs


def discover(call: LeafFunction, inputs: Inputs) -> Outputs:
    """Runs the function once: captures tensors from outside, checks the run, returns the result's structure.

    Raises:
        DesugarError: Desugaring does not support the function (see `desugar.tracing.unsupported`). No argument was
            changed.
    """
    with tracing_modes(inputs.mode) as mode, inputs.mode.shape_env.ignore_fresh_unbacked_symbols():
        run = run_function(call, inputs, inputs.primals())
        check_rng(mode.rng)
        unsupported.check_run(run, inputs)
        outputs, *_ = unwrap_result(run)
    inputs.is_sealed = True
    return outputs


# The op by which some formulas of autograd make a zero gradient.
_ZEROS = torch.ops.aten._efficientzerotensor.default


def trace_graph(
    call: LeafFunction, inputs: Inputs, outputs: Outputs, decompositions: Mapping[Any, Any]
) -> Traced:
    """Traces the function into a graph: the forward, or the joint graph if a result requires grad.

    Raises:
        DesugarError: Desugaring does not support the function (see `desugar.tracing.unsupported`), or the graph makes a
            zero gradient and a size is symbolic.
    """
    differentiable = [
        (number, value)
        for number, value in enumerate(outputs.values)
        if torch.is_grad_enabled() and requires_grad(value)
    ]
    with tracing_modes(inputs.mode):
        tangents, tangent_items = make_tangents(differentiable, outputs)
        recorder = _Recorder(call, inputs, outputs, tangents, tangent_items)
        graph = recorder.trace(decompositions)
    return _traced(recorder, graph)


def trace_once(call: LeafFunction, inputs: Inputs, decompositions: Mapping[Any, Any]) -> Traced | None:
    """Traces the forward in one run, where gradients are off.

    Returns:
        The traced function; None if it needs two runs: it uses a tensor or generator from outside, returns a view, or
        replaces a symbol. The first of two runs captures these tensors, and takes the views outside of the trace.

    Raises:
        DesugarError: Desugaring does not support the function (see `desugar.tracing.unsupported`).
    """
    env, recorder = inputs.mode.shape_env, _Recorder(call, inputs)
    known = dict(env.replacements)
    try:
        with tracing_modes(inputs.mode) as mode:
            graph = recorder.trace(decompositions)
            check_rng(mode.rng)
    except _TwoRunsNeeded:
        return None
    if env.replacements != known:
        return None
    inputs.is_sealed = True
    return _traced(recorder, graph)


def _traced(recorder: _Recorder, graph: GraphModule) -> Traced:
    """Runs the passes over the graph of a recorder, and returns the traced function."""
    inputs = recorder.inputs
    calls = resolve_calls(graph, recorder.calls)
    unsupported.check_constants(graph)
    offsets_matter = inputs.offsets_matter or depends_on_offsets(graph)
    multiply_in_pairs(graph)
    graph.graph.set_codegen(CodeGen())
    graph.graph.eliminate_dead_code()
    graph.recompile()
    if graph.graph.find_nodes(op="call_function", target=_ZEROS) and inputs.spec().has_symbols:
        raise DesugarError(
            "a zero gradient would be traced with constant sizes, and the sizes of this call are symbols",
            instead="compile with dynamic=False",
        )
    unsupported.check_higher_order_randomness(graph)
    return Traced(
        recorder.outputs,
        len(recorder.outputs.positions),
        recorder.tangents,
        recorder.tangent_items,
        tuple(recorder.grads),
        calls,
        offsets_matter,
        graph=graph,
    )


class _TwoRunsNeeded(Exception):
    """Raised in the recorded run if the function needs another run before it."""


class _Recorder:
    """The function that `make_fx` traces.

    Attributes:
        call, inputs, tangents: The function, its inputs, and (output leaf, value) of each tangent.
        tangent_items: The fake tensors of the tangents, by tangent slot.
        expected: The outputs of the first run; None if this run is the only one.
        outputs: The outputs of the traced run.
        grads: (input leaf, value of its gradient) for each input leaf that requires grad.
        calls: The recorded calls of backwards of Python autograd functions.
    """

    def __init__(
        self,
        call: LeafFunction,
        inputs: Inputs,
        expected: Outputs | None = None,
        tangents: tuple[tuple[int, Value], ...] = (),
        tangent_items: tuple[Tensor, ...] = (),
    ) -> None:
        self.call, self.inputs, self.tangents, self.tangent_items = call, inputs, tangents, tangent_items
        self.expected = expected
        self.outputs: Outputs
        self.grads: list[tuple[int, Value | None]] = []
        self.calls: list[GradientCall] = []

    def trace(self, decompositions: Mapping[Any, Any]) -> GraphModule:
        """Returns the graph of :meth:`joint`."""

        # make_fx names the graph's inputs after these parameters.
        def joint(primals: list[Any], tangents: list[Tensor]) -> list[Any]:
            return self.joint(primals, tangents)

        torch_private.build_powers()
        with record_ops():
            traced = torch_private.make_fx(joint, decomposition_table=dict(decompositions))
            return traced(self.inputs.primals(), list(self.tangent_items))

    def joint(self, primals: list[Any], tangents: list[Tensor]) -> list[Any]:
        """Returns the forward's outputs, then gradients, then the recorded gradients of Python autograd functions."""
        run = run_function(self.call, self.inputs, primals)
        if self.expected is None:
            if self.inputs.captured or self.inputs.generators:
                raise _TwoRunsNeeded
            unsupported.check_run(run, self.inputs)
        outputs, leaves, items = unwrap_result(run)
        if self.expected is not None:
            unsupported.check_same_structure(self.expected, outputs)
            outputs = outputs.with_views_of(self.expected)
        elif any(isinstance(value, View) for value in outputs.values):
            raise _TwoRunsNeeded
        self.outputs = outputs
        forward = [self.outputs.items[slot] for slot in self.outputs.positions]
        return forward + self._backward(run, leaves, items, tangents) if self.tangents else forward

    def _backward(
        self, run: Run, leaves: list[Any], output_items: list[Any], tangents: list[Tensor]
    ) -> list[Any]:
        items = [to_functional(tangent) for tangent in tangents]
        result_tangents = [
            build_tangent(value, items, leaves[number], output_items) for number, value in self.tangents
        ]
        differentiable = [n for n, value in enumerate(self.inputs.values) if requires_grad(value)]
        if not differentiable:
            raise DesugarError(
                "a result requires grad because of a tensor that the function makes, and no input does",
                instead="make parameters outside the function, where their gradients can be seen, or detach the result",
            )
        results = [leaves[number] for number, _ in self.tangents]
        with record_backward(results), record_backward_calls(results) as self.calls:
            roots = [run.input_leaves[number].root for number in differentiable]
            gradients = torch.autograd.grad(results, roots, result_tangents, allow_unused=True)
        flat, in_use = Flat(), {identity(item) for item in (*run.items, *items)}
        for number, root_gradient in zip(differentiable, gradients, strict=True):
            leaf = run.input_leaves[number].argument
            gradient = (
                as_gradient_of_parameter(leaf, root_gradient)
                if number in self.inputs.parameters
                else root_gradient
            )
            value = None if gradient is None else unwrap_gradient(gradient, flat, in_use)
            self.grads.append((number, value))
        return [*map(from_functional, flat.items), *recorded_tensors(self.calls)]
