"""Causes of broken promises that an error tells: each has its own advice, whichever promise met the error.

A promise's advice fits what breaks it most often. A fault of one rule can break many promises, and then the advice is
the same for all of them.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from subclasses.dispatch.rule_errors import FROM_OUTSIDE
from subclasses.dispatch.rule_results import describe
from subclasses.dispatch.rules import all_rules
from subclasses.errors import DispatchError, one_of
from subclasses.testing.errors import chain, innermost

IsOwn = Callable[[types.FrameType], bool]

# PyTorch's message where a compiler's stand-in meets a tensor with data that is no argument.
_REAL_TENSOR = "Please convert all Tensors to FakeTensors"
_UNEXPECTED = re.compile(r"(\S+)\(\) got an unexpected keyword argument '(\w+)'")


def mend_of(error: BaseException | None, cls: type, is_own: IsOwn = lambda frame: False) -> str | None:
    """Returns the advice for the first known cause in a chain of errors, or None.

    Args:
        error: what broke a promise, with the errors that caused it.
        cls: the class under test.
        is_own: whether a frame runs code of a class that was written by hand.
    """
    for one in chain(error):
        for find in (_other_operand, _unexpected_keyword, _foreign_tensor, _endless):
            if mend := find(one, cls):
                return mend
        if mend := _own_accident(one, cls, is_own):
            return mend
    return None


# ---- the causes --------------------------------------------------------------------------------------------


def _other_operand(error: BaseException, cls: type) -> str | None:
    """A rule reads a field of an operand that is a plain tensor: the value is another operand of the call."""
    if not isinstance(error, AttributeError) or isinstance(error.obj, cls):
        return None
    rule, name = rule_that_raised(error, cls), error.name or ""
    if rule is None or not isinstance(error.obj, Tensor | int | float):
        return None
    if not hasattr(cls, name) and name not in cls.__spec__.names:  # type: ignore[attr-defined]
        return None
    return _reads_any_operand(describe(rule), name, cls)


def _reads_any_operand(where: str, name: str, cls: type) -> str:
    return (
        f"{where} reads .{name} of an operand without a test. A rule is called when any operand is "
        f"{one_of(cls)}, the right one too: read it of an operand for which isinstance(operand, {cls.__name__}) "
        f"holds, and take the others as they are"
    )


def _own_accident(error: BaseException, cls: type, is_own: IsOwn) -> str | None:
    """Code of the class took a plain operand for one of its own, or asserted what a caller need not know."""
    trace = innermost(error)
    if trace is None or not is_own(trace.tb_frame):
        return None
    code = trace.tb_frame.f_code
    name = [part for part in code.co_qualname.split(".<locals>.") if not part.startswith("<")][-1]
    where = f"{name} ({code.co_filename}:{trace.tb_lineno})"
    if isinstance(error, AssertionError):
        return f"{where} asserts: instead `return NotImplemented`, or raise a NotImplementedError that says what to do"
    if isinstance(error, AttributeError) and type(error.obj) in (Tensor, int, float):
        return _reads_any_operand(where, error.name or "", cls)
    return None


def _unexpected_keyword(error: BaseException, cls: type) -> str | None:
    """A rule lacks a parameter that its op has: ``out``, as a rule."""
    found = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
    rule = next((r for _, r in functions_of(cls) if found and r.__qualname__ == found[1]), None)
    if found is None or rule is None:
        return None
    write = (
        ": write with out.copy_(result), which also counts the write, and return out, or refuse it with a DispatchError"
        if found[2] == "out"
        else ""
    )
    return f"{describe(rule)} takes no {found[2]}=, which callers may pass: give it the parameter{write}"


def _foreign_tensor(error: BaseException, cls: type) -> str | None:
    """A rule uses a tensor that is no operand, such as a table in a global."""
    if not any(words in str(error) for words in (_REAL_TENSOR, FROM_OUTSIDE)):
        return None
    found = [f"{name}, which {describe(rule)} reads" for rule, name in _global_tensors(cls)]
    which = f" ({'; '.join(dict.fromkeys(found))})" if found else ""
    return (
        f"a rule uses a tensor that is neither an operand nor an inner tensor{which}. A compiler traces with stand-ins "
        f"and has none for it: declare it as a constant of the class, with constant(), or as a field, with inner()"
    )


def _endless(error: BaseException, cls: type) -> str | None:
    """``materialize`` runs an op on ``self``, which is materialized for it."""
    rule = rule_that_raised(error, cls) if isinstance(error, RecursionError) else None
    if rule is None:
        return None
    return (
        f"{describe(rule)} runs an op on a whole {cls.__name__}, which calls it again: compute with the fields "
        f"({', '.join(f'self.{n}' for n in cls.__spec__.inner_names)})"  # type: ignore[attr-defined]
    )


def missing_part(error: BaseException | None, cls: type) -> str | None:
    """Returns the advice for a rule that calls an op for which its class has no rule, or None.

    Such a rule refuses every call, in the words that refuse the other op.
    """
    rule = rule_that_raised(error, cls) if isinstance(error, DispatchError) else None
    trace = innermost(error) if error else None
    if rule is None or trace is None or trace.tb_frame.f_code is rule.__code__:
        return None
    return (
        f"{describe(rule)} is made of ops on {one_of(cls)}, and one has no rule ({error}). Write that rule, or let "
        f"this one compute with the inner tensors: x.unwrap() above autograd"
    )


# ---- the author's functions --------------------------------------------------------------------------------


def functions_of(cls: type) -> Iterator[tuple[Any, types.FunctionType]]:
    """Yields the rules of a declared class, and its method ``materialize``, by what they are for."""
    rules = all_rules(cls) if hasattr(cls, "__spec__") else ()
    for key, rule in (*rules, ("materialize", getattr(cls, "materialize", None))):
        function: Any = getattr(rule, "__wrapped__", rule)
        if isinstance(function, types.FunctionType):
            yield key, function


def rule_that_raised(error: BaseException, cls: type) -> types.FunctionType | None:
    """Returns the rule among the frames of an error's traceback, the innermost if there are several."""
    by_code = {rule.__code__: rule for _, rule in functions_of(cls)}
    found, trace = None, error.__traceback__
    while trace is not None:
        found = by_code.get(trace.tb_frame.f_code, found)
        trace = trace.tb_next
    return found


def _global_tensors(cls: type) -> Iterator[tuple[Callable[..., Any], str]]:
    for _, rule in functions_of(cls):
        names = [n for n in rule.__code__.co_names if isinstance(rule.__globals__.get(n), Tensor)]
        cells = dict(zip(rule.__code__.co_freevars, rule.__closure__ or (), strict=True))
        names += [n for n, cell in cells.items() if isinstance(cell.cell_contents, Tensor)]
        yield from ((rule, name) for name in names)
