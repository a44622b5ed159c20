"""What a rule returns: the None of a way through it that ends with nothing would reach the caller."""

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
    if not may_return_none(rule):
        return rule
    name = resolve_name(key) or key
    return _checked(cls, name, rule, lambda out: out is not None, "callers expect a result")


def with_tensor(cls: type, op: Any, rule: Rule) -> Rule:
    """Returns a rule for an op with one tensor as its result, of which nothing else is taken but NotImplemented.

    Raises:
        DispatchError: from the rule, if it returns something else.
    """
    return _checked(cls, op, rule, _is_tensor, "the op has one tensor as its result")


def _is_tensor(out: Any) -> bool:
    return isinstance(out, Tensor) or out is NotImplemented


def _checked(cls: type, name: Any, rule: Rule, fits: Callable[[Any], bool], expected: str) -> Rule:
    @functools.wraps(rule)
    def checked(func: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(func, *args, **kwargs)
        if fits(out):
            return out
        raise DispatchError(
            f"{name} on {one_of(cls)}: the rule {describe(rule)} returned "
            f"{'None' if out is None else one_of(type(out))} for these arguments, and {expected}; end each way through "
            f"it with `return ...`, or with `return NotImplemented` where the class has no answer"
        )

    return checked


def describe(rule: Rule) -> str:
    """Returns a rule's qualified name and the file and line of its definition."""
    rule = inspect.unwrap(rule)
    code = getattr(rule, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(rule, '__qualname__', rule)}{where}"


# ---- how a function ends -----------------------------------------------------------------------------------


def may_return_none(rule: Rule) -> bool:
    """Whether some way through a function ends with the constant None, explicitly or because nothing follows."""
    code = getattr(inspect.unwrap(rule), "__code__", None)
    return code is not None and any(_returns_none(code))


def returns_nothing(rule: Rule) -> bool:
    """Whether each way through a function ends without a value, as far as its bytecode tells."""
    code = getattr(rule, "__code__", None)
    if code is None or code.co_name == "<lambda>" or code.co_flags & inspect.CO_GENERATOR:
        return False
    ends = [*_returns_none(code)]
    # A value that another way brings to the return, as in `x or None`, is not known.
    return bool(ends) and all(ends) and not any(map(_is_shared_return, dis.get_instructions(code)))


def _is_shared_return(step: dis.Instruction) -> bool:
    return step.opname == "RETURN_VALUE" and step.is_jump_target


def _returns_none(code: types.CodeType) -> Iterator[bool]:
    """Whether the constant None is loaded just before a function returns, for each place where it does.

    It reads the bytes of the instructions, which takes a hundredth of the time of taking them apart.
    """
    names, arguments, constants = code.co_code[::2], code.co_code[1::2], code.co_consts
    for name, loads, offset in _RETURNS:
        at = names.find(name)
        while at >= 0:
            yield names[at + offset] == loads and constants[arguments[at + offset]] is None
            at = names.find(name, at + 1)


# A return, what loads its constant, and where that stands. In Python 3.12 and 3.13 another return loads it itself.
_RETURNS = [(dis.opmap["RETURN_VALUE"], dis.opmap["LOAD_CONST"], -1)]
if "RETURN_CONST" in dis.opmap:
    _RETURNS.append((dis.opmap["RETURN_CONST"], dis.opmap["RETURN_CONST"], 0))
