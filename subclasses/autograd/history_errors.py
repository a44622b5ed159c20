"""Errors of values whose derivative by way of their inner tensors is not known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from subclasses.errors import DispatchError, one_of
from subclasses.layout import field_name
from subclasses.spec.values import known_to_differ

PLAIN_COTANGENT = (
    "{cls}: a plain tensor arrived as the cotangent of a {cls}. Define `wrap_cotangent(self, cotangent)`, which "
    "returns it as a {cls}. If a rule for an op returned a plain tensor, it may be registered above autograd instead, "
    "for the functions that callers use: for x[i] that is torch.Tensor.__getitem__"
)


class NoDerivativeError(DispatchError):
    """A derivative is asked for of what a rule computes without one."""

    def __init__(self, cls: Any) -> None:
        super().__init__(
            f"{one_of(cls)} that a rule made: its inner tensors are read where autograd records, and the rule computes "
            f"them without derivatives, as detach(), torch.no_grad() or integers have none; compute them with ops that "
            f"have, read what has no derivative under torch.no_grad(), or detach the value"
        )


def written_error(cls: Any) -> DispatchError:
    """Returns the error for reading inner tensors of a value after a write to it, or to what it was computed from."""
    return DispatchError(
        f"{one_of(cls)} that a rule made: its inner tensors are read where autograd records, and it, or what it "
        f"was computed from, was written to in place since; read them before the write, or {_instead(cls)}"
    )


def unknown_gradient_error(cls: Any) -> DispatchError:
    """Returns the error for a gradient by inner tensors at a value that a rule wrote to in an unknown way."""
    return DispatchError(
        f"{one_of(cls)} to which a rule wrote in place, itself or through a view: a gradient by its inner tensors "
        f"arrived, and how the write depends on them is not known. They were read, or torch.compile ended a graph "
        f"there, and asks for the gradient of each result by its inner tensors; desugar.compile does not. "
        f"Otherwise, {_instead(cls)}"
    )


def value_gradient_error(cls: Any) -> DispatchError:
    """Returns the error for a value in place of a cotangent."""
    fields = ", ".join(f"{f.name}=..." for f in cls.__spec__.inners)
    return DispatchError(
        f"{one_of(cls)} was given or returned as a gradient: its arithmetic is that of values, and a gradient has the "
        f"derivatives by inner tensors. Write x.cotangent({fields}), where x is the value that the gradient is of"
    )


def fitting(cls: Any, names: Sequence[str], gradients: Iterable[Any], sizes: Iterable[Any]) -> list[Any]:
    """Returns the gradients by inner tensors, None for those without a size.

    Raises:
        DispatchError: a gradient has another size than its inner tensor; autograd would sum what it can broadcast.
    """
    found = [g if s is not None else None for g, s in zip(gradients, sizes, strict=True)]
    for name, g, size in zip(names, found, sizes, strict=True):
        if g is not None and known_to_differ(g.shape, size):
            raise DispatchError(
                f"{one_of(cls)}: the gradient by its inner tensor {field_name(name)} of size {tuple(size)} has size "
                f"{tuple(g.shape)}. It is from PyTorch's formula for an op, a view in most cases, which ran on each "
                f"inner tensor alike and does not fit this one. Write a rule for the derivative that the formula "
                f"calls, such as torch.ops.aten.select_backward.default, or read inner tensors of the view before the "
                f"value that it is a view of is written to"
            )
    return found


def check_plain(cls: Any, gradients: Iterable[tuple[str, Any]], likes: Mapping[str, Any]) -> None:
    """Raises DispatchError if the gradient of a plain inner tensor is a value.

    Args:
        cls: the class.
        gradients: the attributes with their gradients.
        likes: attribute -> inner tensor.
    """
    for name, g in gradients:
        if hasattr(type(g), "__spec__") and not hasattr(type(likes[name]), "__spec__"):
            raise class_gradient_error(
                type(g),
                f"the gradient of its inner tensor {field_name(name)}",
                f"was computed from {field_name(name)}",
            )


def class_gradient_error(kind: Any, what: str, tensor: str) -> DispatchError:
    """Returns the error for a gradient of a class at a plain tensor, of which more depends on inner tensors."""
    kind = kind._value_cls
    return DispatchError(
        f"{one_of(kind)}: {what} is {one_of(kind.Cotangent)}. A plain tensor that {tensor} is an operand of an op that "
        f"maps to the inner tensors of {one_of(kind)}, and has a gradient by each of them: make it a value first, as "
        f"in `x / {kind.__name__}(t, ...)` for `x / t`, with t in place of each inner tensor; its gradient is their sum"
    )


def cotangent_error(cls: Any, cotangent: Any) -> DispatchError:
    """Returns the error for a cotangent of another type than the class, which has no way to convert it."""
    kind = type(cotangent)
    if not hasattr(kind, "__spec__"):
        return DispatchError(PLAIN_COTANGENT.format(cls=cls.__name__))
    return DispatchError(
        f"{cls.__name__}: {one_of(kind)} arrived as the cotangent of a {cls.__name__}. A rule that {cls.__name__} "
        f"inherits makes `{kind.__name__}(...)`: let it make `type(x)(...)`"
    )


def composite_error() -> DispatchError:
    """Returns the error for a plain result of a rule that a function of several ops computes on with."""
    return DispatchError(
        "a function of torch that is made of several ops computed with a plain tensor that a rule made of values of a "
        "class without materialize(), and such a function has no derivative by the rule: call the ops one by one, or "
        "write a rule for the function, such as torch.matrix_power"
    )


def check_sizes(cls: Any, outputs: Iterable[Any], cotangents: Iterable[Any]) -> None:
    """Raises DispatchError if a cotangent has another size than what a rule made."""
    for made, g in zip(outputs, cotangents, strict=True):
        if g is not None and known_to_differ(g.shape, made.shape):
            raise DispatchError(
                f"{one_of(cls)} that a rule made: the gradient by an inner tensor of size {tuple(made.shape)} has size "
                f"{tuple(g.shape)}. `wrap_cotangent`, and a rule that makes a cotangent, return derivatives of the "
                f"sizes of the inner tensors. Where there is none, a function of several ops changed the result of the "
                f"rule in place, as vector @ x does: write a rule for the function, such as torch.matmul"
            )


def _instead(cls: Any) -> str:
    return (
        f"compute the value by ops that write nothing, such as torch.where and torch.cat. If a rule of "
        f"{cls.__name__} wrote, let it write to inner tensors where autograd records, not under torch.no_grad() or "
        f"to .data"
    )


def watched_view_error(cls: Any) -> DispatchError:
    """Returns the error for a view that a rule made, whose node does not see what reads its inner tensors."""
    return DispatchError(
        f"{one_of(cls)} that a rule made as a view: its inner tensors are read, and a hook (register_hook, "
        f"retain_grad) on the view would not see their gradients; register it on view.clone(), and use that"
    )


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


def assigned_view_error(cls: Any) -> DispatchError:
    """Returns the error for assigning a field of a view, whose derivative is by way of its base."""
    return DispatchError(
        f"{one_of(cls)} that is a view and requires grad: a field is assigned, which would make its gradient by way of "
        f"its base another one; construct a new {cls.__name__} of the view's inner tensors, or assign to view.clone()"
    )


def refuse_tangents(ctx: Any, *tangents: Any) -> Any:
    """Raises DispatchError: the ``jvp`` of the functions that make values and read them."""
    raise DispatchError(
        "a dual tensor of torch.autograd.forward_ad that requires grad too became part of a value of a declared class, "
        "or such a value became one and was read: what connects a value with its inner tensors in the graph has no "
        "forward derivative. Pass dual tensors that do not require grad, and compute with x.unwrap() or "
        "x.materialize(), or differentiate with torch.autograd.grad or torch.autograd.functional.jvp"
    )


def check_derivable(cls: Any, plain: Any) -> None:
    """Raises DispatchError if a plain tensor that a rule made for open wrappers does not depend on them."""
    if not plain.requires_grad:
        raise DispatchError(
            f"a plain tensor that a rule of {cls.__name__} made: its derivative is asked for, and the rule computes it "
            f"without one, as detach(), torch.no_grad() or integers have none; compute it with ops that have, or "
            f"detach the result"
        )
