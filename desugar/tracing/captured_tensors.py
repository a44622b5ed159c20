"""Makes a tensor from outside a trace an input of the graph when the function first uses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from desugar import _torch as torch_private
from desugar.flatten.inputs import Inputs, is_traced
from desugar.ir.values import Plain, Same, Value, Wrapper, is_constructed, wrap_value
from desugar.recording.ops import current_op_recorder
from desugar.tracing import unsupported
from desugar.tracing.checkpointing import run_op
from desugar.tracing.op_table import HANDLERS, REPLACING
from desugar.tracing.run import Detached, InputLeaf, Storages, storages_of
from subclasses.rules.registry import has_function_rule

_DETACH = (Tensor.detach, torch.detach, torch.ops.aten.detach, torch.ops.aten.detach.default)


class Capture(TorchFunctionMode):
    """Replaces tensors from outside the trace in every torch function call by inputs of the graph.

    Attributes:
        inputs: The inputs of the program; captured tensors are added to them.
        items: Functional tensors and symbolic ints, by input slot; grows with each captured tensor.
        storages: The storages of `items`, by input slot.
        arguments: The input leaves of the function's arguments.
        captured_leaves: Id of a captured tensor -> its input leaf.
        detached: Id of a result of `detach()` -> that result and the tensor that was detached.
    """

    def __init__(
        self, inputs: Inputs, items: list[Any], storages: list[Storages], arguments: list[InputLeaf]
    ) -> None:
        super().__init__()
        self.inputs, self.items, self.storages, self.arguments = inputs, items, storages, arguments
        self.captured_leaves: dict[int, InputLeaf] = {}
        self.detached: dict[int, Detached] = {}

    @torch_private.disable_dynamo
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch_private.detect_infra_mode(torch_private.ModeKey.FUNCTIONAL) is None:  # inside an op
            return func(*args, **(kwargs or {}))
        kwargs, recorder = kwargs or {}, current_op_recorder()
        if isinstance(func, torch_private.HigherOrderOperator):
            unsupported.check_while_loop(func, args)
        call = self.call
        return call(func, args, kwargs) if recorder is None else recorder.call(call, func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a torch function, with captured tensors replaced by inputs of the graph."""
        call: Any = (args, kwargs)
        args, kwargs = optree.tree_map(self.replace_leaf, call, none_is_leaf=True)
        handler = HANDLERS.get(func)
        if handler is not None and not (handler in REPLACING and has_function_rule(func, args, kwargs)):
            func, args = handler(func, args, kwargs, self.inputs)
        if isinstance(generator := kwargs.get("generator"), torch.Generator):
            self.inputs.note_generator(generator)
        result = run_op(func, args, kwargs)
        if func in _DETACH:
            self.detached[id(result)] = Detached(result, args[0])
        return result

    def replace_leaf(self, leaf: Any) -> Any:
        """Returns the input that represents a tensor from outside the trace; returns any other leaf unchanged."""
        if not isinstance(leaf, Tensor) or not is_constructed(leaf) or is_traced(leaf):
            return leaf
        if id(leaf) not in self.captured_leaves:
            # The first use may be inside vmap or grad, which do not transform a captured tensor.
            with torch_private.without_functorch():
                with torch_private.disable_current_modes():
                    value = self.inputs.add_captured(leaf)
                for slot in range(len(self.items), len(self.inputs.flat.items)):
                    self.items.append(to_functional(self.inputs.fake_items[slot]))
                input_leaf = build_input_leaf(value, self.inputs, self.items, self.arguments)
                self.storages += [storages_of(item) for item in self.items[len(self.storages) :]]
            self.captured_leaves[id(leaf)] = input_leaf
        return self.captured_leaves[id(leaf)].argument


def build_input_leaf(value: Value, inputs: Inputs, items: list[Any], arguments: list[InputLeaf]) -> InputLeaf:
    """Builds the leaf that the function receives, around functional tensors."""
    if isinstance(value, Same):
        return replace(arguments[value.index], value=value)
    root = leaf = inputs.rebuild(value, items)
    if not isinstance(value, Plain | Wrapper):
        return InputLeaf(value, root, leaf)
    if value.requires_grad and not value.is_leaf:
        with torch.enable_grad():
            leaf = NonLeaf.apply(root, value, items)
        if isinstance(value, Plain):
            items[value.index] = leaf
    return InputLeaf(value, root, leaf, leaf.grad_fn, leaf._version)


class NonLeaf(torch.autograd.Function):
    """Makes a non-leaf tensor of autograd over the same inner tensors, for an argument that is a non-leaf.

    The function may then write to the argument in place, as eager mode allows.
    """

    @staticmethod
    def forward(ctx: Any, root: Any, value: Value, items: list[Any]) -> Any:
        """Returns a new object over the tensors of `root`.

        The object is not a view of `root`: autograd forbids in-place writes to views that a custom function returns.
        """
        ctx.set_materialize_grads(False)  # the zeros would be plain where the argument is a wrapper
        if isinstance(value, Plain):
            return torch_private.FunctionalTensor(
                root.elem, torch_private.detect_infra_mode(torch_private.ModeKey.FUNCTIONAL)
            )
        return wrap_value(value, items)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Returns the gradient unchanged."""
        return gradients[0], None, None


def to_functional(primal: Any) -> Any:
    """Returns a functional tensor around a fake tensor; returns a symbolic int unchanged."""
    return torch_private.FunctionalTensor.to_functional(primal) if isinstance(primal, Tensor) else primal
