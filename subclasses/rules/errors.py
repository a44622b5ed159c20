"""Errors in an author's code that would not reach the user as they are.

An operator in Python takes a ``TypeError`` from below to mean "not my operand", and goes on without it: ``x + y``
raises "unsupported operand", and ``x == y`` is False. A rule or ``materialize`` that applies an op to the value itself
runs without end, and the ``RecursionError`` names neither.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import resolve_name

from subclasses._torch import OpOverload, in_backward, schema_of
from subclasses.autograd.python_functions import twins
from subclasses.errors import DispatchError, one_of
from subclasses.rules.author_code import global_names
from subclasses.rules.registry import all_rules, family_of
from subclasses.rules.results import describe

# What the operators of Python call, without the underscores of in-place and special methods.
_OPERATORS = frozenset(
    """add and bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor bmm div dot eq floor_divide
    floordiv ge gt le lshift lt matmul mm mod mul mv ne or pow reciprocal remainder rfloordiv rmatmul rmod rpow rshift
    rsub rtruediv sub truediv xor""".split()
)
# What torch raises where no operand's class takes a call: the operator is to ask the other operand.
_NOT_TAKEN = ("no implementation found", "Multiple dispatch failed")
# A wrapper may hold wrappers of its own class, so that a rule is inside of itself a few times.
_WITHOUT_END = 20


class EndlessRuleError(RecursionError):
    """A rule or ``materialize`` that calls itself without end."""


def raise_from_rule(cls: Any, func: Any, error: Exception, operands: Any = ()) -> NoReturn:
    """Raises the error of an op or function again, in words that name the code of the class that it comes from.

    Raises:
        RuntimeError: a rule or ``materialize`` raised a TypeError below an operator, or computes, under a compiler,
            with a tensor that is neither argument nor constant.
        EndlessRuleError: a rule or ``materialize`` calls itself without end.
        RuntimeError, IndexError: an op was mapped over an inner tensor that has another size than the value.
        Exception: the same error, which has another reason.
    """
    try:
        if isinstance(error, EndlessRuleError):
            raise error
        explain = next((f for kinds, f in _EXPLAINED if isinstance(error, kinds)), None)
        if explain is not None and not isinstance(error, RecursionError):
            explain(cls, func, error, operands)
            raise error
        named, name = dict(_code_of(cls)), resolve_name(func) or str(func)
        if isinstance(error, RecursionError):
            counts = Counter(f.f_code for f in _frames_around(error) if f.f_code in named)
            code, count = counts.most_common(1)[0] if counts else (None, 0)
            if code is not None and count > _WITHOUT_END:
                _raise_for_redefined(cls, name)
                raise EndlessRuleError(
                    f"{name} on {one_of(cls)}: {named[code]} calls itself without end, since it applies an op to a "
                    f"value of the class; let it compute with inner tensors, as x.unwrap() gives them, "
                    f"or, in the rule of a function of torch, call {cls.__name__}.unruled(func, ...)"
                ) from None
        elif (said := _ARGUMENTS.match(str(error))) and _is_of_a_call(error, named):
            kind = RuntimeError if is_of_operator(func) else TypeError
            raise kind(f"{name} on {one_of(cls)}: its rule {said[1]}; {_signature_of(cls, func)}") from error
        elif is_of_operator(func) and not any(words in str(error) for words in _NOT_TAKEN):
            raised = next((f.f_code for f in _frames_inside(error) if f.f_code in named), None)
            if raised is not None:
                raise RuntimeError(
                    f"{name} on {one_of(cls)}: {named[raised]} raised TypeError: {error}"
                ) from error
        raise error
    finally:
        del error  # its traceback holds this frame, and with it the tensors of all frames


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
    ):
        named = dict(_code_of(cls))
        rule = next((named[f.f_code] for f in _frames_inside(error) if f.f_code in named), "")
        if rule.startswith("the rule"):
            name = resolve_name(func) or str(func)
            error.add_note(
                f"{name} on {one_of(cls)}: {rule} read .{error.name} of {one_of(type(error.obj))}. An operand of an op "
                f"may be a number, a plain tensor or a value of another class: test isinstance(y, {cls.__name__}) first"
            )


_OPERANDS = (int, float, complex, Tensor)


_JOINING = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
_OF_JOINED_GRADIENTS = (
    "{op} was called by PyTorch's derivative of split, chunk or unbind, which joins the gradients of the parts. A part "
    "without one is a plain tensor of zeros there, of the outer size: let the rule of {cls} take it for zeros, or take "
    "single parts by x[i] or x[i:j], whose derivatives join nothing"
)


def _raise_for_redefined(cls: Any, name: str) -> None:
    """Raises EndlessRuleError if the class statement has run again since the value was made: its rules know another."""
    now: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        now = getattr(now, part, None)
    if isinstance(now, type) and now is not cls:
        raise EndlessRuleError(
            f"{name} on {one_of(cls)} of an earlier definition: `class {cls.__name__}` has run again since the value "
            f"was made, as by a cell of a notebook, and the code of its rules now finds the new class under that name; "
            f"make the value again"
        ) from None


# In the error for a tensor that a compiler has no stand-in for.
FROM_OUTSIDE = "from outside of the class"


def _raise_for_constants(cls: Any, func: Any, error: AssertionError, operands: Any) -> None:
    """Raises RuntimeError if a compiler met a tensor that a rule or ``materialize`` took from outside of the class."""
    if "convert all Tensors to FakeTensors" not in str(error):
        return
    named = dict(_code_of(cls))
    frame = next((f for f in _frames_inside(error) if f.f_code in named), None)
    if frame is None:
        return
    code = frame.f_code
    outside = {name: frame.f_globals.get(name) for name in global_names(code)}
    outside |= {name: frame.f_locals.get(name) for name in code.co_freevars}
    tensors = [name for name, value in outside.items() if isinstance(value, Tensor)]
    what = f"the tensor {tensors[0]}" if tensors else "a tensor"
    # A module's name may be that of an attribute of Tensor, such as T.
    name = next((n for n in tensors if not hasattr(Tensor, n)), "table")
    raise RuntimeError(
        f"{resolve_name(func) or func} on {one_of(cls)}: {named[code]} computes with {what} {FROM_OUTSIDE}, "
        f"which a compiler cannot take for a constant; write `{name} = constant([...])` in the "
        f"class body and read it as self.{name}, or make it an inner tensor"
    ) from error


def _raise_for_sizes(cls: Any, func: Any, error: Exception, operands: Any) -> None:
    """Raises the error of a mapped op again, with the inner tensors that have another size than the value."""
    named = dict(_code_of(cls))
    if isinstance(error, DispatchError) or any(f.f_code in named for f in _frames_inside(error)):
        return  # an error of this library, or of a rule of the author's
    if "Please clone()" in str(error):
        return  # of operands that share memory, which no size is the reason of
    parts = [x for arg in operands for x in (arg if isinstance(arg, list | tuple) else (arg,))]
    for x in parts:
        if isinstance(x, cls):
            tensors = {f.name: x.__dict__[f.attribute] for f in cls.__spec__.inners}
            sizes = {name: t.shape for name, t in tensors.items() if t is not None}
            other = [f"{name!r} of size {tuple(size)}" for name, size in sizes.items() if size != x.shape]
            if other:
                raise type(error)(
                    f"{func} on {one_of(cls)} of size {tuple(x.shape)}, mapped over its inner tensors, of which "
                    f"{' and '.join(other)} {'has' if len(other) == 1 else 'have'} another size: {error}; give each "
                    f"the size of the value, or write a rule: @{cls.__name__}.implements(torch.ops.{func})"
                ) from error


_EXPLAINED: tuple[tuple[Any, Any], ...] = (
    (AssertionError, _raise_for_constants),
    (AttributeError, _note_other_operands),
    ((RuntimeError, IndexError), _raise_for_sizes),
)

# What Python says of a call that a function cannot take.
_ARGUMENTS = re.compile(r"[\w.<>]+\(\) ((?:got an unexpected keyword|got multiple values|takes|missing) .*)")


def _is_of_a_call(error: BaseException, named: dict[types.CodeType, str]) -> bool:
    """Whether an error was raised by the call of a rule, and not inside of the author's code."""
    return not any(f.f_code in named for f in _frames_inside(error))


