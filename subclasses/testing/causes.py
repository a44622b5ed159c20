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

from subclasses.dispatch.rules import all_rules, describe
from subclasses.errors import one_of

# PyTorch's message where a compiler's stand-in meets a tensor with data that is no argument.
_REAL_TENSOR = "Please convert all Tensors to FakeTensors"
_UNEXPECTED = re.compile(r"(\S+)\(\) got an unexpected keyword argument '(\w+)'")


def mend_of(error: BaseException | None, cls: type) -> str | None:
    """Returns the advice for the first known cause in a chain of errors, or None.

    Args:
        error: what broke a promise, with the errors that caused it.
        cls: the class under test.
    """
    for one in _chain(error):
        for find in (_other_operand, _unexpected_keyword, _foreign_tensor):
            if mend := find(one, cls):
                return mend
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


# ---- the causes --------------------------------------------------------------------------------------------


def _other_operand(error: BaseException, cls: type) -> str | None:
    """A rule reads a field of an operand that is a plain tensor: the value is another operand of the call."""
    if not isinstance(error, AttributeError) or isinstance(error.obj, cls):
        return None
    rule, name = _rule_that_raised(error, cls), error.name or ""
    if rule is None or not isinstance(error.obj, Tensor | int | float):
        return None
    if not hasattr(cls, name) and name not in cls.__spec__.names:  # type: ignore[attr-defined]
        return None
    return (
        f"{describe(rule)} reads .{name} of an operand without a test. A rule is called when any operand is "
        f"{one_of(cls)}, the right one too: read it of an operand for which isinstance(operand, {cls.__name__}) "
        f"holds, and take the others as they are"
    )


def _unexpected_keyword(error: BaseException, cls: type) -> str | None:
    """A rule lacks a parameter that its op has: ``out``, as a rule."""
    found = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
    rule = next((r for _, r in _functions(cls) if found and r.__qualname__ == found[1]), None)
    if found is None or rule is None:
        return None
    write = (
        ": copy the result into it and return it, or refuse it with a DispatchError"
        if found[2] == "out"
        else ""
    )
    return f"{describe(rule)} takes no {found[2]}=, which callers may pass: give it the parameter{write}"


def _foreign_tensor(error: BaseException, cls: type) -> str | None:
    """A rule uses a tensor that is no operand, such as a table in a global."""
    if _REAL_TENSOR not in str(error):
        return None
    found = [f"{name}, which {describe(rule)} reads" for rule, name in _global_tensors(cls)]
    which = f" ({'; '.join(dict.fromkeys(found))})" if found else ""
    return (
        f"a rule uses a tensor that is neither an operand nor an inner tensor{which}. A compiler traces with stand-ins "
        f"and has none for it: declare it as a constant of the class, with constant(), or as a field, with inner()"
    )


# ---- the author's functions --------------------------------------------------------------------------------


def _functions(cls: type) -> Iterator[tuple[Any, types.FunctionType]]:
    """Yields the rules of a declared class, and its method ``materialize``, by what they are for."""
    rules = all_rules(cls) if hasattr(cls, "__spec__") else ()
    for key, rule in (*rules, ("materialize", getattr(cls, "materialize", None))):
        function: Any = getattr(rule, "__wrapped__", rule)
        if isinstance(function, types.FunctionType):
            yield key, function


def _rule_that_raised(error: BaseException, cls: type) -> Callable[..., Any] | None:
    """Returns the rule among the frames of an error's traceback, the innermost if there are several."""
    by_code = {rule.__code__: rule for _, rule in _functions(cls)}
    found, trace = None, error.__traceback__
    while trace is not None:
        found = by_code.get(trace.tb_frame.f_code, found)
        trace = trace.tb_next
    return found


def _global_tensors(cls: type) -> Iterator[tuple[Callable[..., Any], str]]:
    for _, rule in _functions(cls):
        names = [n for n in rule.__code__.co_names if isinstance(rule.__globals__.get(n), Tensor)]
        cells = dict(zip(rule.__code__.co_freevars, rule.__closure__ or (), strict=True))
        names += [n for n, cell in cells.items() if isinstance(cell.cell_contents, Tensor)]
        yield from ((rule, name) for name in names)
