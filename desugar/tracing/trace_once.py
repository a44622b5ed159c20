"""Traces the forward in one run, where gradients are off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from desugar.flatten.inputs import Inputs
from desugar.ir.outputs import Outputs
from desugar.ir.pytree import flatten
from desugar.ir.stages import LeafFunction, Traced
from desugar.ir.values import View
from desugar.tracing import unsupported
from desugar.tracing.modes import tracing_modes
from desugar.tracing.outputs import unwrap_result
from desugar.tracing.side_effects import check_rng
from desugar.tracing.trace import Recorder, find_overlaps, run_function, traced_by


def trace_once(call: LeafFunction, inputs: Inputs, decompositions: Mapping[Any, Any]) -> Traced | None:
    """Traces the forward in one run, where gradients are off.

    Returns:
        The traced function; None if it needs two runs. They tell a tensor or generator from outside from one that the
        function makes, find inputs that overlap, and keep the views that a program takes again apart from the trace.

    Raises:
        DesugarError: The pass does not support the function (see `desugar.tracing.unsupported`).
    """
    if torch.is_grad_enabled() or inputs.captured or inputs.generators:
        return None
    env = inputs.fakes.env
    with tracing_modes(inputs.fakes.mode) as mode:
        recorder, known = _OnlyRun(call, inputs), dict(env.replacements)
        graph = recorder.trace(decompositions)
        check_rng(mode.rng)
    if recorder.needs_two_runs or env.replacements != known:
        return None
    inputs.is_sealed = True
    return traced_by(recorder, graph)


class _OnlyRun(Recorder):
    """The function that `make_fx` traces where gradients are off, with the checks of a first run.

    Attributes:
        needs_two_runs: Whether what the run found is not enough.
    """

    def __init__(self, call: LeafFunction, inputs: Inputs) -> None:
        nothing = Outputs(flatten(())[1], (), (), {})
        super().__init__(call, inputs, nothing, (), ())
        self.needs_two_runs = False

    def joint(self, primals: list[Any], tangents: list[Tensor]) -> list[Any]:
        """Returns the forward's outputs."""
        run, inputs = run_function(self.call, self.inputs, primals), self.inputs
        if (
            inputs.captured
            or inputs.generators
            or (not inputs.assumes_no_overlap and find_overlaps(run, inputs))
        ):
            self.needs_two_runs = True
            return []
        unsupported.check_run(run, inputs)
        unsupported.check_results(run)
        self.outputs, _ = unwrap_result(run)
        self.needs_two_runs = any(isinstance(value, View) for value in self.outputs.values)
        return [self.outputs.items[slot] for slot in self.outputs.returned]
