"""Ops of which a class maps the inner tensors, though a rule says something else of the function.

A rule for a function is asked where the function is called with a value. Some callers get past it, with the op alone: a
transform of ``torch.func``, to which belongs what an op returned, a class that maps the op over values inside of it,
and another function that computes by the same op in C++, as ``torch.linalg.norm`` does by that of
``torch.linalg.vector_norm``. Mapping the op there would give another result than the rule.
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
    """Wraps the plan that maps an op, if a rule for the function of the op exists.

    Raises:
        DispatchError: from the plan, where a transform calls it, or a function that has no rule.
    """
    name = op.overloadpacket.__name__
    ruled = [f for f in collect_function_rules(cls) if _op_name(f) == name]
    if not ruled:
        return run

    def plan(*args: Any, **kwargs: Any) -> Any:
        func = CALLING.func
        if in_backward() or (func is not None and _op_name(func) == name):
            return run(*args, **kwargs)
        call = f"{op} on {one_of(cls)} arrived without the function {name}, as in a transform of torch.func (vmap, "
        call += f"grad, jvp, ...) for a result of an op, or from another class that maps {op}"
        raise DispatchError(
            f"{call if func is None else f'{_shown(func)} on {one_of(cls)} computes by {op}'}, for which the rule of "
            f"the function {_shown(ruled[0])} is not asked, and mapping {op} would not be what that rule says",
            code="rule-not-asked",
            hint=f"add a rule for the op, @{cls.__name__}.implements(torch.ops.{op}), or for each function that "
            "computes by it",
        )

    return plan


def _op_name(function: Any) -> str:
    """Returns the name of the op of a function; those of ``torch.linalg`` and the like have their prefix in it."""
    return getattr(function, "__name__", "").partition(".")[0]  # that of an op has its overload behind a dot


def _shown(function: Any) -> str:
    """Returns a function's name; of a method, that of the function of its name if there is one."""
    name = function.__name__.strip("_")
    found = resolve_name(function) or name
    return f"torch.{name}" if found.startswith(("torch.Tensor.", name)) and hasattr(torch, name) else found
