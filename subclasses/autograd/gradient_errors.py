"""Errors of gradients, and checks of gradients that a caller passes to a backward or a hook returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from subclasses._torch import skip_frames
from subclasses.errors import DispatchError, one_of
from subclasses.layout import field_name
from subclasses.spec.values import known_to_differ


def formula_error(cls: Any) -> DispatchError:
    """Returns the error for reading inner tensors of a value that a rule for an op of a representation made."""
    return DispatchError(
        f"{one_of(cls)} that a rule for an op made: its inner tensors are read where gradients are recorded. PyTorch's "
        "formula for the op gives a gradient to the tensor which the value represents, and none to them",
        code="formula-result",
        hint="Read x.materialize(). Or register the rule for the function, such as torch.mul, and read x.unwrap() in "
        f"it. Or, if a value of {cls.__name__} is its inner tensors, declare it with kind='structure', and its rules "
        "without derivative='formula'",
    )


def open_formula_error(cls: Any, op: Any) -> DispatchError:
    """Returns the error for a rule that calls an op with ``derivative="formula"`` on a value that it differentiates."""
    return DispatchError(
        f"{op} on {one_of(cls)} inside of a rule: the rule for {op} has derivative='formula', the gradient of the "
        "materialized tensor, and the calling rule is differentiated by inner tensors",
        code="formula-result",
        hint="compute with inner tensors there, or with x.materialize()",
    )


def transformed_error(cls: Any, func: Any) -> DispatchError:
    """Returns the error for a transform of torch.func that differentiates by a plain operand of an op on a value."""
    return DispatchError(
        f"{resolve_name(func) or func} on {one_of(cls)} and a tensor by which a transform of torch.func (grad, vjp, "
        "jvp, jacrev, ...) differentiates: the transform takes PyTorch's formula for the op, which is not the "
        f"derivative of the rules of {cls.__name__}",
        code="transform-refused",
        hint="Differentiate with torch.autograd.grad, or compute with x.unwrap() inside",
    )


def value_gradient_error(cls: Any) -> DispatchError:
    """Returns the error for a value in place of a cotangent."""
    fields = ", ".join(f"{f.name}=..." for f in cls.__spec__.inners)
    return DispatchError(
        f"{one_of(cls)} was given or returned as a gradient: it has the arithmetic of values, and a gradient has the "
        "derivatives by inner tensors",
        code="value-as-cotangent",
        hint=f"Write x.cotangent({fields}), where x is the value that the gradient is of",
    )


def fitting(cls: Any, names: Sequence[str], gradients: Iterable[Any], sizes: Iterable[Any]) -> list[Any]:
    """Returns the gradients by inner tensors, None for those without a size.

    Raises:
        DispatchError: a gradient has another size than its inner tensor; autograd would sum what it can broadcast.
    """
    sized = [g if s is not None else None for g, s in zip(gradients, sizes, strict=True)]
    for name, g, size in zip(names, sized, sizes, strict=True):
        if g is not None and known_to_differ(g.shape, size):
            raise DispatchError(
                f"{one_of(cls)}: the gradient by its inner tensor {field_name(name)} of size {tuple(size)} has size "
                f"{tuple(g.shape)}. PyTorch's formula for an op, a view in most cases, ran on each inner tensor "
                "and does not fit this one",
                code="gradient-misfit",
                hint="Write a rule for the derivative that the formula calls, such as "
                "torch.ops.aten.select_backward.default. Or read inner tensors of the view before its base is "
                "written to",
            )
    return sized


def check_plain(cls: Any, gradients: Iterable[tuple[str, Any]], likes: Mapping[str, Any]) -> None:
    """Raises DispatchError if the gradient of a plain inner tensor is a value.

    Args:
        cls: the class.
        gradients: the attributes with their gradients.
        likes: attribute -> the `Like` of the inner tensor.
    """
    for name, g in gradients:
        if hasattr(type(g), "__spec__") and not hasattr(type(likes[name].wrapper), "__spec__"):
            raise class_gradient_error(
                type(g),
                f"the gradient of its inner tensor {field_name(name)}",
                f"was computed from {field_name(name)}",
            )


def class_gradient_error(cls: Any, what: str, tensor: str) -> DispatchError:
    """Returns the error for a gradient of a class that reaches a plain tensor; two phrases describe both."""
    cls = cls._value_cls
    return DispatchError(
        f"{one_of(cls)}: {what} is {one_of(cls.Cotangent)}. A plain tensor that {tensor} is an operand of an op that "
        f"maps to inner tensors, and has a gradient by each of them",
        code="gradient-misfit",
        hint=f"make it a value first, as in `x / {cls.__name__}(t, ...)` for `x / t`, with t in place of each inner "
        "tensor; its gradient is their sum",
    )


def cotangent_error(cls: Any, cotangent: Any) -> DispatchError:
    """Returns the error for a cotangent of another type than the class, if the class cannot convert it."""
    given = type(cotangent)
    if not hasattr(given, "__spec__"):
        return DispatchError(
            f"{cls.__name__}: a plain tensor arrived as the cotangent of {one_of(cls)}",
            code="cotangent-plain",
            hint=f"Define `wrap_cotangent(self, cotangent)`, which returns it as {one_of(cls)}. If a rule for an op "
            "returned a plain tensor, it may be registered above autograd instead, for the functions that callers use: "
            "for x[i] that is torch.Tensor.__getitem__",
        )
    return DispatchError(
        f"{cls.__name__}: {one_of(given)} arrived as the cotangent of a {cls.__name__}. A rule that {cls.__name__} "
        f"inherits makes `{given.__name__}(...)`",
        code="value-as-cotangent",
        hint="let it make `type(x)(...)`",
    )


def view_rule_error(cls: Any, op: Any) -> DispatchError:
    """Returns the error for a view of a structure by a rule of its author, where gradients are recorded."""
    fields = " ".join(
        f'{f.name}: Tensor = inner(shape="... {_dims_shown(f)}")' for f in cls.__spec__.inners[:1]
    )
    return DispatchError(
        f"{op} on {one_of(cls)} that requires grad: PyTorch differentiates a view by a formula of its own, which need "
        "not be the derivative of the rule",
        code="view-derivative",
        hint=f"If the dims of {one_of(cls)} are the leading dims of each inner tensor, declare so, as in `{fields}`, "
        f"and remove the rule. Else write a method that makes {one_of(cls)} of x.unwrap(), or call the view under "
        "torch.no_grad()",
    )


def _dims_shown(field: Any) -> str:
    return "4" if field.shape is None else " ".join(map(str, field.shape.dims))


def integer_value_error(cls: Any, dtype: Any, inners: Iterable[Any]) -> ValueError:
    """Returns the error for inner tensors that require grad in a value whose dtype has no gradients."""
    names = [
        f.name for f, t in zip(cls.__spec__.inners, inners, strict=True) if t is not None and t.requires_grad
    ]
    require = "requires" if len(names) == 1 else "require"
    return ValueError(
        f"{cls.__name__}: {' and '.join(names)} {require} grad, and the value shows {dtype}, of which there are no "
        f"gradients; declare `class {cls.__name__}(..., dtype_from={names[0]!r})`, or let `outer` give a floating "
        f"dtype. Where no gradient is wanted, pass {names[0]}.detach()"
    )


def assigned_error(cls: Any) -> DispatchError:
    """Returns the error for assigning a field of a value that autograd recorded."""
    return DispatchError(
        f"{one_of(cls)} that was computed and requires grad: a field is assigned, and the recorded gradient would not "
        "fit the new value",
        code="assignment-recorded",
        hint=f"construct a new {cls.__name__} of its inner tensors, or assign to x.detach()",
    )


def refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    """Raises DispatchError: the ``jvp`` of the functions that construct and unwrap values."""
    raise DispatchError(
        "a dual tensor of torch.autograd.forward_ad that requires grad too was put into a value of a declared class, "
        "or was read from one: the nodes that connect a value with its inner tensors have no forward derivative",
        code="forward-mode",
        hint="Pass dual tensors that do not require grad, and compute with x.unwrap() or x.materialize(). Or "
        "differentiate with torch.autograd.grad or torch.autograd.functional.jvp",
    )


# ---- gradients that a caller gives -------------------------------------------------------------------------

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
    """Returns the arguments of one of these functions, with a hook wrapped so that its results are checked.

    Raises:
        DispatchError: a gradient is a value in place of a cotangent, or is plain and the value represents no plain
            tensor. A formula that multiplies it by another value would compute a value, which is not a gradient.
    """
    if func is Tensor.register_hook:
        return (args[0], *map(_checking, args[1:])), {name: _checking(hook) for name, hook in kwargs.items()}
    position, name = _TAKING[func]
    given = kwargs[name] if name in kwargs else args[position] if len(args) > position else None
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
        replacement = hook(gradient)
        _check_no_value(replacement)
        return replacement

    return checking


# Dynamo would compile the frame where a compiled function's graph ends at a backward.
skip_frames(_checking(print))
