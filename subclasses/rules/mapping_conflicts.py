"""Errors for ops that a class maps over inner tensors, though the op's function has a rule.

A call of a function on a value runs the function's rule. Some callers call the op and bypass the rule:

- a transform of ``torch.func``, to which the results of ops belong,
- a class that maps the op over values inside of it,
- another function that calls the same op in C++: ``torch.linalg.norm`` calls the op of ``torch.linalg.vector_norm``.

Mapping the op there would give another result than the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import resolve_name

from subclasses._torch import OpOverload, in_backward
from subclasses.autograd.calling import CALLING
from subclasses.errors import DispatchError, one_of
from subclasses.rules.registry import collect_function_rules


def with_rules_above(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the callable that maps an op, if a rule for the function of the op exists.

    Raises:
        DispatchError: from the callable, if a transform or a function without a rule calls it.
    """
    name = op.overloadpacket.__name__
    ruled = [f for f in collect_function_rules(cls) if _op_name(f) == name]
    if not ruled:
        return run

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        func = CALLING.func
        if in_backward() or (func is not None and _op_name(func) == name):
            return run(*args, **kwargs)
        call = f"{op} on {one_of(cls)} arrived without the function {name}, as in a transform of torch.func (vmap, "
        call += f"grad, jvp, ...) for a result of an op, or from another class that maps {op}"
        raise DispatchError(
            f"{call if func is None else f'{_shown(func)} on {one_of(cls)} computes by {op}'}, for which the rule of "
            f"the function {_shown(ruled[0])} is not called, and mapping {op} could have another result than that rule",
            code="rule-not-asked",
            hint=f"add a rule for the op, @{cls.__name__}.implements(torch.ops.{op}), or for each function that "
            "computes by it",
        )

    return wrapped


def _op_name(function: Any) -> str:
    """Returns the name of a function's op; names from ``torch.linalg`` and similar modules include a prefix."""
    return getattr(function, "__name__", "").partition(".")[0]  # an op's name has its overload behind a dot


def _shown(function: Any) -> str:
    """Returns a function's name; for a method, the name of torch's function with the same name if there is one."""
    name = function.__name__.strip("_")
    resolved = resolve_name(function) or name
    return (
        f"torch.{name}" if resolved.startswith(("torch.Tensor.", name)) and hasattr(torch, name) else resolved
    )
