"""Errors in an author's code that Python or PyTorch would replace or hide.

An operator in Python takes a ``TypeError`` from below to mean "not my operand", and goes on without it: ``x + y``
raises "unsupported operand", and ``x == y`` is False. A rule or ``materialize`` that applies an op to the value itself
recurses without end, and the ``RecursionError`` names neither.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import resolve_name

from subclasses._torch import OpOverload, in_backward, schema_of
from subclasses.autograd.python_functions import twins
from subclasses.errors import DispatchError, coded, one_of
from subclasses.op_schemas.schema import functional_counterpart
from subclasses.rules.author_code import unwrapped
from subclasses.rules.registry import collect_function_rules, family_of, find_op_rule, find_tag_rule
from subclasses.rules.results import describe
from subclasses.spec.values import tensors_in

# Functions that the operators of Python call, without the underscores of in-place and special methods.
_OPERATORS = frozenset(
    """add and bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor bmm div dot eq floor_divide
    floordiv ge gt le lshift lt matmul mm mod mul mv ne or pow reciprocal remainder rfloordiv rmatmul rmod rpow rshift
    rsub rtruediv sub truediv xor""".split()
)
# Messages of torch's errors for a call that no operand's class takes: the operator then tries the other operand.
_NOT_TAKEN = ("no implementation found", "Multiple dispatch failed")
# A wrapper may hold wrappers of its own class, so that a rule may call itself a few times.
_WITHOUT_END = 20


class EndlessRuleError(RecursionError):
    """A rule or ``materialize`` that calls itself without end."""


def raise_from_rule(cls: Any, func: Any, error: Exception, operands: Any = ()) -> NoReturn:
    """Raises the error of an op or function again, with a message that names the code of the class that raised it.

    Raises:
        RuntimeError: a rule or ``materialize`` raised a TypeError below an operator, or computes, under a compiler,
            with a tensor that is neither argument nor constant.
        EndlessRuleError: a rule or ``materialize`` calls itself without end.
        RuntimeError, IndexError: an op was mapped over an inner tensor that has another size than the value.
        Exception: the same error, if none of these applies.
    """
    try:
        next(explain for errors, explain in _EXPLAINED if isinstance(error, errors))(
            cls, func, error, operands
        )
        raise error
    finally:
        del error  # its traceback holds this frame, and with it the tensors of all frames


def _rule_for(cls: Any, func: Any) -> Any:
    """Returns the author's rule for an op or function; None if there is none."""
    if not isinstance(func, OpOverload):
        return collect_function_rules(cls).get(func)
    functional = functional_counterpart(func)
    rules = (find_op_rule(cls, func), functional and find_op_rule(cls, functional), find_tag_rule(cls, func))
    return next((rule for rule in rules if rule is not None), None)


def _code_for(cls: Any, func: Any) -> str:
    """Names the author's code for an op or function: a rule, else ``materialize``; "" for neither."""
    rule = _rule_for(cls, func)
    if rule is not None:
        return f"the rule {describe(rule)}"
    return "materialize()" if cls.__spec__.has_materialize else ""


def _shown(cls: Any, func: Any) -> str:
    return f"{resolve_name(func) or func} on {one_of(cls)}"


def _raise_type_error(cls: Any, func: Any, error: TypeError, operands: Any) -> None:
    said, rule, is_operator = _ARGUMENTS.match(str(error)), _rule_for(cls, func), is_of_operator(func)
    if said is not None and said[1] == getattr(unwrapped(rule), "__qualname__", None):
        error_type = RuntimeError if is_operator else TypeError
        raise coded(
            error_type,
            f"{_shown(cls, func)}: its rule {said[2]}",
            code="rule-parameters",
            hint=_signature_of(cls, func),
        ) from error
    if (
        is_operator
        and not any(words in str(error) for words in _NOT_TAKEN)
        and (code := _code_for(cls, func))
    ):
        raise RuntimeError(f"{_shown(cls, func)}: {code} raised TypeError: {error}") from error


def _raise_endless(cls: Any, func: Any, error: RecursionError, operands: Any) -> None:
    """Raises EndlessRuleError for a RecursionError that has passed through many calls of rules."""
    if isinstance(error, EndlessRuleError):
        return
    error.calls = getattr(error, "calls", 0) + 1  # type: ignore[attr-defined]
    if error.calls > _WITHOUT_END and (code := _code_for(cls, func)):  # type: ignore[attr-defined]
        _raise_for_redefined(cls, resolve_name(func) or str(func))
        raise EndlessRuleError(
            f"{_shown(cls, func)}: {code} calls itself without end, since it applies an op to a value of the class. "
            f"Let it compute with inner tensors, x.unwrap(), or, in the rule of a function of torch, "
            f"call {cls.__name__}.unruled(func, ...)"
        ) from None


