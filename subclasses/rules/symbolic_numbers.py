"""Numbers that are symbols of a compiler, as operands of rules that ask for their type.

A number that changes from call to call becomes a ``torch.SymFloat`` or ``torch.SymInt``, which is no ``float`` and no
``int``: a rule that asks ``isinstance(y, float)`` would take another way than in eager mode. It is called with the
number itself, which the program is for then.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from subclasses.rules.author_code import OF_LIBRARIES, codes_of, package_of
from subclasses.spec.statics import concrete

Rule = Callable[..., Any]

_SYMBOLS = frozenset({torch.SymFloat, torch.SymInt, torch.SymBool})
_TYPES = frozenset({"float", "int", "bool", "complex", "Number", "Real", "Integral", "Complex", "Rational"})


def with_numbers(rule: Rule, described: str) -> Rule:
    """Returns a rule that gets numbers in place of symbols, if it asks whether an operand is a number.

    Args:
        rule: the rule.
        described: how messages call it.
    """
    if package_of(inspect.unwrap(rule)) in OF_LIBRARIES:
        return rule
    # Not now: the functions that the rule calls may be defined after it.
    asks = functools.cache(lambda: any(not _TYPES.isdisjoint(code.co_names) for code in codes_of(rule)))
    warned = functools.cache(lambda: _warn(described))

    @functools.wraps(rule)
    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return rule(func, *args, **kwargs)  # Dynamo has numbers of its own, which are of these types
        if not _SYMBOLS.isdisjoint(map(type, args)) and asks():
            warned()
            args = tuple(concrete(a) if type(a) in _SYMBOLS else a for a in args)
        return rule(func, *args, **kwargs)

    return run


def _warn(described: str) -> None:
    warnings.warn(
        f"the rule {described} asks for int or float, and was called with a number that a compiler made a symbol of, "
        f"since it changes from call to call: the compiled program is for this one number, and each other one compiles "
        f"again. For one program, let the rule ask what is no number, as in `not isinstance(y, Tensor)`",
        stacklevel=2,
    )
