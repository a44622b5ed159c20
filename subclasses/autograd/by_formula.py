"""Rules for ops of a representation: PyTorch's formula for the op is their derivative.

The formula applies to the tensors that values represent, and its gradients are plain. It gives no derivative between
the inner tensors of a result and the operands' inner tensors. They are not read where gradients are recorded.
The mark ``BY_FORMULA``, an attribute, is set on such a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from subclasses._torch import any_requires_grad
from subclasses.layout import BY_FORMULA
from subclasses.spec.values import tensors_in


def with_formula_marks(run: Callable[..., Any], *, by_rule: bool) -> Callable[..., Any]:
    """Wraps the callable of an op: marks a result that follows from a rule, and each result of a marked operand.

    Args:
        run: The callable.
        by_rule: Whether the callable is a rule of the author.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if not torch.is_grad_enabled():
            return out
        operands = tensors_in(args, kwargs)
        is_noted = any_requires_grad(*operands) if by_rule else any(BY_FORMULA in vars(t) for t in operands)
        for t in tensors_in((out,), None) if is_noted else ():
            if hasattr(type(t), "__spec__"):
                t.__dict__[BY_FORMULA] = True
        return out

    return wrapped
