"""Ops of which a class maps the inner tensors, though a rule says something else of the function.

A rule for a function is asked where the function is called with a value. Inside of a transform of ``torch.func`` what
an op returned belongs to the transform, and the op of the function arrives at the value without it. Mapping it would
give another result than the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subclasses._torch import OpOverload
from subclasses._torch_tracing import is_called_by_transform
from subclasses.errors import DispatchError, one_of
from subclasses.rules.registry import collect_function_rules


def with_rules_above(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the plan that maps an op, if a rule for the function of its name exists.

    Raises:
        DispatchError: from the plan, where a transform calls it.
    """
    name = op.overloadpacket.__name__
    if not any(getattr(f, "__name__", None) == name for f in collect_function_rules(cls)):
        return run

    def plan(*args: Any, **kwargs: Any) -> Any:
        if is_called_by_transform():
            raise DispatchError(
                f"{op} on {one_of(cls)} inside of a transform of torch.func (vmap, grad, jvp, ...): the rule for the "
                f"function {name} is not asked there for what an op has returned, and mapping {op} would not be "
                f"what it says. Add a rule for the op with @{cls.__name__}.implements(torch.ops.{op})"
            )
        return run(*args, **kwargs)

    return plan
