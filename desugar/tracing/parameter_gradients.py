"""Gradients of Parameters of trainable classes.

An op that materializes a Parameter has a plain gradient. A hook of the Parameter converts it to one of the class, by
its inner tensors, which may have been written to since the forward. In a program the conversion is a part of the
backward graph, by the inner tensors that the forward saw.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from desugar import _torch as private
from subclasses import TensorSubclass
from subclasses.autograd.construct import as_cotangent, wrap_cotangent


def as_gradient_of_parameter(leaf: Any, gradient: Tensor | None) -> Any:
    """Returns the gradient of a Parameter as one of its class, if the class converts plain ones.

    Args:
        leaf: The Parameter, in the trace.
        gradient: Its gradient; None if it has none.
    """
    cls: Any = type(leaf)
    converts = issubclass(cls, TensorSubclass) and cls.__spec__.trainable and cls._saves_inners
    if gradient is None or not converts or not isinstance(gradient, private.FunctionalTensor):
        return gradient
    return as_cotangent(wrap_cotangent(leaf, gradient))
