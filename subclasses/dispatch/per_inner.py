"""Parts of the arithmetic of optimizers: an op on the differentiable inner tensors of Parameters and cotangents."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload, is_tracing
from subclasses.autograd.cotangent_class import is_cotangent
from subclasses.autograd.engine_ops import mixed_error
from subclasses.errors import DispatchError, one_of
from subclasses.layout import are_alike
from subclasses.spec.values import RANKS, dynamic_ints, is_differentiable, is_of_parameter, with_inners


def records(values: Any) -> bool:
    """Whether autograd records an op on these values; its formula holds for values, not for Parameters."""
    return torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)


def check_not_traced(cls: Any, op: OpOverload) -> None:
    """Raises DispatchError in a trace, for an op that belongs to an optimizer only because an operand is a Parameter.

    Dynamo breaks the graph at this error, and eager mode runs the op.
    """
    if is_tracing():
        raise DispatchError(
            f"{op} writes to a Parameter of {one_of(cls)} in a compiled function, whose graph cannot tell Parameters "
            "from other values",
            code="graph-refused",
            hint="compile without fullgraph=True, or keep the optimizer's step out of the function",
        )


def check_operands(cls: Any, op: OpOverload, operands: Iterable[Any]) -> None:
    """Raises DispatchError unless all operands are matching Parameters and cotangents of a class, or numbers.

    A trace has no record of Parameters, and accepts any value as one.
    """
    x, is_traced = next(v for v in operands if isinstance(v, cls)), is_tracing()
    for v in operands:
        if isinstance(v, cls):
            same = are_alike(v._layout, x._layout)
            fits = (
                same
                and dynamic_ints(v) == dynamic_ints(x)
                and (is_traced or is_cotangent(v) or is_of_parameter(v))
            )
        else:
            fits = v.dim() == 0
        if not fits:
            raise mixed_error(cls, op, x, x if v is x else v)


def run_per_inner(cls: Any, op: OpOverload, x: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Runs an op once for each differentiable inner tensor, with the inner tensors of that name as arguments."""
    results = {}
    for name in differentiable_names(x):
        inners = [inner_of(cls, v, name) for v in args]
        results[name] = op(*inners, **{k: inner_of(cls, v, name) for k, v in kwargs.items()})
    return results


def inner_of(cls: Any, v: Any, name: str) -> Any:
    """Returns the inner tensor of a value of the class; any other argument itself."""
    return v.__dict__[name] if isinstance(v, cls) else v


def differentiable_names(x: Any) -> list[str]:
    """Returns the attributes that hold the inner tensors that an optimizer updates."""
    return [n for n in x._layout.present if is_differentiable(x.__dict__[n])]


def remade(x: Any, results: dict[str, Any], layout: Any, mark: str = "") -> Any:
    """Returns a value with results in place of inner tensors, and the other inner tensors of ``x``."""
    inners = [results.get(n, x.__dict__[n]) for n in type(x).__spec__.attributes]
    out = with_inners(x, inners, layout)
    if mark:
        out.__dict__[mark] = True
    if RANKS in x.__dict__:  # a result computed from the gradient of a shard belongs to a shard
        out.__dict__[RANKS] = x.__dict__[RANKS]
    return out


def joint_norm(x: Any, norms: dict[str, Tensor], ord: Any) -> Tensor:
    """Returns the norm of a gradient from the norm of each inner tensor.

    If several ranks have a shard each, PyTorch combines their norms. The norm of an inner tensor that every rank has
    whole is divided, so that it counts once.
    """
    ranks, whole = x.__dict__.get(RANKS, (1, ()))
    if ord == 0:
        return torch.stack([t / ranks if n in whole else t for n, t in norms.items()]).sum()
    share = 1.0 if math.isinf(ord) else ranks ** (-1 / ord)
    return torch.linalg.vector_norm(
        torch.stack([t * share if n in whole else t for n, t in norms.items()]), ord
    )
