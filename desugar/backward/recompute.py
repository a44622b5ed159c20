"""Computes gradients of any type and order by running and differentiating the captured function again.

`torch.autograd.grad` over the function is a function itself, and `pipeline` compiles it. Its gradients are correct to
any order, because autograd computes them.

Eager mode does not keep all arguments of a call alive until its backward, so neither does the runtime wrapper. An
argument that the forward saves is read from the saved tensors. A leaf of autograd is read from the autograd graph. The
other arguments are weakly referenced, unless gradients of another type than the traced type are common.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from desugar.backward.emit import BackwardPlan, differentiable_leaves, first_paths, value_class
from desugar.codegen.runtime import are_batched
from desugar.codegen.unpack import Names
from desugar.errors import DesugarError
from desugar.ir.fx_utils import autograd_nodes, result_leaves
from desugar.ir.stages import (
    CompiledGraphs,
    InputSpec,
    LeafFunction,
    Origin,
    PartitionSpec,
    ProgramSpec,
    restore_autocast,
)
from desugar.ir.storage import base_of
from desugar.ir.values import Constant, Plain, Same, Value, View, Wrapper
from desugar.tracing.tangents import meets_plain_gradients
from subclasses._torch_tracing import without_lazy_bits
from subclasses.autograd.construct import as_gradient
from subclasses.errors import one_of

# ------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class CapturedFunction:
    """The captured graph as a function, with a compiler for its gradients.

    Attributes:
        call: Takes the argument leaves, returns the result.
        compile: Compiles a function that computes gradients of `call`.
    """

    call: LeafFunction
    compile: Callable[[LeafFunction], Callable[..., Any]]


def plan_recompute(spec: ProgramSpec, split: PartitionSpec, plan: BackwardPlan, names: Names) -> None:
    """Adds to a plan the objects that the forward records, so that a backward can run the function again."""
    inputs, differentiable = spec.inputs, set(differentiable_leaves(spec.interface))
    paths = first_paths(inputs.values)
    sources = {paths[slot][0] for slot in split.saved_from if slot in paths}  # of a saved intermediate
    tensors = [n for n in inputs.tensor_leaves if n not in plan.leaves]
    found_in_graph = differentiable & inputs.parameters
    meets_plain = any(meets_plain_gradients(value) for _, value in spec.interface.tangents)
    plan.referred = [n for n in tensors if n < inputs.num_arguments and n not in found_in_graph]
    plan.strong_unless_leaf = differentiable & sources
    plan.strong = {n for n in plan.referred if meets_plain or _has_no_dims(inputs, n)}
    plan.versioned = [n for n in tensors if n in sources and Origin(n) not in inputs.inference]
    slots = [v.index for v in inputs.values if isinstance(v, Constant) and v.index is not None]
    for slot in slots:
        plan.keep_other(names.slots[slot])
        plan.numbers[slot] = plan.others.index(names.slots[slot])


# -------------------------------------------------------------------------------------------- recomputation


class Recompute:
    """Computes the gradients of one program by running its function again.

    Attributes:
        spec, captured: The program, and the captured tensors that it holds.
        plan: The objects that the forward saves and records, by which the arguments of a call are found again.
        function: The captured function and its compiler.
    """

    def __init__(self, compiled: CompiledGraphs, plan: BackwardPlan, function: CapturedFunction) -> None:
        self.spec, self.captured, self.plan = compiled.spec, compiled.captured, plan
        self.function = function
        self._compiled: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._lock = threading.RLock()

    def __call__(self, ctx: Any, tangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the gradients of the arguments for incoming gradients of any type.

        Raises:
            DesugarError: The call cannot be repeated: the function draws random numbers or writes to its arguments,
                or an argument is gone or was changed since.
        """
        random_op = None if self.spec.split is None else self.spec.split.random_op
        if random_op is not None:
            raise DesugarError(
                "this backward has to run the function again, which would draw other random numbers "
                f"({random_op})",
                instead="pass gradients of the results' own types and, for second derivatives, run it in eager mode",
            )
        if self.spec.outputs.has_effects:
            raise DesugarError(
                "this backward has to run the function again, which would write to its arguments again",
                instead="return new values from the function instead of writing in place",
            )
        leaves = self._recover_arguments(ctx)
        numbers = [number for number, _ in self.spec.interface.tangents]
        present = tuple(n for n, tangent in zip(numbers, tangents, strict=True) if tangent is not None)
        arrived = tuple(
            _as_gradient(value, tangent)
            for (_, value), tangent in zip(self.spec.interface.tangents, tangents, strict=True)
            if tangent is not None
        )
        if are_batched(arrived):  # compiled code does not support vmap's batches
            with restore_autocast(self.spec.autocast):
                return None, None, *self._gradient_function(present)([*leaves, *arrived])
        with self._lock:
            compiled = self._compiled.get(present)
            if compiled is None:
                compiled = self.function.compile(self._gradient_function(present))
                self._compiled[present] = compiled
        with restore_autocast(self.spec.autocast):
            return None, None, *compiled(*leaves, *arrived)

    def _gradient_function(self, present: tuple[int, ...]) -> LeafFunction:
        """Returns a function from argument leaves and gradients of results to gradients of arguments.

        Args:
            present: The result leaves whose gradients arrive.
        """
        call, captured = self.function.call, self.captured
        differentiable, num_arguments = (
            differentiable_leaves(self.spec.interface),
            self.spec.inputs.num_arguments,
        )
        # A hidden result is the base of a view among the visible results.
        bases = {
            value.index: n
            for n, value in enumerate(self.spec.outputs.visible)
            if isinstance(value, View) and value.of == "output" and not value.detached
        }

        def gradients(flat: list[Any]) -> tuple[Any, ...]:
            leaves, tangents = flat[:num_arguments], flat[num_arguments:]
            create_graph = torch.is_grad_enabled()
            with torch.enable_grad():
                results = dict(enumerate(result_leaves(call(leaves))))
                results |= {base: base_of(results[n]) for base, n in bases.items() if base not in results}
                if create_graph:
                    _check_first_order(results.values())
                return torch.autograd.grad(
                    [results[number] for number in present],
                    [leaves[n] if n < num_arguments else captured[n - num_arguments] for n in differentiable],
                    tangents,
                    allow_unused=True,
                    create_graph=create_graph,
                )

        return gradients

    def _recover_arguments(self, ctx: Any) -> list[Any]:
        """Returns the argument leaves of the call, unchanged since.

        Raises:
            DesugarError: An argument is gone, or was changed in place or by an assignment to one of its fields.
        """
        plan = self.plan
        saved = ctx.saved_tensors if plan.saved else ()  # autograd checks that they are alive and unchanged
        leaves: list[Any] = []
        for n, value in enumerate(self.spec.inputs.values[: self.spec.inputs.num_arguments]):
            match value:
                case Same(_, index):
                    leaves.append(leaves[index])
                case Constant(_, int(index)):
                    leaves.append(ctx.others[plan.numbers[index]])
                case Constant(constant):
                    leaves.append(constant)
                case _:
                    leaves.append(self._recover_tensor(n, ctx, saved))
        for n, path, index in plan.inner:
            if not _is_same(attrgetter(".".join(path))(leaves[n]), saved[index]):
                raise DesugarError(
                    f"this backward has to run the function again, and {'.'.join(path)!r} of {self._describe(n)} has "
                    "been assigned since",
                    instead="assign it after the backward, or pass a new value",
                )
        live = [*leaves, *self.captured]
        for n, version in zip(plan.versioned, getattr(ctx, "versions", ()), strict=True):
            if live[n]._version != version:
                raise DesugarError(
                    f"this backward has to run the function again, and a tensor of size {tuple(live[n].shape)} "
                    "that it read was changed in place since",
                    instead="change it after the backward, or change a clone",
                )
        return leaves

    def _recover_tensor(self, n: int, ctx: Any, saved: Sequence[Any]) -> Any:
        """Returns argument leaf `n`: from the saved tensors, by its reference, or from the autograd graph.

        Raises:
            DesugarError: The argument is gone.
        """
        if n in self.plan.leaves:
            return saved[self.plan.leaves[n]]
        referred, differentiable = self.plan.referred, differentiable_leaves(self.spec.interface)
        leaf = ctx.alive[referred.index(n)] if n in referred else None
        leaf = leaf() if isinstance(leaf, weakref.ref) else leaf
        if leaf is None and n in differentiable:
            leaf = getattr(ctx.next_functions[differentiable.index(n)][0], "variable", None)
        if leaf is None:
            raise DesugarError(
                f"this backward has to run the function again, and {self._describe(n)} is gone",
                instead="keep the arguments until the backward has run. If code around this function made it, as "
                "before a graph break, compile that code with it, or take second derivatives in eager mode",
            )
        return leaf

    def _describe(self, n: int) -> str:
        """Describes an argument by its type, since its number in the program has no meaning for a user."""
        value = self.spec.inputs.values[n]
        return f"its argument, {one_of(value.cls if isinstance(value, Wrapper) else Tensor)},"


