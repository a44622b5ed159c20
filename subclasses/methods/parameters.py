"""Leaves of autograd and Parameters: the class of their gradient, and whether an optimizer can update them.

``nn.Parameter(x)`` sets an attribute on a detached alias of ``x``; the generated ``__setattr__`` calls this module. Any
value may become a Parameter. A step of an optimizer raises before it writes to a Parameter that it cannot update.

An op that materializes a value has a plain gradient. A hook of the Parameter converts it to a cotangent of the class.
All gradients that reach a leaf can then be added, and an optimizer finds the gradient of each inner tensor. The hook
keeps the attributes of the Parameter alive, not the Parameter: a strong reference would be a cycle, and torch refuses
to swap tensors with weak references, as ``module.to(dtype)`` does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import unserializable_hook

from subclasses._torch import (
    hooks_of,
    is_legacy_batchedtensor,
    is_traceable_wrapper_subclass,
    set_hooks,
)
from subclasses.after_import import after_import
from subclasses.autograd.construct import (
    as_cotangent,
    as_gradient,
    construct,
    unwrap,
    wrap_cotangent,
)
from subclasses.dispatch.resolution import find_step
from subclasses.errors import DispatchError, one_of
from subclasses.layout import cotangent_layout, field_name, with_nested
from subclasses.spec.collect import InnerField
from subclasses.spec.values import HOOKS, OF_PARAMETER, dynamic_ints, is_differentiable, with_inners


def become_parameter(x: Any, value: bool) -> None:
    """Implements ``x._is_param = value``."""
    object.__setattr__(x, "_is_param", value)
    if not value or not _is_real(x):
        return
    if not type(x)._traits.trainable or x._layout.nested:
        _watch_optimizers()
    if type(x)._traits.trainable:
        _mark_inner_parameters(x)
        _convert_gradients(x)


def require_grad(x: Any, value: bool) -> None:
    """Implements ``x.requires_grad = value``."""
    object.__setattr__(x, "requires_grad", value)
    if value and type(x)._traits.has_leaf_cotangents and not torch.compiler.is_dynamo_compiling():
        _convert_gradients(x)


def _is_real(x: Any) -> bool:
    """Whether a value holds plain tensors, at any depth, and not a trace's tensors."""
    while is_traceable_wrapper_subclass(x):
        names, _ = x.__tensor_flatten__()
        x = getattr(x, names[0])
    return isinstance(x, Tensor) and type(x) in (Tensor, torch.nn.Parameter)


def _mark_inner_parameters(x: Any) -> None:
    """Marks the wrappers inside of a Parameter, which are its own aliases: an optimizer updates them with it."""
    for _, inner in _nested(x):
        if type(inner)._traits.trainable:
            inner.__dict__[OF_PARAMETER] = True
            _mark_inner_parameters(inner)


def _nested(x: Any) -> list[tuple[str, Any]]:
    """Returns the names and values of the differentiable inner tensors that are of a declared class."""
    nested = [
        (name, x.__dict__[name]) for name, layout in x._layout.nested if hasattr(layout.cls, "__spec__")
    ]
    return [(name, inner) for name, inner in nested if is_differentiable(inner)]


# ---- steps of optimizers -----------------------------------------------------------------------------------


@functools.cache
def _watch_optimizers() -> None:
    """Registers the check of each optimizer's step, once a process."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises DispatchError before a step writes, if it would update a Parameter that no optimizer can update."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if hasattr(type(p), "__spec__") and p.grad is not None:
                _check_can_train(p, f"{type(optimizer).__name__}.step(): a Parameter is {one_of(type(p))}")


def _check_can_train(x: Any, where: str, is_inside: bool = False) -> None:
    """Raises DispatchError if no optimizer can update a Parameter, or a value inside of it."""
    cls = type(x)
    if cls._traits.trainable:
        for name, inner in _nested(x):
            _check_can_train(inner, f"{where} with {one_of(type(inner))} as {field_name(name)}", True)
    elif why := _why_not(cls):
        raise DispatchError(
            f"{where}: an optimizer adds to it in place, and {why}",
            code="optimizer-step",
            hint=_instead(cls, is_inside),
        )


def _why_not(cls: Any) -> str:
    """Returns the reason why adding a gradient to a value in place is not an optimizer's step; empty if it is one."""
    step, spec = _find_step(cls, torch.ops.aten.add_.Tensor), cls.__spec__
    if step == "materialize":
        return "an addition to its materialized tensor would be lost"
    if step == "error":
        return "it has no rule for aten.add_.Tensor"
    if "rule" in step and cls._traits.has_cotangents and spec.fallback != "map" and not spec.has_materialize:
        return "its rule is for values, not for a gradient, whose inner tensors are derivatives"
    return ""


_find_step: Any = find_step


def _search_untraced(module: Any) -> None:
    """Excludes the search for a rule from Dynamo, which would warn of each cache: it calls ``_why_not`` in a trace."""
    global _find_step
    torch.compiler.assume_constant_result(_why_not)
    _find_step = torch.compiler.disable(find_step)  # for a trace that begins with the frame of `_why_not`


