"""Checks that a class with a ``__torch_function__`` or ``__torch_dispatch__`` of its own asks for its rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from subclasses._torch import HigherOrderOperator, OpOverload, OpOverloadPacket, disabled_torch_function_impl
from subclasses.errors import SpecError
from subclasses.rules.author_code import codes_of
from subclasses.rules.families import Family
from subclasses.rules.registry import is_decomposed


def check_asked(cls: type, root: type, keys: Iterable[Any]) -> None:
    """Checks that torch can call a rule for each key, which a hook in the class body may prevent.

    Raises:
        SpecError: the class's own ``__torch_function__``, of a key whose rule is above autograd, or its own
            ``__torch_dispatch__``, of another, does not lead to the generated one.
    """
    for key in keys:
        hook = "__torch_function__" if _is_above_autograd(key) else "__torch_dispatch__"
        bases = cls.__mro__[: cls.__mro__.index(root)]
        author = next((b for b in bases if hook in vars(b).get("_handwritten", vars(b))), None)
        if author is not None and not _calls_super(vars(author)[hook], hook):
            raise SpecError(
                f"{cls.__name__}.implements: torch never calls a rule for {key}, since {author.__name__} defines "
                f"{hook} and does not call the generated one, which asks for rules; end it with `return "
                f"super().{hook}(func, types, args, kwargs)`, or remove it"
            )


def _is_above_autograd(key: Any) -> bool:
    """Whether the rule for a key is asked for by ``__torch_function__``."""
    if isinstance(key, OpOverload | OpOverloadPacket):
        return is_decomposed(key)
    return not isinstance(key, torch.Tag | HigherOrderOperator | Family)


def _calls_super(author: Any, hook: str) -> bool:
    """Whether a method names its hook, as ``super().__torch_function__(...)`` does, or cannot be read."""
    function = getattr(author, "__func__", author)
    if function is disabled_torch_function_impl:
        return False
    codes = list(codes_of(function))
    return not codes or any(hook in (*code.co_names, *code.co_consts) for code in codes)