# ------------------------------------------------------------------------------------------------- helpers


def _is_same(part: Tensor, saved: Tensor) -> bool:
    """Returns whether an inner tensor is the saved tensor, or equals it: saved-tensor hooks may return a copy."""
    return part is saved or (part.shape == saved.shape and torch.equal(part, saved))


def _has_no_dims(inputs: InputSpec, leaf: int) -> bool:
    value = inputs.values[leaf]
    return isinstance(value, Plain) and not value.requires_grad and inputs.items[value.index].dim() == 0


def _as_gradient(value: Value, tangent: Any) -> Any:
    """Returns a tangent without lazy bits; converts a value of a structure to a cotangent."""
    if type(tangent) is Tensor:  # formulas of complex numbers and steps leave lazy bits
        return without_lazy_bits(tangent)
    cls = value_class(value)
    return tangent if cls is None else as_gradient(cls, tangent)


def _check_first_order(results: Iterable[Any]) -> None:
    """Raises if second derivatives of results would pass a custom `autograd.Function`.

    Dynamo records the function's backward with gradients off. So the terms that the backward adds to a second
    derivative in eager mode would be lost silently.
    """
    for node in autograd_nodes(results):
        made_by = getattr(type(node), "_forward_cls", None)
        if getattr(made_by, "__qualname__", "").startswith("AutogradFunctionApply."):
            raise DesugarError(
                "the gradient of a custom autograd.Function is to be differentiated, and torch.compile records its "
                "backward without gradients",
                instead="run the function in eager mode where second derivatives are needed, or pass "
                "create_graph=False",
            )