after_import("torch._dynamo", _search_untraced)


def _instead(cls: Any, is_inside: bool) -> str:
    """Returns a hint for a step that no optimizer can make."""
    spec = cls.__spec__
    metadata = [f"{f.name}=..." for f in (*spec.statics, *spec.dynamics)]
    call = f"{cls.__name__}({', '.join([*(f'self.{n}' for n in spec.inner_names), *metadata])})"
    way, trainable = f"make the inner tensors Parameters and call {call} in `forward`", ""
    if not all(_holds_integers(f) for f in spec.inners):
        trainable = (
            "; or, if an optimizer may update each inner tensor as a Parameter of its own, declare the class with "
            "trainable=True"
        )
    elif is_inside:
        way = f"let the outer class hold the inner tensors and call {call} in its rules"
    return (
        f"Freeze the Parameter with requires_grad_(False), and train plain Parameters beside it, as a low-rank adapter "
        f"does; or {way}{trainable}"
    )


def _holds_integers(field: InnerField) -> bool:
    """Whether an inner tensor of this field never has a gradient."""
    return field.dtype is not None and not (field.dtype.is_floating_point or field.dtype.is_complex)


# ---- gradients ---------------------------------------------------------------------------------------------


def _convert_gradients(x: Any) -> None:
    """Registers the hook that converts gradients of a leaf, once; it stays while a Parameter is frozen."""
    if not (x.is_floating_point() or x.is_complex()) or HOOKS in x.__dict__:
        return
    trains = x.requires_grad
    if not trains:
        object.__setattr__(x, "requires_grad", True)  # torch registers hooks on no other tensor
    x.register_hook(_converter(type(x), x.__dict__))
    x.__dict__[HOOKS] = weakref.ref(hooks_of(x))
    if not trains:
        object.__setattr__(x, "requires_grad", False)


def _converter(cls: Any, attributes: dict[str, Any]) -> Callable[[Any], Any]:
    """Returns the hook of the Parameter with these attributes."""
    spec = cls.__spec__

    @unserializable_hook  # a copy of the Parameter has its own
    def convert(grad: Any) -> Any:
        is_one = type(grad) is cls.Cotangent and not attributes["_layout"].nested
        if grad is None or is_one or is_legacy_batchedtensor(grad):  # a batch of gradients stays a batch
            return None
        grad = as_gradient(cls, grad)
        if isinstance(grad, cls):
            return mark_gradient(grad, attributes)
        # A gradient to be differentiated again stays a function of the value; an inner tensor here is raw.
        if is_traceable_wrapper_subclass(grad) or torch.is_grad_enabled():
            return None
        inners = [attributes[n] for n in spec.attributes]
        value = cls._wrap(attributes["_layout"], *inners, *[attributes[f.name] for f in spec.dynamics])
        if spec.fallback != "map" or cls._traits.pulls_back:
            return mark_gradient(
                wrap_cotangent(value, grad, [is_differentiable(t) for t in inners]), attributes
            )
        return mark_gradient(
            with_inners(value, [grad if is_differentiable(t) else t for t in inners]), attributes
        )

    return convert


def mark_gradient(grad: Any, attributes: dict[str, Any]) -> Any:
    """Returns a gradient of a Parameter with these attributes as a cotangent; converts the gradients inside, too."""
    if not attributes["_layout"].nested:
        return as_cotangent(grad)
    names = type(grad).__spec__.attributes
    gradients = dict(zip(names, unwrap(grad, names), strict=True))
    gradients |= {
        name: _convert_inner(gradients[name], attributes[name]) for name, _ in attributes["_layout"].nested
    }
    inners = [*gradients.values()]
    return construct(with_nested(cotangent_layout(grad._layout), *inners), dynamic_ints(grad), *inners)


def _convert_inner(grad: Any, x: Any) -> Any:
    """Returns the gradient of a wrapper inside of a Parameter; it is plain if the wrapper was materialized."""
    if OF_PARAMETER not in x.__dict__ or (
        is_traceable_wrapper_subclass(grad) and not isinstance(grad, type(x))
    ):
        return grad
    return mark_gradient(grad if isinstance(grad, type(x)) else wrap_cotangent(x, grad), x.__dict__)


def swap_attributes(x: Any, attributes: dict[str, Any]) -> None:
    """Implements ``x.__dict__ = attributes``, with which ``torch.utils.swap_tensors`` exchanges two values.

    It then exchanges the C++ tensors, which call the hooks, but not their lists of hooks in Python, to which the user
    adds. This makes both one list, of the value whose attributes and C++ tensor ``x`` receives.
    """
    former, hooks = x.__dict__, attributes.get(HOOKS, lambda: None)()
    object.__setattr__(x, "__dict__", attributes)
    if hooks is not None:
        former.pop(HOOKS, None)
        set_hooks(x, hooks)
