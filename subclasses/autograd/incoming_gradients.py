"""Checks of the gradients that a caller of a backward gives, and a hook returns: cotangents, not values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import skip_frames
from subclasses.autograd.gradient_errors import cotangent_error, value_gradient_error

# The functions that take gradients, with the place and the name of the argument.
_TAKING: dict[Any, tuple[int, str]] = {
    Tensor.backward: (1, "gradient"),
    torch.autograd.backward: (1, "grad_tensors"),
    torch.autograd.grad: (2, "grad_outputs"),
}
TAKES_GRADIENTS = frozenset({*_TAKING, Tensor.register_hook})


def check_gradients(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of one of these functions; a hook checks what it returns from now on.

    Raises:
        DispatchError: a gradient is a value in place of a cotangent, or is plain and the value represents no plain
            tensor: a formula that multiplies it by another value would compute a value, which is no gradient.
    """
    if func is Tensor.register_hook:
        return (args[0], *map(_checking, args[1:])), {name: _checking(hook) for name, hook in kwargs.items()}
    place, name = _TAKING[func]
    given = kwargs[name] if name in kwargs else args[place] if len(args) > place else None
    outputs = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
    for gradient in _listed(given):
        _check_no_value(gradient)
    for output, gradient in zip(_listed(outputs), _listed(given), strict=False):
        _check_fits(output, gradient)
    return args, kwargs


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else (given,)


def _check_no_value(gradient: Any) -> None:
    cls = type(gradient)
    if isinstance(gradient, Tensor) and hasattr(cls, "__spec__") and cls is not cls.Cotangent:
        raise value_gradient_error(cls)


def _check_fits(output: Any, gradient: Any) -> None:
    cls = type(output)
    if type(gradient) is not Tensor or not (isinstance(output, Tensor) and hasattr(cls, "__spec__")):
        return
    if not cls._traits.is_mapped and not cls._traits.pulls_back:
        raise cotangent_error(cls, gradient)


def _checking(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(hook)
    def checking(gradient: Any) -> Any:
        found = hook(gradient)
        _check_no_value(found)
        return found

    return checking


# Dynamo would compile the frame where a compiled function's graph ends at a backward.
skip_frames(_checking(print))
