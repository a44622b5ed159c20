"""Tensors from outside a trace, which become inputs the moment the function touches them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from desugar import _torch as private
from desugar.frontend.inputs import Inputs, is_traced
from desugar.frontend.storage_offsets import depends_on_offset
from desugar.ir.pytree import flatten
from desugar.ir.values import Plain, Same, Value, Wrapper, is_whole, wrap_value
from desugar.recording.ops import current_op_recorder
from desugar.tracing import unsupported
from desugar.tracing.checkpointing import run_op
from desugar.tracing.decompositions import as_in_eager_mode
from desugar.tracing.run import Entered, Storages, storages_of
from desugar.tracing.scalar_indexing import index_by_numbers


class Capture(TorchFunctionMode):
    """Turns tensors from outside the trace into inputs when a torch function first touches them."""

    def __init__(
        self, inputs: Inputs, items: list[Any], storages: list[Storages], arguments: list[Entered]
    ) -> None:
        super().__init__()
        self.inputs, self.items, self.storages, self.arguments = inputs, items, storages, arguments
        self.leaves: dict[int, Entered] = {}

    @private.disable_dynamo
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if private.detect_infra_mode(private.ModeKey.FUNCTIONAL) is None:  # an op's own workings
            return func(*args, **(kwargs or {}))
        kwargs, recorder = kwargs or {}, current_op_recorder()
        if isinstance(func, private.HigherOrderOperator):
            unsupported.check_loop(func, args)
        if recorder is None:
            return self.call(func, args, kwargs)
        return recorder.call(self.call, func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of torch's on stand-ins for tensors from outside."""
        unsupported.check_call(func)
        call: Any = (args, kwargs)
        args, kwargs = optree.tree_map(self.replace, call, none_is_leaf=True)
        func, args = index_by_numbers(func, args)
        self.inputs.fakes.offsets_matter |= depends_on_offset(func, args, kwargs)
        unsupported.check_retained(func, args)
        unsupported.check_write(func, args, kwargs)
        unsupported.check_sparse(func, args, kwargs, self.inputs.made)
        if isinstance(generator := kwargs.get("generator"), torch.Generator):
            self.inputs.note_generator(generator)
        func, args = as_in_eager_mode(func, args, kwargs)
        result = run_op(func, args, kwargs)
        made = result if isinstance(result, list | tuple) else [result]
        self.inputs.made.extend(weakref.ref(tensor) for tensor in made if isinstance(tensor, Tensor))
        return result

    def replace(self, leaf: Any) -> Any:
        """The traced stand-in of a tensor from outside; anything else as it is."""
        if not isinstance(leaf, Tensor) or not is_whole(leaf):
            return leaf
        if is_traced(leaf):
            return leaf
        if id(leaf) not in self.leaves:
            with private.without_functorch():  # it may be met inside vmap or grad, and is no part of those
                with private.disable_current_modes():
                    value = self.inputs.add_captured(leaf)
                for slot in range(len(self.items), len(self.inputs.flat.items)):
                    self.items.append(functional(self.inputs.fake_items[slot]))
                entered = enter(value, self.inputs, self.items, self.arguments)
                self.storages += [storages_of(item) for item in self.items[len(self.storages) :]]
            self.leaves[id(leaf)] = entered
        return self.leaves[id(leaf)].leaf

    def replace_result(self, result: Any) -> Any:
        """What the function returned, with stand-ins for tensors from outside."""
        leaves, treespec = flatten(result)
        return treespec.unflatten([self.replace(leaf) for leaf in leaves])


def enter(value: Value, inputs: Inputs, items: list[Any], arguments: list[Entered]) -> Entered:
    """A leaf as the function gets it, rebuilt around functional tensors."""
    if isinstance(value, Same):
        return replace(arguments[value.index], value=value)
    root = leaf = inputs.rebuild(value, items)
    if not isinstance(value, Plain | Wrapper):
        return Entered(value, root, leaf)
    if value.requires_grad and not value.is_leaf:
        with torch.enable_grad():
            leaf = NonLeaf.apply(root, value, items)
        if isinstance(value, Plain):
            items[value.index] = leaf
    return Entered(value, root, leaf, leaf.grad_fn, leaf._version)


class NonLeaf(torch.autograd.Function):
    """The same tensors with a history, as the argument has one: writing to it in place is allowed, as there."""

    @staticmethod
    def forward(ctx: Any, root: Any, value: Value, items: list[Any]) -> Any:
        """A further object around what `root` is made of; no view of it, for views made here are read-only."""
        if isinstance(value, Plain):
            return private.FunctionalTensor(root.elem, private.detect_infra_mode(private.ModeKey.FUNCTIONAL))
        return wrap_value(value, items)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient, as it came."""
        return gradients[0], None, None


def functional(primal: Any) -> Any:
    """A functional tensor around a fake one; a symbolic int as it is."""
    return private.FunctionalTensor.to_functional(primal) if isinstance(primal, Tensor) else primal
