"""Rules for composite ops above autograd.

PyTorch decomposes a composite op (``linear``, ``matmul``, ``reshape``, ...) before dispatch, except in inference mode.
For a rule on one to run in every mode, the Python-level functions that call the op are intercepted too. One function
may call several ops, as ``torch.max`` does. PyTorch's own overload resolution decides which one, and a call of an op
without a rule continues without interception.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import (
    OpOverload,
    OpOverloadPacket,
    any_requires_grad,
    apply_function,
    is_composite,
    resolve_overload,
    schema_of,
    storage_key,
)
from subclasses._torch_tracing import functional_storage_key
from subclasses.autograd.above import call, call_open
from subclasses.autograd.python_functions import python_functions
from subclasses.errors import SpecError
from subclasses.spec.values import innermost, is_declared, lies_within, tensors_in

FindRule = Callable[[OpOverload], Callable[..., Any] | None]


def check_interceptable(cls: type, op: OpOverload) -> None:
    """Raises SpecError if a composite op has no Python-level function that can be intercepted."""
    if not python_functions(op):
        raise SpecError(
            f"{cls.__name__}: {op} is composite: PyTorch decomposes it before a rule is called, and no function of "
            "torch, torch.Tensor, torch.nn.functional or torch.linalg calls it",
            code="rule-not-called",
            hint="write rules for the ops that it decomposes to",
        )


def intercept_packet(packet: OpOverloadPacket, find: FindRule) -> Callable[..., Any]:
    """Returns the rule for the functions of a packet: it calls the rule of the overload to which a call resolves.

    Args:
        packet: the packet that the functions call.
        find: returns the rule of a class for an overload, or None.
    """

    def intercepted(func: Any, *args: Any, **kwargs: Any) -> Any:
        resolved = _resolve_call(packet, args, kwargs)
        # An overload that is not decomposed is dispatched to the class below autograd, where its views are views.
        rule = None if resolved is None or not is_composite(resolved[0]) else find(resolved[0])
        if resolved is None or rule is None:
            return call(func, (), args, kwargs)
        op, args, kwargs = resolved
        operands = [x for x in tensors_in(args, kwargs) if is_declared(x)]
        # The rule runs above autograd here. Open wrappers keep gradients when it reads raw inner tensors.
        if torch.is_grad_enabled():
            out = call_open(partial(rule, op), args, kwargs, is_declared)
        else:
            out = rule(op, *args, **kwargs)
        return out if schema_of(op).is_mutable else _with_shared_memory(out, operands)

    return intercepted


class SharesMemory(torch.autograd.Function):
    """Returns an alias of a rule's result that shares memory with an operand and is not a view to autograd.

    A write to the result would change the operand and not its gradient. PyTorch refuses a write to a view that an
    autograd function returns, and its error suggests to clone it.
    """

    @staticmethod
    def forward(x: Any) -> Any:
        """Returns an alias."""
        return torch.ops.aten.alias.default(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Returns the cotangent as it is."""
        return cotangents[0]


def _with_shared_memory(out: Any, operands: list[Any]) -> Any:
    """Returns a rule's results; PyTorch refuses a write to each of them that shares memory with an operand."""
    if isinstance(out, list | tuple):
        return type(out)(_with_shared_memory(x, operands) for x in out)
    if not (isinstance(out, Tensor) and torch.is_grad_enabled() and any_requires_grad(out)) or out._is_view():
        return out
    if any(x is out for x in operands) or not any(lies_within(out, x) for x in operands):
        return out
    # AOTAutograd traces a write that was allowed on fake tensors, and would remake an alias as a view.
    is_traced = any(functional_storage_key(t) != storage_key(t) for t in innermost(out))
    return out if is_traced else apply_function(SharesMemory, out)


def _resolve_call(packet: OpOverloadPacket, args: Any, kwargs: Any) -> tuple[OpOverload, Any, Any] | None:
    """Returns the overload that a Python-level call resolves to, and the arguments as dispatch would pass them."""
    # The first parameter of Python-level functions is "input"; schemas have other names.
    if "input" in kwargs and not args:
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    op = resolve_overload(packet, args, kwargs)
    if op is None and len(args) > 1:
        # Methods accept sizes as separate arguments: x.reshape(2, 3).
        args = (args[0], args[1:])
        op = resolve_overload(packet, args, kwargs)
    if op is not None and any(at := _ints_for_bools(op, args)):
        # The dispatcher accepts an int as a bool; PyTorch's parser does not: x.var(0) passes a dimension.
        listed = tuple([a] if is_int else a for a, is_int in zip(args, at, strict=True))
        if (other := resolve_overload(packet, listed, kwargs)) is not None:
            op, args = other, listed
    return None if op is None else (op, *_normalize_arguments(op, args, kwargs))


def _ints_for_bools(op: OpOverload, args: Any) -> list[bool]:
    """Returns for each positional argument whether it is an int where the op takes a bool."""
    types = [str(a.type) for a in schema_of(op).arguments]
    return [type_ == "bool" and type(a) is int for type_, a in zip(types, args, strict=False)]


def _normalize_arguments(op: OpOverload, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Passes arguments by position, except keyword-only ones."""
    named, placed = dict(kwargs), list(args)
    by_position = [a for a in schema_of(op).arguments if not a.kwarg_only]
    last = max((i for i, a in enumerate(by_position) if a.name in named), default=-1)
    for a in by_position[len(args) : last + 1]:
        placed.append(named.pop(a.name) if a.name in named else a.default_value)
    return tuple(placed), named
