"""An author's ``materialize`` as a differentiable function of the value, with its checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import apply_function
from subclasses._torch_capture import is_exporting
from subclasses._torch_tracing import leave_in_graph
from subclasses.autograd.construct import is_recorded, open_wrapper
from subclasses.autograd.gradient_errors import refuse_forward_mode
from subclasses.errors import DispatchError
from subclasses.layout import BY_FORMULA
from subclasses.spec.construction import check_materialized
from subclasses.spec.values import inner_tensors, is_differentiable


def make_differentiable(materialize: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Returns an author's ``materialize`` as a differentiable function of the value, whose result is checked."""

    @leave_in_graph  # Dynamo cannot flatten an argument as this does
    def run(self: Any) -> Tensor:
        _check_not_cotangent(self)
        if is_exporting():  # its graph reads inner tensors as functions of the value
            return _checked(self, materialize(self))
        if any(map(is_differentiable, inner_tensors(self))) and BY_FORMULA not in self.__dict__:
            return _checked(self, materialize(open_wrapper(self)))
        return _checked(self, apply_function(_Represented, self, materialize))

    @functools.wraps(materialize)
    def differentiable(self: Any) -> Tensor:
        if is_recorded(self):
            return run(self)
        # Dynamo would make symbols of ints in the check, and guard on each comparison.
        if torch.compiler.is_dynamo_compiling():
            return materialize(self)
        _check_not_cotangent(self)
        return _checked(self, materialize(self))

    differentiable.__dict__[_MADE_DIFFERENTIABLE] = True
    return differentiable


class _Represented(torch.autograd.Function):
    """The tensor that a value represents; its gradient is plain, as for an op with PyTorch's formula."""

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(x: Any, materialize: Callable[[Any], Tensor]) -> Tensor:
        return materialize(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves nothing: the gradient of the value is the gradient of the result."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any, materialize: Any) -> tuple[Tensor, None]:
        """Materializes a value from outside of a transform: a wrapper itself is never batched."""
        return apply_function(_Represented, x, materialize), None


def _check_not_cotangent(x: Any) -> None:
    """Raises DispatchError if a value is marked as a cotangent."""
    if x.__dict__["_layout"].cotangent:
        raise DispatchError(
            f"{type(x).__name__}.materialize() of a cotangent (a gradient, say), which does not represent a plain "
            "tensor",
            code="cotangent-operand",
            hint="read its inner tensors instead. A derivative calls ops, and so their rules. A rule for the "
            "function, such as torch.mul, that reads inner tensors with x.unwrap() has no such derivative",
        )


def _checked(x: Any, plain: Tensor) -> Tensor:
    """Checks the result of ``materialize`` and returns it."""
    check_materialized(x, plain)
    return plain


_MADE_DIFFERENTIABLE = "_made_differentiable"


def is_made_differentiable(materialize: Callable[[Any], Tensor]) -> bool:
    """Whether :func:`make_differentiable` returned this function."""
    return _MADE_DIFFERENTIABLE in materialize.__dict__
