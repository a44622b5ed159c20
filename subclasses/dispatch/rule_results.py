"""What a rule returns: on some way through it nothing, which would reach the caller as None."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import resolve_name

from subclasses.errors import DispatchError, one_of

Rule = Callable[..., Any]


def with_result(cls: type, key: Any, rule: Rule) -> Rule:
    """Returns a rule whose result is checked if a way through it ends without one, as an ``if`` without ``else`` does.

    Raises:
        DispatchError: from the rule, if it returns None.
    """
    if not _may_return_none(rule):
        return rule

    @functools.wraps(rule)
    def checked(func: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(func, *args, **kwargs)
        if out is None:
            raise DispatchError(
                f"{resolve_name(key) or key} on {one_of(cls)}: the rule {describe(rule)} returned None for these "
                f"arguments, and callers expect a result; end each way through it with `return ...`, or with `return "
                f"NotImplemented` where the class has no answer"
            )
        return out

    return checked


def with_tensor(cls: type, op: Any, rule: Rule) -> Rule:
    """Returns a rule for an op with one tensor as its result, of which nothing else is taken but NotImplemented.

    Raises:
        DispatchError: from the rule, if it returns something else.
    """

    @functools.wraps(rule)
    def checked(func: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(func, *args, **kwargs)
        if isinstance(out, Tensor) or out is NotImplemented:
            return out
        raise DispatchError(
            f"{op} on {one_of(cls)}: the rule {describe(rule)} returned "
            f"{'None' if out is None else one_of(type(out))} for these arguments, and the op has one tensor as its "
            f"result; end each way through the rule with `return ...`, or with `return NotImplemented` where the class "
            f"has no answer"
        )

    return checked


def describe(rule: Rule) -> str:
    """Returns a rule's qualified name and the file and line of its definition."""
    rule = inspect.unwrap(rule)
    code = getattr(rule, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(rule, '__qualname__', rule)}{where}"


def _may_return_none(rule: Rule) -> bool:
    """Whether some way through a function ends with the constant None, explicitly or because nothing follows.

    It reads the bytes of the instructions, which takes a hundredth of the time of taking them apart.
    """
    code = getattr(inspect.unwrap(rule), "__code__", None)
    if code is None:
        return False
    constants = code.co_consts
    if _RETURN_CONST is not None:
        return any(constants[of] is None for _, of in _find(code, _RETURN_CONST))
    return any(name == _LOAD_CONST and constants[of] is None for name, of in _find(code, _RETURN_VALUE, -1))


def _find(code: types.CodeType, name: int, offset: int = 0) -> Iterator[tuple[int, int]]:
    """Yields the name and the argument of each instruction that stands at an offset from one of this name."""
    names, arguments = code.co_code[::2], code.co_code[1::2]
    at = names.find(name)
    while at >= 0:
        yield names[at + offset], arguments[at + offset]
        at = names.find(name, at + 1)


_RETURN_VALUE, _LOAD_CONST = dis.opmap["RETURN_VALUE"], dis.opmap["LOAD_CONST"]
_RETURN_CONST = dis.opmap.get("RETURN_CONST")  # of Python 3.12 and 3.13, in place of the other two