def _note_other_operands(cls: Any, func: Any, error: AttributeError, operands: Any) -> None:
    """Notes, in an error of a rule, that it was called with a number or a plain tensor, and read a field of it."""
    if func in _JOINING and in_backward():
        error.add_note(_OF_JOINED_GRADIENTS.format(cls=cls._value_cls.__name__, op=func))
    elif any(error.obj is f for f in (func, *twins(func))):
        error.add_note(
            f"The first parameter of a rule is the function that was called, {resolve_name(func) or func}: write "
            f"`def rule(func, x, ...)`"
        )
    elif (
        error.name in cls.__spec__.names
        and isinstance(error.obj, _OPERANDS)
        and not isinstance(error.obj, cls)
        and _rule_for(cls, func) is not None
    ):
        error.add_note(
            f"{_shown(cls, func)}: {_code_for(cls, func)} read .{error.name} of {one_of(type(error.obj))}. An operand "
            f"of an op may be a number, a plain tensor or a value of another class: test isinstance(y, "
            f"{cls.__name__}) first"
        )


_OPERANDS = (int, float, complex, torch.SymInt, torch.SymFloat, Tensor)


_JOINING = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
_OF_JOINED_GRADIENTS = (
    "{op} was called by PyTorch's derivative of split, chunk or unbind, which joins the gradients of the parts. A part "
    "without one is a plain tensor of zeros there, of the outer size: let the rule of {cls} take it for zeros, or take "
    "single parts by x[i] or x[i:j], whose derivatives join nothing"
)


def _raise_for_redefined(cls: Any, name: str) -> None:
    """Raises EndlessRuleError if the class statement has run again since the value was made: rules name a new class."""
    now: Any = sys.modules.get(cls.__module__)
    for attribute in cls.__qualname__.split("."):
        now = getattr(now, attribute, None)
    if isinstance(now, type) and now is not cls:
        raise EndlessRuleError(
            f"{name} on {one_of(cls)} of an earlier definition: `class {cls.__name__}` has run again since the value "
            f"was made, as by a cell of a notebook. Its rules now find the new class under that name. "
            f"Make the value again"
        ) from None


def _raise_for_constants(cls: Any, func: Any, error: AssertionError, operands: Any) -> None:
    """Raises RuntimeError if a compiler met a tensor that a rule or ``materialize`` took from outside of the class."""
    if "convert all Tensors to FakeTensors" in str(error) and (code := _code_for(cls, func)):
        raise coded(
            RuntimeError,
            f"{_shown(cls, func)}: {code} computes with a tensor from outside of the class, which a compiler cannot "
            "take for a constant",
            code="tensor-from-outside",
            hint="write `table = constant([...])` in the class body and read it as self.table, or make it an inner "
            "tensor",
        ) from error


def _raise_for_sizes(cls: Any, func: Any, error: Exception, operands: Any) -> None:
    """Raises the error of a mapped op again, with the inner tensors that have another size than the value."""
    if isinstance(error, DispatchError) or _rule_for(cls, func) is not None:
        return  # an error of this library, or of a rule of the author
    if "Please clone()" in str(error):
        return  # an error about operands that share memory, which does not depend on a size
    for x in tensors_in(operands, None):
        if isinstance(x, cls):
            tensors = {f.name: x.__dict__[f.attribute] for f in cls.__spec__.inners}
            sizes = {name: t.shape for name, t in tensors.items() if t is not None}
            other = [f"{name!r} of size {tuple(size)}" for name, size in sizes.items() if size != x.shape]
            if other:
                raise coded(
                    type(error),
                    f"{func} on {one_of(cls)} of size {tuple(x.shape)}, mapped over its inner tensors, of which "
                    f"{' and '.join(other)} {'has' if len(other) == 1 else 'have'} another size: {error}",
                    code="inner-size",
                    hint=f"give each the size of the value, or write a rule: @{cls.__name__}.implements(torch.ops."
                    f"{func})",
                ) from error


_EXPLAINED: tuple[tuple[Any, Any], ...] = (
    (RecursionError, _raise_endless),
    (TypeError, _raise_type_error),
    (AssertionError, _raise_for_constants),
    (AttributeError, _note_other_operands),
    ((RuntimeError, IndexError), _raise_for_sizes),
)

# Python's message for a call with arguments that a function does not accept.
_ARGUMENTS = re.compile(
    r"([\w.<>]+)\(\) ((?:got an unexpected keyword|got multiple values|takes|missing) .*)"
)


def _signature_of(cls: Any, func: Any) -> str:
    """Returns a phrase that describes the arguments of a rule for a function."""
    if isinstance(func, OpOverload) and (family := family_of(cls, func)) is not None:
        return f"a rule for subclasses.{family.name} is called as {family.call}"
    if not isinstance(func, OpOverload):
        return (
            "a rule for a function takes all arguments that its callers write, in each way that they write them, after "
            "func, the function itself"
        )
    return (
        f"a rule takes the arguments of its op, {schema_of(func)}, of which those with a default are passed only where "
        f"they differ from it"
    )


def is_of_operator(func: Any) -> bool:
    """Whether an operator may have called a function; it calls methods of ``Tensor``, and not ``torch.add``."""
    called = getattr(func, "overloadpacket", func).__name__.strip("_")
    return called in _OPERATORS and (
        isinstance(func, OpOverload) or (resolve_name(func) or "").startswith("torch.Tensor.")
    )
