"""Checks of a rule's results: as many tensors as the op returns, of the size that it promises, none an operand itself.

PyTorch accepts a rule's results as the op's results without a check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from subclasses._torch import is_composite, is_traceable_wrapper_subclass
from subclasses.errors import DispatchError, one_of
from subclasses.layout import field_name
from subclasses.op_schemas.aliasing import check_writes_target
from subclasses.op_schemas.schema import op_facts
from subclasses.rules.author_code import unwrapped
from subclasses.spec.values import inner_tensors, tensors_in, with_inners

Rule = Callable[..., Any]
Finish = Callable[[Any, tuple[Any, ...]], Any]  # (a rule's result, its operands) -> the op's result
Refuse = Callable[[tuple[Any, ...], dict[str, Any]], None]


def with_result(cls: type, key: Any, rule: Rule) -> Rule:
    """Returns a rule whose result is checked.

    Raises:
        DispatchError: from the rule, if it returns None.
    """

    @functools.wraps(rule)
    def checked(func: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(func, *args, **kwargs)
        if out is None:
            raise _result_error(cls, resolve_name(key) or key, rule, out, "callers expect a result")
        return out

    return checked


def with_refusal(rule: Rule, refuse: Refuse) -> Rule:
    """Returns a rule that calls ``refuse`` before it returns NotImplemented."""

    @functools.wraps(rule)
    def checked(func: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(func, *args, **kwargs)
        if out is NotImplemented:
            refuse(args, kwargs)
        return out

    return checked


def check_refusal(cls: Any, op: Any, rule: Rule, args: Any, kwargs: Any) -> None:
    """Raises DispatchError for a rule that returned NotImplemented, if no other operand's class can run the op.

    PyTorch's own error names no rule. An operator in Python needs that error, to try the other operand.
    """
    operands = tensors_in(args, kwargs)
    if not any(is_traceable_wrapper_subclass(t) and not isinstance(t, cls) for t in operands):
        raise DispatchError(
            f"{op} on {one_of(cls)}: the rule {describe(rule)} returned NotImplemented for these arguments, and no "
            "operand of another class is left to ask",
            code="no-rule",
        )


def with_tensor(cls: type, op: Any, rule: Rule, finish: Finish, refuse: Refuse) -> Rule:
    """Returns a rule for an op with one tensor as its result; the rule returns a tensor or NotImplemented.

    Raises:
        DispatchError: from the rule, if it returns something else.
    """
    attributes: tuple[str, ...] = cls.__spec__.attributes  # type: ignore[attr-defined]

    @functools.wraps(rule)
    def checked(func: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(func, *args, **kwargs)
        if out.__class__ is cls:
            stored = out.__dict__
            for name in attributes:
                if stored[name].__class__ is cls:
                    _check_nested(cls, op, rule, name, tensors_in(args, kwargs))
        if isinstance(out, Tensor):
            return finish(out, args)
        if out is NotImplemented:
            refuse(args, kwargs)
            return out
        hint = _hint_of_one(cls, out)
        raise _result_error(cls, op, rule, out, "the op has one tensor as its result", hint)

    return checked


def _check_nested(cls: type, op: Any, rule: Rule, name: str, operands: list[Any]) -> None:
    """Raises DispatchError for a value inside of another one of its class, unless an operand is one, too."""
    values = [t for t in operands if isinstance(t, cls)]
    if not any(isinstance(t, cls) for x in values for t in vars(x).values()):
        raise DispatchError(
            f"{op} on {one_of(cls)}: the rule {describe(rule)} returned {one_of(cls)} whose {field_name(name)} is "
            f"{one_of(cls)}, as no operand holds one: it took an operand for a plain tensor",
            code="rule-result",
            hint=f"it is called when any operand is {one_of(cls)}: read the fields of each for which "
            f"isinstance(operand, {cls.__name__}) holds",
        )


def with_tensors(cls: type, op: Any, rule: Rule, finish: Finish, refuse: Refuse) -> Rule:
    """Returns a rule for an op with several tensors, or a list of them, as its results, whose number is checked.

    Raises:
        DispatchError: from the rule, if it does not return that number of tensors in a tuple or list.
    """
    returns = op_facts(op).returns
    count = None if returns == ("tensors",) else len(returns)

    @functools.wraps(rule)
    def checked(func: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(func, *args, **kwargs)
        if _are_tensors(out, count):
            return finish(out, args)
        if out is NotImplemented:
            refuse(args, kwargs)
            return out
        expected = "a list of tensors" if count is None else f"{count} tensors"
        hint = "return them in a tuple, or NotImplemented where the class has no answer"
        raise _result_error(cls, op, rule, out, f"the op has {expected} as its result", hint)

    return checked


def _are_tensors(out: Any, count: int | None) -> bool:
    return isinstance(out, list | tuple) and (
        len(out) == count if count is not None else all(isinstance(t, Tensor) for t in out)
    )


def with_results_of(cls: Any, op: Any, rule: Rule, refuse: Refuse = lambda args, kwargs: None) -> Rule:
    """Returns a rule for an op whose results are checked as far as the op's schema describes them.

    Args:
        cls: the class.
        op: the op.
        rule: its rule.
        refuse: called with the arguments for which the rule returned NotImplemented.
    """
    facts = op_facts(op)
    returns = facts.returns
    # An op that writes returns its target, and a rule for a composite op runs above autograd.
    finish = _as_they_are if facts.written or is_composite(op) else new_result
    if returns == ("tensor",):
        return with_tensor(cls, op, rule, finish, refuse)
    if returns == ("tensors",) or (len(returns) > 1 and set(returns) == {"tensor"}):
        return with_tensors(cls, op, rule, finish, refuse)
    return with_refusal(with_result(cls, op, rule) if returns else rule, refuse)


def _as_they_are(out: Any, args: tuple[Any, ...]) -> Any:
    return out


def with_note_on_copies(cls: type, rule: Rule, run: Rule) -> Rule:
    """Returns a rule for ``copy_`` whose errors name the callers that copy values of the class with it."""

    def noted(x: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(x, source, *args, **kwargs)
        except Exception as error:
            if isinstance(source, cls) and not isinstance(error, DispatchError):
                error.add_note(
                    f"The rule {describe(rule)} for copy_ was given {one_of(cls)} to copy. It is called so where "
                    f"an in-place op without a rule, or compiled code, writes its result: let it copy the inner "
                    f"tensors of the source if isinstance(source, {cls.__name__})"
                )
            raise

    return noted


def copying_by(cls: type, rule: Rule) -> Callable[[Any, Any, Any], None]:
    """Returns a function that writes the result of an op into a value by the rule for ``copy_``.

    Raises:
        DispatchError: from the function, if the rule returned NotImplemented, or a new value in place of the target.
    """
    run = with_note_on_copies(cls, rule, functools.partial(rule, torch.ops.aten.copy_.default))
    words = f"the rule {describe(rule)} for copy_, by which it writes,"

    def write(op: Any, x: Any, value: Any) -> None:
        out = run(x, value)
        if out is NotImplemented:
            raise DispatchError(
                f"{op} on {one_of(cls)}: {words} returned NotImplemented, so that nothing was written",
                code="rule-write",
            )
        check_writes_target(cls, op, words, x, out)

    return write


# ---- results that are not operands -----------------------------------------------------------------------------------


def new_result(out: Any, args: tuple[Any, ...]) -> Any:
    """Returns a rule's results, with a new tensor in place of each operand among them.

    PyTorch sets the derivative of the op on a rule's results, and would replace the derivative of the operand.
    """
    if isinstance(out, list | tuple):
        return type(out)(new_result(x, args) for x in out)
    for operand in args:
        if operand is out or (isinstance(operand, list | tuple) and id(out) in map(id, operand)):
            return _alias(out) if isinstance(out, Tensor) else out
    return out


def _alias(x: Any) -> Any:
    if hasattr(type(x), "__spec__"):
        return with_inners(x, inner_tensors(x))
    return torch.ops.aten.alias.default(x)


# ---- checks ----------------------------------------------------------------------------------------------------------


_ENDS = (
    "end each way through it with `return ...`, or with `return NotImplemented` where the class has no answer"
)


def _hint_of_one(cls: Any, out: Any) -> str:
    """Returns a hint for a rule that returns a number or several tensors for an op with one tensor as its result."""
    if isinstance(out, bool | int | float | complex):
        field = cls.__spec__.inners[0].name
        return (
            f"return a tensor: leave out .item(), behind which gradients are lost, or return torch.tensor({out!r}), on "
            f"the device of x.{field}"
        )
    if isinstance(out, list | tuple) and all(isinstance(t, Tensor) for t in out):
        names = ", ".join(cls.__spec__.inner_names)
        return f"return one tensor: if these are inner tensors, a value made of them, {cls.__name__}({names})"
    return _ENDS


def _result_error(
    cls: type, name: Any, rule: Rule, out: Any, expected: str, hint: str = _ENDS
) -> DispatchError:
    return DispatchError(
        f"{name} on {one_of(cls)}: the rule {describe(rule)} returned {_show(out)} for these arguments, and {expected}",
        code="rule-result",
        hint=_ENDS if out is None else hint,
    )


def _show(out: Any) -> str:
    if out is None:
        return "None"
    if isinstance(out, list | tuple):
        return f"a {type(out).__name__} of {len(out)}"
    return one_of(type(out))


def describe(rule: Rule) -> str:
    """Returns a rule's qualified name and the file and line of its definition."""
    rule = unwrapped(rule)
    code = getattr(rule, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(rule, '__qualname__', rule)}{where}"
