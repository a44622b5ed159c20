"""Plain operands of mapped ops: the gradient is plain, the sum of the gradients from each inner tensor's op.

PyTorch's formula for a mapped op gives a plain operand a cotangent of the class, since the op ran once for each inner
tensor. A hook of the operand makes the cotangent plain before a leaf or the operand's own node receives it.

The engine adds such a cotangent to a plain gradient of the same operand. At a value the sum has the plain gradient in
each inner tensor, and here it counts once: a sum stores its two summands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from subclasses._torch import autograd_enabled, current_transform, hooks_of
from subclasses.autograd.calling import is_called_by_engine
from subclasses.autograd.construct import as_cotangent, unwrap
from subclasses.layout import are_alike
from subclasses.spec.values import dynamic_ints, is_differentiable

# The attribute of the sum of a cotangent and a plain gradient: both summands.
_SUMMANDS = "_summands"
# The attribute of a plain non-leaf tensor: the node whose gradient its hook receives. A write makes another node.
_NODE = "_summed_by"


def sum_gradient(t: Any) -> None:
    """Makes the gradient of a plain operand of a mapped op plain, where autograd records the op."""
    if not (isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled()):
        return
    if hasattr(type(t), "__spec__") or current_transform() is not None:
        return
    with autograd_enabled():  # after a write to a view, the first read of `grad_fn` makes its node
        node, hooks = t.grad_fn, hooks_of(t) or {}
        if _summed in hooks.values() and (node is None or t.__dict__.get(_NODE) is node):
            return
        if node is not None:
            setattr(t, _NODE, node)
        handle, hooks = t.register_hook(_summed), hooks_of(t)
    before = [(i, hook) for i, hook in hooks.items() if i != handle.id]
    for i, hook in before:  # a user's hooks come after it, as they receive the plain gradient
        del hooks[i]
        hooks[i] = hook


@unserializable_hook
def _summed(gradient: Any) -> Any:
    cls: Any = type(gradient)
    if not hasattr(cls, "__spec__") or not cls._traits.is_mapped:
        return None
    cotangent, plain = _summands_of(gradient)
    summands: list[Any] = [
        t if (nested := _summed(t)) is None else nested
        for t in unwrap(as_cotangent(cotangent), cls.__spec__.attributes)
        if is_differentiable(t)
    ]
    return sum(summands[1:], start=summands[0]) if plain is None else sum(summands, start=plain)


def _summands_of(gradient: Any) -> tuple[Any, Any]:
    """Returns the two summands of a gradient, a cotangent and a plain gradient; None for an absent summand."""
    if not hasattr(type(gradient), "__spec__"):
        return None, gradient
    return gradient.__dict__.get(_SUMMANDS, (gradient, None))


def with_noted_summands(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the sum of two gradients, of which one may be plain.

    Only a plain operand gets gradients of values that differ in class or metadata: their sum is plain.
    """

    def wrapped(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        if is_called_by_engine() and _are_of_other_values(x, y):
            return _summed(x) + _summed(y)
        out = run(x, y, *args, **kwargs)
        (one, plain), (other, more) = _summands_of(x), _summands_of(y)
        if (plain is not None or more is not None) and hasattr(type(out), "__spec__"):
            out.__dict__[_SUMMANDS] = _added(one, other), _added(plain, more)
        return out

    return wrapped


def _are_of_other_values(x: Any, y: Any) -> bool:
    if not (is_mapped_cotangent(type(x)) and is_mapped_cotangent(type(y))):
        return False
    return not are_alike(x._layout, y._layout) or dynamic_ints(x) != dynamic_ints(y)


def is_mapped_cotangent(cls: Any) -> bool:
    """Whether a class is the cotangent of a mapped class."""
    return hasattr(cls, "__spec__") and cls._is_cotangent and cls._traits.is_mapped


def _added(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y
