"""Checks gradients that users pass to ``y.backward(g)`` or as ``grad_outputs``, and gradients that hooks return.

A gradient has the rows of its value. PyTorch compares outer sizes alone, and not lengths. A gradient that matches is
passed on with the offsets or lengths of ``y``. A dense gradient is read at existing entries. A gradient that does not
match raises before the backward computes from it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from subclasses._torch_tracing import is_compiling_here
from subclasses.errors import one_of
from subclasses.ragged.base import is_ragged, unruled
from subclasses.ragged.registry import Rules

RULES = Rules()

# ---- matching gradients ----------------------------------------------------------------------------------------


def fitted(name: str, y: Any, g: Any) -> Any:
    """Returns a gradient of ``y`` with the rows of ``y``; differentiable.

    Raises:
        ValueError: the rows of the gradient have other lengths, or it has another size.
    """
    if not isinstance(g, Tensor) or not (is_ragged(y) or is_ragged(g)):
        return g
    if not is_ragged(y):
        raise ValueError(
            f"{name}: a gradient of {_described(y)} is dense, got {_described(g)}; use g.to_dense()"
        )
    name = f"{name}: a gradient and its value"
    same_layout = isinstance(g, y.ragged_class)
    if same_layout and (g.row_dims, _features(g)) == (y.row_dims, _features(y)):  # type: ignore[attr-defined]
        return y.relaid(name, g)
    if same_layout or is_ragged(g) or g.shape != y.shape:
        raise ValueError(
            f"{name} have the same rows; expected {_described(y)}, or a dense tensor of that size, got {_described(g)}"
        )
    return y.like_dense(g)


def _features(x: Any) -> list[Any]:
    """Returns the extents of dimensions that are neither batch nor ragged."""
    return [n for d, n in enumerate(x.shape) if d not in x.row_dims]


def _described(x: Any) -> str:
    text = f"{one_of(type(x))} of size {tuple(x.shape)}"
    if not is_ragged(x):
        return text
    lengths = x.row_lengths()
    readable = type(lengths) is Tensor and not lengths.is_meta and not is_compiling_here()
    return f"{text}, ragged along {x.ragged_dim}" + (f", with lengths {lengths.tolist()}" if readable else "")


# ---- the rules -------------------------------------------------------------------------------------------------


def _all_fitted(name: str, outputs: Any, gradients: Any) -> Any:
    """Returns the checked gradients of one output or several, in the structure that the user passed."""
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    if gradients is None or isinstance(gradients, Tensor):
        return fitted(name, outputs[0], gradients) if len(outputs) == 1 else gradients
    gradients = tuple(gradients)
    if len(gradients) != len(outputs):
        return gradients  # PyTorch raises
    return tuple(fitted(name, y, g) for y, g in zip(outputs, gradients, strict=True))


@RULES.of(Tensor.backward)
def _backward_of(func: Any, x: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    unruled(func, x, fitted("backward", x, gradient), *args, **kwargs)


@RULES.of(torch.autograd.backward)
def _backward(func: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    unruled(func, tensors, _all_fitted("backward", tensors, grad_tensors), *args, **kwargs)


@RULES.of(torch.autograd.grad)
def _grad(func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    batched = kwargs.get("is_grads_batched", False)
    given = grad_outputs if batched else _all_fitted("grad", outputs, grad_outputs)
    return unruled(func, outputs, inputs, given, *args, **kwargs)


@RULES.of(Tensor.register_hook)
def _register_hook(func: Any, x: Any, hook: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return unruled(func, x, hook)

    @functools.wraps(hook)
    def checked(grad: Any) -> Any:
        given = hook(grad)
        return fitted("a hook", grad, given) if is_ragged(grad) else given

    return unruled(func, x, checked)
