"""Gradients of the class that a caller of a backward makes, or a hook returns, marked as the cotangents that they are.

A gradient of a value has the derivatives by its inner tensors, whoever made it. What the constructor gives is not
marked, and what is computed from it, in a hook or where two of them are added, would be the arithmetic of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import skip_frames
from subclasses.autograd.construct import (
    as_cotangent,
    construct,
    is_recorded,
    unwrap,
)
from subclasses.autograd.history_errors import PLAIN_COTANGENT
from subclasses.errors import DispatchError
from subclasses.layout import cotangent_layout
from subclasses.spec.values import dynamic_ints

# The functions that take gradients, with the place and the name of the argument.
_TAKING: dict[Any, tuple[int, str]] = {
    Tensor.backward: (1, "gradient"),
    torch.autograd.backward: (1, "grad_tensors"),
    torch.autograd.grad: (2, "grad_outputs"),
}
TAKES_GRADIENTS = frozenset({*_TAKING, Tensor.register_hook})


def with_marked_gradients(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of one of these functions, with each gradient of a class that marks them marked."""
    if func is Tensor.register_hook:
        return (args[0], *map(_marking, args[1:])), {name: _marking(hook) for name, hook in kwargs.items()}
    place, name = _TAKING[func]
    given = kwargs[name] if name in kwargs else args[place] if len(args) > place else None
    outputs = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
    for output, gradient in zip(_listed(outputs), _listed(given), strict=False):
        _check_fits(output, gradient)
    if name in kwargs:
        return args, {**kwargs, name: _marked(given)}
    return (*args[:place], *map(_marked, args[place : place + 1]), *args[place + 1 :]), kwargs


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else (given,)


def _check_fits(output: Any, gradient: Any) -> None:
    """Raises DispatchError for a plain gradient of a value that represents no plain tensor.

    A formula that multiplies it by another value would compute a value, which is no gradient.
    """
    cls = type(output)
    if type(gradient) is not Tensor or not (isinstance(output, Tensor) and hasattr(cls, "__spec__")):
        return
    if cls.__spec__.fallback != "map" and not cls._saves_inners:
        raise DispatchError(PLAIN_COTANGENT.format(cls=cls.__name__))


def _marking(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(hook)
    def marking(gradient: Any) -> Any:
        return _marked(hook(gradient))

    return marking


# Dynamo would compile the frame where a compiled function's graph ends at a backward.
skip_frames(_marking(print))


def _marked(given: Any) -> Any:
    if isinstance(given, list | tuple):
        return [_marked(g) for g in given]
    if not (isinstance(given, Tensor) and hasattr(type(given), "__spec__")):
        return given
    layout, cls = given.__dict__["_layout"], type(given)
    if layout.cotangent or not cls._marks_cotangents:  # type: ignore[attr-defined]
        return given
    if not is_recorded(given):
        return as_cotangent(given)
    return construct(cotangent_layout(layout), dynamic_ints(given), *unwrap(given, cls.__spec__.attributes))  # type: ignore[attr-defined]
