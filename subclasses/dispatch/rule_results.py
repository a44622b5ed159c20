"""What a rule returns: the None of a way through it that ends with nothing would reach the caller.

PyTorch takes what a rule returns as the op's results without a look at how many there are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import resolve_name

from subclasses.dispatch.schema import op_facts
from subclasses.errors import DispatchError, one_of
from subclasses.spec.endings import may_return_none

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


def with_tensors(cls: type, op: Any, rule: Rule) -> Rule:
    """Returns a rule for an op with several tensors, or a list of them, as its results, whose number is checked.

    Raises:
        DispatchError: from the rule, if it returns something else than so many in a tuple or list.
    """
    kinds = op_facts(op).returns
    count = None if kinds == ("tensors",) else len(kinds)
    expected = "a list of tensors" if count is None else f"{count} tensors"
    fits = functools.partial(_are_tensors, count=count)
    mend = "return them in a tuple, or NotImplemented where the class has no answer"
    return _checked(cls, op, rule, fits, f"the op has {expected} as its result", mend)


def _are_tensors(out: Any, count: int | None) -> bool:
    if out is NotImplemented:
        return True
    return isinstance(out, list | tuple) and (
        len(out) == count if count is not None else all(isinstance(t, Tensor) for t in out)
    )


def with_results_of(cls: type, op: Any, rule: Rule) -> Rule:
    """Returns a rule for an op whose results are checked as far as the op's schema says what they are."""
    kinds = op_facts(op).returns
    if kinds == ("tensor",):
        return with_tensor(cls, op, rule)
    if kinds == ("tensors",) or (len(kinds) > 1 and set(kinds) == {"tensor"}):
        return with_tensors(cls, op, rule)
    return with_result(cls, op, rule) if kinds else rule


def _is_tensor(out: Any) -> bool:
    return isinstance(out, Tensor) or out is NotImplemented


_ENDS = (
    "end each way through it with `return ...`, or with `return NotImplemented` where the class has no answer"
)


def _checked(
    cls: type, name: Any, rule: Rule, fits: Callable[[Any], bool], expected: str, mend: str = _ENDS
) -> Rule:
    @functools.wraps(rule)
    def checked(func: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(func, *args, **kwargs)
        if fits(out):
            return out
        raise DispatchError(
            f"{name} on {one_of(cls)}: the rule {describe(rule)} returned {_show(out)} for these arguments, and "
            f"{expected}; {_ENDS if out is None else mend}"
        )

    return checked


def _show(out: Any) -> str:
    if out is None:
        return "None"
    if isinstance(out, list | tuple):
        return f"a {type(out).__name__} of {len(out)}"
    return one_of(type(out))


def describe(rule: Rule) -> str:
    """Returns a rule's qualified name and the file and line of its definition."""
    rule = inspect.unwrap(rule)
    code = getattr(rule, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(rule, '__qualname__', rule)}{where}"
