"""Gradients that are given by hand, to ``y.backward(g)`` or as ``grad_outputs``: they have the rows of the value.

The same holds for what a hook on a ragged value returns. PyTorch compares outer sizes alone, which say nothing of the
lengths. What fits is passed on as a value with the very rows of ``y`` (a dense gradient counts where there are
entries); what does not raises before anything is computed from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.padded.rows import as_wide, check_rows_match as check_table_rows_match
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.rows import relaid, same_rows

# ---- what fits -------------------------------------------------------------------------------------------------


def fitted(name: str, y: Any, g: Any) -> Any:
    """A gradient of ``y`` as one with its rows; differentiable.

    Raises:
        ValueError: its rows have other lengths, or it has another size.
    """
    fit = next((f for cls, f in _FITS.items() if isinstance(y, cls)), None)
    if not isinstance(g, Tensor) or (fit is None and not isinstance(g, tuple(_FITS))):
        return g
    if fit is None:
        raise ValueError(
            f"{name}: a gradient of {_described(y)} is dense, got {_described(g)}; use g.to_dense()"
        )
    return fit(f"{name}: a gradient and its value", y, g)


def _fit_jagged(name: str, y: JaggedTensor, g: Tensor) -> Tensor:
    if not isinstance(g, JaggedTensor):
        return _fit_dense(name, y, g)
    if g.ragged_dim != y.ragged_dim or _features(g) != _features(y):
        raise _does_not_fit(name, y, g)
    if same_rows(y, g) and g.max_length == y.max_length:
        return g
    return relaid(name, y, g)


def _fit_padded(name: str, y: PaddedTensor, g: Tensor) -> Tensor:
    if not isinstance(g, PaddedTensor):
        return _fit_dense(name, y, g)
    places = (y.ragged_dim, y.batch_dim, _features(y))
    if places != (g.ragged_dim, g.batch_dim, _features(g)):
        raise _does_not_fit(name, y, g)
    check_table_rows_match(name, y, g)
    wide = as_wide(y, g)
    return wide if wide.lengths is y.lengths else y.with_padded(wide.unwrap("padded"))


def _fit_dense(name: str, y: Any, g: Tensor) -> Tensor:
    if isinstance(g, tuple(_FITS)) or g.shape != y.shape:
        raise _does_not_fit(name, y, g)
    return y.like_dense(g)


_FITS: dict[type, Callable[..., Tensor]] = {JaggedTensor: _fit_jagged, PaddedTensor: _fit_padded}


def _features(x: Any) -> list[Any]:
    """The extents that are neither of the batch nor ragged."""
    rows = (x.ragged_dim, getattr(x, "batch_dim", 0))
    return [n for d, n in enumerate(x.shape) if d not in rows]


def _does_not_fit(name: str, y: Any, g: Tensor) -> ValueError:
    return ValueError(
        f"{name} have the same rows; expected {_described(y)}, or a dense tensor of that size, got {_described(g)}"
    )


def _described(x: Tensor) -> str:
    text = f"a {type(x).__name__} of size {tuple(x.shape)}"
    if not isinstance(x, tuple(_FITS)):
        return text
    lengths = x.row_lengths()  # type: ignore[attr-defined]
    readable = type(lengths) is Tensor and not lengths.is_meta and not torch.compiler.is_compiling()
    return f"{text}, ragged along {x.ragged_dim}" + (f", with lengths {lengths.tolist()}" if readable else "")  # type: ignore[attr-defined]


# ---- the rules -------------------------------------------------------------------------------------------------


def _all_fitted(name: str, outputs: Any, gradients: Any) -> Any:
    """The gradients of one output or several, as they were given."""
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    if gradients is None or isinstance(gradients, Tensor):
        return fitted(name, outputs[0], gradients) if len(outputs) == 1 else gradients
    gradients = tuple(gradients)
    if len(gradients) != len(outputs):
        return gradients  # which PyTorch says
    return tuple(fitted(name, y, g) for y, g in zip(outputs, gradients, strict=True))


def implement_gradients(cls: Any) -> None:
    """The rules of what takes gradients."""

    @cls.implements(Tensor.backward)
    def _(func: Any, x: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        cls.unruled(func, x, fitted("backward", x, gradient), *args, **kwargs)

    @cls.implements(torch.autograd.backward)
    def _(func: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        cls.unruled(func, tensors, _all_fitted("backward", tensors, grad_tensors), *args, **kwargs)

    @cls.implements(torch.autograd.grad)
    def _(func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        batched = kwargs.get("is_grads_batched", False)
        given = grad_outputs if batched else _all_fitted("grad", outputs, grad_outputs)
        return cls.unruled(func, outputs, inputs, given, *args, **kwargs)

    @cls.implements(Tensor.register_hook)
    def _(func: Any, x: Any, hook: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return cls.unruled(func, x, hook)

        @functools.wraps(hook)
        def checked(grad: Any) -> Any:
            given = hook(grad)
            return fitted("a hook", grad, given) if isinstance(grad, tuple(_FITS)) else given

        return cls.unruled(func, x, checked)


implement_gradients(JaggedTensor)
implement_gradients(PaddedTensor)
