"""Gradients of any kind, to any order: the function is differentiated again, from the arguments of the call.

`torch.autograd.grad` over the function is a function like any other, and the pass compiles it. Its own gradients are
right to any order, for autograd itself wrote them.

The arguments are not kept alive for that, since eager mode would not keep all of them either. What the forward saved
anyway comes from there, a leaf from the autograd graph, the rest by weak reference.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from desugar.codegen.runtime import are_batched
from desugar.errors import DesugarError
from desugar.frontend.autocast import AutocastState, entering
from desugar.frontend.inputs import Inputs
from desugar.ir.fx_utils import first_random, output_nodes
from desugar.ir.pytree import result_leaves
from desugar.ir.stages import FromForward, Partitioned
from desugar.ir.storage import base_of
from desugar.ir.values import Constant, Plain, Same, View, Wrapper
from desugar.tracing.trace import LeafFunction
from desugar.tracing.unsupported import check_first_order
from desugar.wrapper.backward import BackwardPlan, differentiable_leaves, first_paths
from desugar.wrapper.results import Parts

# ------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class Again:
    """What it takes to differentiate the function again.

    Attributes:
        call: The function, from argument leaves to its result.
        compile: Compiles a function that computes gradients.
    """

    call: LeafFunction
    compile: Callable[[LeafFunction], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """How the argument leaves of a call are found again in its backward.

    Attributes:
        saves: Whether the forward saves something: then autograd tells whether that is still there and unchanged.
        saved: Input leaf -> place among the saved tensors, for those saved whole.
        referred: Argument leaves that are neither saved nor in the autograd graph: a weak reference.
        held: Those of them that are held if they are no leaves, for eager mode holds what leads to them.
        versioned: Leaves that the saved values were computed from and that are not saved: their version.
        numbers: Slots of ints that are arguments.
        constants: Argument leaf -> what it is, for those that are constants.
    """

    saves: bool
    saved: Mapping[int, int]
    referred: tuple[int, ...]
    held: frozenset[int]
    versioned: tuple[int, ...]
    numbers: tuple[int, ...]
    constants: Mapping[int, Any]


def plan_recompute(parts: Parts, plan: BackwardPlan) -> RecomputePlan:
    """What the forward is to note besides what it saves."""
    assert parts.partitioned is not None
    inputs, leaves = parts.inputs, parts.leaves
    differentiable, live = set(differentiable_leaves(parts.traced)), [*leaves, *inputs.captured]
    sources = sources_of_saved(inputs, parts.partitioned)
    tensors = [n for n in tensor_leaves(inputs) if n not in plan.leaves]
    found_in_graph = {n for n in differentiable if isinstance(live[n], nn.Parameter)}
    return RecomputePlan(
        bool(plan.saved),
        plan.leaves,
        tuple(n for n in tensors if n < len(leaves) and n not in found_in_graph),
        frozenset(differentiable & sources),
        tuple(n for n in tensors if n in sources and not live[n].is_inference()),
        tuple(v.index for v in inputs.values if isinstance(v, Constant) and v.index is not None),
        {n: leaf for n, leaf in enumerate(leaves) if isinstance(inputs.values[n], Constant)},
    )


# ------------------------------------------------------------------------------------- differentiating again


class Recompute:
    """The function of one program, differentiated again.

    Attributes:
        inputs, traced: What was traced.
        plan: How the arguments of a call are found again.
        again: The function and its compiler.
        autocast: The state under which the forward ran.
    """

    def __init__(self, parts: Parts, plan: RecomputePlan, again: Again, autocast: AutocastState) -> None:
        assert parts.partitioned is not None
        self.inputs, self.traced, self.plan = parts.inputs, parts.traced, plan
        self.again, self.autocast = again, autocast
        self._random = first_random(parts.partitioned.forward)
        self._compiled: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._lock = threading.RLock()

    def __call__(self, ctx: Any, tangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradients by differentiating the function again, for gradients of any kind.

        Raises:
            DesugarError: The call cannot be repeated: it draws random numbers, or an argument is gone or was
                changed since.
        """
        if self._random is not None:
            raise DesugarError(
                f"this backward has to run the function again, which would draw other random numbers ({self._random})",
                instead="pass gradients of the results' own types and, for second derivatives, run it in eager mode",
            )
        if self.traced.outputs.has_effects:
            raise DesugarError(
                "this backward has to run the function again, which would write to its arguments again",
                instead="return new values from the function instead of writing in place",
            )
        leaves = self._recover(ctx)
        numbers = [number for number, _ in self.traced.tangents]
        present = tuple(n for n, tangent in zip(numbers, tangents, strict=True) if tangent is not None)
        given = tuple(tangent for tangent in tangents if tangent is not None)
        if are_batched(given):  # nothing compiled takes them
            with entering(self.autocast):
                return None, None, *self._gradients_of(present)([*leaves, *given])
        with self._lock:
            again = self._compiled.get(present)
            if again is None:
                again = self._compiled[present] = self.again.compile(self._gradients_of(present))
        with entering(self.autocast):
            return None, None, *again(*leaves, *given)

    def _gradients_of(self, present: tuple[int, ...]) -> LeafFunction:
        """The function from argument leaves, then gradients of results, to gradients of arguments."""
        call, captured = self.again.call, self.inputs.captured
        wanted, num_arguments = differentiable_leaves(self.traced), self.inputs.num_arguments
        # What hidden results are: the bases of views that the user sees.
        bases = {
            value.index: n
            for n, value in enumerate(self.traced.outputs.visible)
            if isinstance(value, View) and value.of == "output" and not value.detached
        }

        def gradients(flat: list[Any]) -> tuple[Any, ...]:
            leaves, tangents = flat[:num_arguments], flat[num_arguments:]
            twice = torch.is_grad_enabled()
            with torch.enable_grad():
                results = dict(enumerate(result_leaves(call(leaves))))
                results |= {base: base_of(results[n]) for base, n in bases.items() if base not in results}
                if twice:
                    check_first_order(results.values())
                return torch.autograd.grad(
                    [results[number] for number in present],
                    [leaves[n] if n < num_arguments else captured[n - num_arguments] for n in wanted],
                    tangents,
                    allow_unused=True,
                    create_graph=twice,
                )

        return gradients

    def _recover(self, ctx: Any) -> list[Any]:
        """The argument leaves of the call, as they were."""
        plan = self.plan
        saved = ctx.saved_tensors if plan.saves else ()
        leaves: list[Any] = []
        for n, value in enumerate(self.inputs.values[: self.inputs.num_arguments]):
            match value:
                case Same(_, index):
                    leaves.append(leaves[index])
                case Constant(_, int(index)):
                    leaves.append(ctx.numbers[plan.numbers.index(index)])
                case Constant():
                    leaves.append(plan.constants[n])
                case _:
                    leaves.append(self._recover_tensor(n, ctx, saved))
        live = [*leaves, *self.inputs.captured]
        for n, version in zip(plan.versioned, getattr(ctx, "versions", ()), strict=True):
            if live[n]._version != version:
                raise DesugarError(
                    f"this backward has to run the function again, and a tensor of size {tuple(live[n].shape)} "
                    "that it read was changed in place since",
                    instead="change it after the backward, or change a clone",
                )
        return leaves

    def _recover_tensor(self, n: int, ctx: Any, saved: Sequence[Any]) -> Any:
        """Argument leaf `n`: as saved, or if it is still there, or from the autograd graph, where leaves live on."""
        if n in self.plan.saved:
            return saved[self.plan.saved[n]]
        referred, differentiable = self.plan.referred, differentiable_leaves(self.traced)
        leaf = ctx.alive[referred.index(n)] if n in referred else None
        leaf = leaf() if isinstance(leaf, weakref.ref) else leaf
        if leaf is None and n in differentiable:
            leaf = getattr(ctx.next_functions[differentiable.index(n)][0], "variable", None)
        if leaf is None:
            raise DesugarError(
                f"this backward has to run the function again, and its argument {n} is gone",
                instead="keep the arguments until the backward has run",
            )
        return leaf


# ------------------------------------------------------------------------------------------------- helpers


def tensor_leaves(inputs: Inputs) -> list[int]:
    """Input leaves that are tensors."""
    return [n for n, value in enumerate(inputs.values) if isinstance(value, Plain | Wrapper)]


def sources_of_saved(inputs: Inputs, partitioned: Partitioned) -> set[int]:
    """Input leaves that a saved intermediate was computed from."""
    outputs = output_nodes(partitioned.forward)
    stack = [outputs[s.index] for s in partitioned.backward_inputs if isinstance(s, FromForward)]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    paths = first_paths(inputs.values)
    placeholders = partitioned.forward.graph.find_nodes(op="placeholder")
    return {paths[n][0] for n, node in enumerate(placeholders) if node in seen and n in paths}
