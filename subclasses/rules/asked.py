"""Checks that a class with a ``__torch_function__`` of its own asks for the rules registered above autograd."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from subclasses._torch import HigherOrderOperator, OpOverload, OpOverloadPacket, disabled_torch_function_impl
from subclasses.errors import SpecError
from subclasses.rules.author_code import codes_of
from subclasses.rules.families import Family
from subclasses.rules.registry import is_decomposed

_HOOK = "__torch_function__"


def check_asked(cls: type, root: type, keys: Iterable[Any]) -> None:
    """Checks that torch can call a rule for each key, which the class's own ``__torch_function__`` may prevent.

    Raises:
        SpecError: a key has a rule above autograd, and the method in a class body does not lead to the generated one.
    """
    bases = cls.__mro__[: cls.__mro__.index(root)]
    found = [(b, vars(b)[_HOOK]) for b in bases if _HOOK in vars(b).get("_handwritten", vars(b))]
    if not found or _calls_super(found[0][1]):
        return
    for key in keys:
        if _is_above_autograd(key):
            raise SpecError(
                f"{cls.__name__}.implements: torch never calls a rule for {key}, since {found[0][0].__name__} defines "
                f"{_HOOK} and does not call the generated one, which asks for rules; end it with `return "
                f"super().{_HOOK}(func, types, args, kwargs)`, or remove it"
            )


def _is_above_autograd(key: Any) -> bool:
    """Whether the rule for a key is asked for by ``__torch_function__``."""
    if isinstance(key, OpOverload | OpOverloadPacket):
        return is_decomposed(key)
    return not isinstance(key, torch.Tag | HigherOrderOperator | Family)


def _calls_super(hook: Any) -> bool:
    """Whether a method names ``__torch_function__``, as ``super().__torch_function__(...)`` does, or cannot be read."""
    function = getattr(hook, "__func__", hook)
    if function is disabled_torch_function_impl:
        return False
    codes = list(codes_of(function))
    return not codes or any(_HOOK in (*code.co_names, *code.co_consts) for code in codes)
