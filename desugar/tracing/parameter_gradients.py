"""Gradients of Parameters of trainable classes.

An op that materializes a Parameter has a plain gradient. A hook of the Parameter converts it to one of the class, by
its inner tensors, which may have been written to since the forward. In a program the conversion is a part of the
backward graph, by the inner tensors that the forward saw.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from desugar import _torch as private
from desugar.frontend.inputs import Inputs
from subclasses import TensorSubclass
from subclasses.autograd.construct import as_cotangent, wrap_cotangent


def as_gradient_of_parameter(inputs: Inputs, number: int, leaf: Any, gradient: Tensor | None) -> Any:
    """Returns the gradient of an input as one of its class, if it is a Parameter whose class converts plain ones.

    Args:
        inputs: The inputs.
        number: The number of the input leaf.
        leaf: The leaf, in the trace.
        gradient: Its gradient; None if it has none.
    """
    cls: Any = type(leaf)
    if number not in inputs.parameters or not issubclass(cls, TensorSubclass):
        return gradient
    converts = cls.__spec__.trainable and cls._saves_inners
    if gradient is None or not converts or not isinstance(gradient, private.FunctionalTensor):
        return gradient
    return as_cotangent(wrap_cotangent(leaf, gradient))
