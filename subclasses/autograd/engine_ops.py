"""Ops of the engine and of formulas on gradients and values: sums, products, absent gradients, and their errors.

:mod:`subclasses.dispatch.cotangents` runs ops on cotangents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from subclasses._torch import OpOverload, in_backward, is_tracing
from subclasses._torch_tracing import backward_node
from subclasses.autograd.calling import is_called_by_engine
from subclasses.autograd.construct import as_cotangent, as_gradient
from subclasses.autograd.cotangent_class import is_cotangent
from subclasses.errors import DispatchError, one_of
from subclasses.op_schemas.schema import op_facts
from subclasses.spec.values import map_tensors, tensors_in

aten = torch.ops.aten

ADDITIVE_OPS = frozenset({aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor})
SCALING_OPS = frozenset(
    {
        aten.mul.Tensor,
        aten.mul_.Tensor,
        aten.mul.Scalar,
        aten.mul_.Scalar,
        aten.div.Tensor,
        aten.div_.Tensor,
        aten.div.Scalar,
        aten.div_.Scalar,
        aten.neg.default,
        aten.neg_.default,
        aten.zero_.default,
        aten.zeros_like.default,
    }
)


def with_engine_sums(cls: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the callable of ``add`` of a structure: two values that the engine adds are gradients.

    The backward of an author's autograd function may return a value, made by the constructor. The sum of two such
    values adds their inner tensors; the rule for ``add`` does not apply.
    """

    def wrapped(x: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        both = isinstance(x, cls) and isinstance(other, cls) and not (is_cotangent(x) and is_cotangent(other))
        if both and is_called_by_engine():
            x, other = (as_cotangent(as_gradient(cls, v)) for v in (x, other))
            return torch.ops.aten.add.Tensor(x, other, *args, **kwargs)
        return run(x, other, *args, **kwargs)

    return wrapped


def with_plain_gradients(cls: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a rule of a representation: a formula that calls it on a plain gradient gets a plain gradient.

    The derivative of ``x * y`` is the product of the gradient and ``y``. If a rule returns a value for it, the callable
    returns the plain tensor that the value represents.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if is_called_by_engine() and _holds_plain(cls, args):
            return map_tensors(out, lambda t: t.materialize() if isinstance(t, cls) else t)
        return out

    return wrapped


def _holds_plain(cls: Any, args: Any) -> bool:
    """Whether a tensor among arguments is of another class, and none is a cotangent."""
    operands = tensors_in(args, {})
    return any(not isinstance(t, cls) for t in operands) and not any(map(is_cotangent, operands))


def with_absent_gradients(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the callable of an op that computes gradients: if the incoming gradient is absent, its results are absent.

    PyTorch's formulas for ops with several operands, such as attention, leave the check for an absent gradient to a
    kernel. No kernel runs in a trace, and the op would be part of the program.
    """
    facts = op_facts(op)
    gradients = [i for i, a in enumerate(facts.arguments) if a.role == "tensor" and a.name.startswith("grad")]
    if not gradients or not op.name().partition(".")[0].endswith("_backward") or facts.written:
        return run
    absent = None if len(facts.returns) == 1 else (None,) * len(facts.returns)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        is_absent = len(args) > gradients[-1] and all(args[i] is None for i in gradients)
        return absent if is_absent else run(*args, **kwargs)

    return wrapped


def mixed_error(cls: Any, op: OpOverload, x: Any, other: Any) -> DispatchError:
    """Returns the error for operands that are not matching cotangents and numbers."""
    shown = [one_of(type(v)) if hasattr(type(v), "__spec__") else "a plain tensor" for v in (x, other)]
    if in_backward():
        hint = (
            "Part of the function reads inner tensors with unwrap(), or returns the value, and part uses it as a whole"
            + ", which a backward with create_graph=True cannot add" * torch.is_grad_enabled()
            + ": let both read inner tensors. "
            + "Beside a view that a rule makes, use x.materialize(). " * cls._traits.is_representation
            + f"Where another value holds {one_of(cls)}, call the op on x.unwrap(...). "
            "Where `x[i] += y` wrote to a view, write x[i].add_(y). Where a compiled "
            "function writes to a value in place and its result is read, compile it with desugar.compile: "
            "torch.compile differentiates each result by the whole value"
        )
    elif cls._traits.trainable:
        hint = (
            "A step of an optimizer takes Parameters, their gradients from a backward, torch.zeros_like(parameter), "
            "and numbers. Make another value a Parameter first: torch.nn.Parameter(value, requires_grad=False)"
        )
    else:
        hint = (
            f"If this is a step of an optimizer, declare {cls.__name__} with trainable=True, so that it updates each "
            f"inner tensor. Or make the inner tensors parameters"
        )
    return DispatchError(
        f"{op} on {shown[0]} and {shown[1]}: cotangents of {one_of(cls)} are added to one another and scaled by "
        "numbers only",
        code="cotangent-mixed",
        hint=hint,
    )


def inside_error(cls: Any, op: OpOverload) -> DispatchError:
    """Returns the error for a formula that computes with cotangents of a class with rules."""
    if cls._traits.is_representation:
        return DispatchError(
            f"{op} on {one_of(cls.Cotangent)}: PyTorch's formula for an op calls it, on the gradient of the tensor "
            f"that {one_of(cls)} represents. A cotangent holds a gradient for each inner tensor instead",
            code="cotangent-operand",
            hint="where a function reads inner tensors of the result of a rule for an op, read x.materialize()",
        )
    advice = f"register a rule for cotangents with @{cls.__name__}.Cotangent.implements(torch.ops.{op})"
    return DispatchError(
        f"{op} on {one_of(cls.Cotangent)}: PyTorch's formula for an op calls it. The formula is not the derivative "
        f"of the rules of {cls.__name__}, which run above autograd where an op is called on {one_of(cls)}",
        code="cotangent-operand",
        hint=f"If another value holds {one_of(cls)} as an inner tensor, call the op on that inner tensor, "
        f"x.unwrap(...); or {advice}",
    )


def check_no_cotangents(cls: Any, op: OpOverload, wrappers: list[Any]) -> None:
    """Raises DispatchError if a value to be materialized is a cotangent."""
    if any(x._layout.cotangent for x in wrappers):
        name = op.overloadpacket.__name__
        if is_tracing() and cls._has_formulas:
            hint = (
                "torch.compile differentiates a returned value by its inner tensors, and the rule for an op that made "
                "it has no such derivative: return x.materialize(), or compile the function with desugar.compile"
            )
        elif name.endswith("_backward"):
            hint = f"{NO_DERIVATIVE}; or add a rule with @{cls.__name__}.implements(torch.ops.{op})"
        elif is_called_by_engine():
            hint = (
                f"PyTorch's derivative of another op ({backward_node()}) calls it: let that op compute with the "
                f"inner tensors, x.unwrap(), or with x.materialize()"
            )
        else:
            hint = "read its inner tensors instead"
            if not in_backward():
                hint += (
                    "; for a tensor of the size of a Parameter p, as from zeros_like, call it on p.materialize()"
                    if cls._traits.trainable
                    else f", or, for an optimizer, declare {cls.__name__} with trainable=True"
                )
        raise DispatchError(
            f"{op} on a cotangent of {cls.__name__} (a gradient, say), which does not represent a plain tensor",
            code="cotangent-operand",
            hint=hint,
        )


# The hint for a class without a rule for an op that a derivative calls.
NO_DERIVATIVE = (
    "PyTorch calls it in the derivative of another op. Register the rule of that op for the function, such as "
    "torch.relu, and read inner tensors with x.unwrap() in it"
)
