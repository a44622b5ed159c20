"""`torch.compile(fn, backend="desugar")`: the pass behind Dynamo.

Dynamo hands over a graph of outer ops and real arguments, and checks the signature itself. The pass fakes the
arguments with Dynamo's own fake mode, so that what it assumes of sizes becomes Dynamo's guards, and emits a
wrapper without checks. What it does not take goes to PyTorch's AOTAutograd, with the reason logged.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private
from desugar.arguments import Unpacking
from desugar.artifacts import recorded
from desugar.assigning import break_at_assignments
from desugar.compilers import choose_backend
from desugar.differentiation import Again
from desugar.errors import DesugarError
from desugar.fakes import Fakes, check_memory
from desugar.inputs import DynamicPolicy, Inputs, TraceAgain
from desugar.pipeline import compile_again
from desugar.program import run_stages, wrap_program
from desugar.signature import State

log = logging.getLogger("desugar")


def dynamo_backend(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one Dynamo graph.

    Args:
        gm: The graph, over outer tensors.
        example_inputs: Real tensors and subclasses, and symbolic ints.
        mode: As for `torch.compile`.
        options: `{"backend": "eager"}` runs the plain graphs as they are; other options are Inductor's.

    Returns:
        A function of the graph's arguments.
    """
    rest = dict(options or {})
    inner = rest.pop("backend", "inductor")
    backend = choose_backend(inner, mode, rest)
    try:
        return _compile(gm, example_inputs, backend)
    except TraceAgain as error:
        log.warning("AOTAutograd compiles this graph instead: %s", error.reason)
        return _stock(inner)(gm, example_inputs)
    except DesugarError as error:
        if error.stock_is_wrong:
            raise
        log.warning("AOTAutograd compiles this graph instead: %s", error)
        return _stock(inner)(gm, example_inputs)


def _compile(gm: fx.GraphModule, example_inputs: list[Any], backend: Any) -> Callable[..., Any]:
    if backend.reads_memory:
        check_memory(example_inputs)
    context = private.TracingContext.try_get()
    mode = context.fake_mode if context is not None else private.detect_fake_mode(example_inputs)
    fakes = Fakes(mode.shape_env, mode) if mode is not None else Fakes()
    inputs = Inputs(fakes, DynamicPolicy())
    leaves = list(example_inputs)
    inputs.add_faked(leaves, [_fake(leaf, fakes.mode, context) for leaf in leaves])
    unpacking, _ = Unpacking.of(tuple(range(len(leaves))), {})
    again = Again(lambda traced: gm(*traced), functools.partial(compile_again, backend=backend))
    with recorded(gm, "a graph of torch.compile", tuple(leaves), {}):
        stages = run_stages(again, inputs, backend)
        state = State(torch.is_inference_mode_enabled())
        program = wrap_program(stages, inputs, unpacking, leaves, state, trusted=True)
    run = program.run

    def compiled(*args: Any) -> Any:
        return run(args, {})

    compiled.program = program  # type: ignore[attr-defined]
    return compiled


def _fake(leaf: Any, mode: Any, context: Any) -> Any:
    """The fake of one argument, with the symbols and sources that Dynamo gave it."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, private.FakeTensor):
        return leaf
    known = context.tensor_to_context.get(leaf) if context is not None else None
    fake = mode.from_tensor(leaf, symbolic_context=known, source=known.tensor_source if known else None)
    return fake.detach() if fake.requires_grad else fake


def _stock(inner: Any) -> Callable[..., Any]:
    """PyTorch's own backend for the same compiler."""
    if inner == "inductor":
        return private.lookup_backend("inductor")
    if inner == "eager":
        return private.lookup_backend("aot_eager")
    return private.aot_autograd(fw_compiler=inner)


break_at_assignments(dynamo_backend)
