"""Rules for ops of a representation: PyTorch's formula for the op is their derivative.

The formula is about the tensors that values represent, and its gradients are plain. What inner tensors of a result are
as functions of those of the operands, it does not tell: they are not read where gradients are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from subclasses._torch import any_requires_grad
from subclasses.layout import BY_FORMULA
from subclasses.spec.values import tensors_in


def noting_results(run: Callable[..., Any], *, by_rule: bool) -> Callable[..., Any]:
    """Wraps the plan of an op: a result that follows from a rule is noted, and any result of a noted operand.

    Args:
        run: The plan.
        by_rule: Whether it is by a rule of the author.
    """

    def plan(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if not torch.is_grad_enabled():
            return out
        operands = tensors_in(args, kwargs)
        is_noted = any_requires_grad(*operands) if by_rule else any(BY_FORMULA in vars(t) for t in operands)
        for t in tensors_in((out,), None) if is_noted else ():
            if hasattr(type(t), "__spec__"):
                t.__dict__[BY_FORMULA] = True
        return out

    return plan