def _signature_of(cls: Any, func: Any) -> str:
    """Returns what a rule for a function is called with, in words."""
    if isinstance(func, OpOverload) and (family := family_of(cls, func)) is not None:
        return f"a rule for subclasses.{family.name} is called as {family.call}"
    if not isinstance(func, OpOverload):
        return (
            "a rule for a function takes all arguments that its callers write, in each way that they write them, after "
            "func, the function itself"
        )
    return (
        f"a rule takes the arguments of its op{_shown(func)}, of which those with a default are passed only where they "
        f"differ from it"
    )


def _shown(func: Any) -> str:
    return f", {schema_of(func)}" if isinstance(func, OpOverload) else ""


def is_of_operator(func: Any) -> bool:
    """Whether an operator may have called a function; it calls methods of ``Tensor``, and not ``torch.add``."""
    called = getattr(func, "overloadpacket", func).__name__.strip("_")
    return called in _OPERATORS and (
        isinstance(func, OpOverload) or (resolve_name(func) or "").startswith("torch.Tensor.")
    )


def _code_of(cls: Any) -> Iterator[tuple[types.CodeType, str]]:
    """Yields the code of what the author wrote, with words for it."""
    written = [(rule, f"the rule {describe(rule)}") for _, rule in all_rules(cls)]
    if cls.__spec__.has_materialize:
        written.append((cls.materialize, "materialize()"))
    for function, words in written:
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(function)
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        if code is not None:
            yield code, words


def _frames_around(error: BaseException) -> Iterator[types.FrameType]:
    """Yields the frames from the innermost that handles an error outwards."""
    frame = error.__traceback__.tb_frame if error.__traceback__ else None
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames_inside(error: BaseException) -> Iterator[types.FrameType]:
    """Yields the frames from the one that handles an error to the one that raised it."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
