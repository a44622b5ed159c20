"""Checks of a registration against the class: that its own hooks call the rule, and the derivative of the rule."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import HigherOrderOperator, OpOverload, OpOverloadPacket, disabled_torch_function_impl
from subclasses.errors import SpecError, check_keyword
from subclasses.rules.author_code import unwrapped
from subclasses.rules.families import Family
from subclasses.rules.registry import find_op_rule, is_decomposed
from subclasses.spec.names import NEVER_DISPATCHED


def check_called(cls: type, root: type, keys: Sequence[Any]) -> None:
    """Checks that torch can call a rule for each key, which a hook in the class body may prevent.

    Raises:
        SpecError: compilers compute a key's result from the size. Or the function of an op's name calls another op,
            which has no rule. Or the class's own hook does not call the generated one: ``__torch_function__`` for a key
            whose rule runs above autograd, else ``__torch_dispatch__``.
    """
    for key in keys:
        called = _COMPUTES_BY.get(_packet(key))
        if called and called not in map(_packet, keys) and find_op_rule(cls, called.default) is None:
            raise SpecError(
                f"{cls.__name__}.implements: torch.{_packet(key).__name__} and the method call no rule for {key}, "
                f"since they compute by {called}",
                code="rule-not-called",
                hint=f"name torch.ops.{called} in its place, or beside it",
            )
        if (name := getattr(key, "__name__", "")) in NEVER_DISPATCHED and getattr(Tensor, name) is key:
            raise SpecError(
                f"{cls.__name__}.implements: compiled code calls no rule for Tensor.{name}, since the size "
                "determines its result",
                code="rule-not-called",
                hint="write a method of another name, or say with `outer` what the value shows",
            )
        # A rule for an op of a structure runs above autograd, where gradients are recorded.
        both = ["__torch_dispatch__"] + ["__torch_function__"] * (not cls._traits.is_representation)  # type: ignore[attr-defined]
        for hook in ["__torch_function__"] if _is_above_autograd(key) else both:
            _check_hook(cls, root, key, hook)


def _check_hook(cls: type, root: type, key: Any, hook: str) -> None:
    bases = cls.__mro__[: cls.__mro__.index(root)]
    author = next((b for b in bases if hook in vars(b).get("_handwritten", vars(b))), None)
    if author is not None and not _may_call_super(vars(author)[hook]):
        raise SpecError(
            f"{cls.__name__}.implements: torch never calls a rule for {key}, since {author.__name__} defines "
            f"{hook} without super(), by which it calls the generated one, which calls rules",
            code="rule-not-called",
            hint=f"end it with `return super().{hook}(func, types, args, kwargs)`, or remove it",
        )


def check_derivative(cls: Any, keys: Iterable[Any], derivative: str | None) -> None:
    """Checks the ``derivative`` of a rule.

    Raises:
        SpecError: it is not a name of a derivative. Or no formula applies, since the class has no ``materialize`` or
            the rule runs above autograd.
    """
    name = f"{cls.__name__}.implements"
    check_keyword(
        derivative in (None, "formula"), f'{name}: expected derivative="formula" or None', derivative
    )
    if derivative is None:
        return
    if not cls.__spec__.has_materialize or cls.__spec__.fallback == "map":
        raise SpecError(
            f'{name}: derivative="formula" is the gradient of the tensor that a value represents, and {cls.__name__} '
            f"has no materialize() or maps ops over its inner tensors",
            code="keyword-conflict",
            hint="leave derivative out: autograd differentiates the rule",
        )
    for key in keys:
        if _is_above_autograd(key):
            raise SpecError(
                f'{name}: derivative="formula" is for an op that reaches the class below autograd, and autograd '
                f"differentiates a rule for {key}",
                code="keyword-conflict",
                hint="name an op that PyTorch does not decompose, or leave derivative out",
            )


# The op that a function with an op's name calls instead, if the function is written in Python.
_COMPUTES_BY: dict[Any, OpOverloadPacket] = {torch.ops.aten.norm: torch.ops.aten.linalg_vector_norm}


def _packet(key: Any) -> Any:
    return key.overloadpacket if isinstance(key, OpOverload) else key


def with_type_errors(cls: type, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a ``__torch_dispatch__`` of a class body: a TypeError of its code does not mean that an op has no rule.

    Python takes a TypeError in an operator to mean that, and ``x == y`` would be False.
    """
    name, code = cls.__name__, hook.__code__  # type: ignore[attr-defined]

    @functools.wraps(hook)
    def __torch_dispatch__(cls: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(cls, func, *args, **kwargs)
        except TypeError as error:
            if traceback.extract_tb(error.__traceback__)[-1].filename != code.co_filename:
                raise
            raise RuntimeError(f"{name}.__torch_dispatch__, called for {func}: {error}") from error

    return __torch_dispatch__


def _is_above_autograd(key: Any) -> bool:
    """Whether ``__torch_function__`` calls the rule for a key."""
    if isinstance(key, OpOverload | OpOverloadPacket):
        return is_decomposed(key)
    return not isinstance(key, torch.Tag | HigherOrderOperator | Family)


def _may_call_super(author: Any) -> bool:
    """Whether a method refers to its class, as ``super()`` does, or is not written in Python."""
    function = unwrapped(getattr(author, "__func__", author))
    if function is disabled_torch_function_impl:
        return False
    code = getattr(function, "__code__", None)
    return code is None or "__class__" in code.co_freevars
