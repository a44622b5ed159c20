"""Passes numbers to rules where a compiler has made symbols of them.

A number that changes from call to call becomes a ``torch.SymFloat`` or ``torch.SymInt``. PyTorch makes a constant of
such a symbol if the schema of an op has an ``int``, such as ``dim``. It keeps the symbol if the schema has a
``SymInt``. This module does the same for rules of torch functions, whose arguments no schema has converted.

A symbol is not a ``float`` or an ``int``: a rule that calls ``isinstance(y, float)`` would take another branch than in
eager mode. Rules get symbols that are instances of the number's type.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from subclasses._torch import OpOverloadPacket, schema_of
from subclasses.op_schemas.schema import ops_of_packet
from subclasses.rules.author_code import OF_LIBRARIES, package_of, unwrapped
from subclasses.spec.statics import as_number, concrete

Rule = Callable[..., Any]

_SYMBOLS = frozenset({torch.SymFloat, torch.SymInt, torch.SymBool})


def with_numbers(rule: Rule) -> Rule:
    """Returns a rule whose ``isinstance(y, float)`` has the result of eager mode for a symbol among the arguments."""
    if package_of(unwrapped(rule)) in OF_LIBRARIES:
        return rule

    @functools.wraps(rule)
    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        if not _SYMBOLS.isdisjoint(map(type, args)):
            args = tuple(map(as_number, args))
        return rule(func, *args, **kwargs)

    return run


def with_ints(functions: dict[Any, Rule]) -> dict[Any, Rule]:
    """Returns rules for torch functions that get an ``int`` where the schema of the function's op has one."""
    return {
        func: _with_ints(rule, ints) if (ints := _ints_of(func)) else rule for func, rule in functions.items()
    }


def _with_ints(rule: Rule, ints: _Ints) -> Rule:
    @functools.wraps(rule)
    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        if not _SUSPECTS.isdisjoint(map(type, args)):
            args = tuple(
                _concrete(a) if n in ints.positions or n >= ints.following else a for n, a in enumerate(args)
            )
        if kwargs and not _SUSPECTS.isdisjoint(map(type, kwargs.values())):
            kwargs = {name: _concrete(a) if name in ints.names else a for name, a in kwargs.items()}
        return rule(func, *args, **kwargs)

    return run


_SUSPECTS = _SYMBOLS | {tuple, list}


def _concrete(value: Any) -> Any:
    return [*map(concrete, value)] if type(value) is list else concrete(value)


@dataclass(frozen=True, slots=True)
class _Ints:
    """The arguments of a torch function that are an ``int``, or some of them, in the schema of its op.

    Attributes:
        positions: The positions.
        names: The names.
        following: From this position on, each argument is one of the ints of a list, as in ``x.flip(0, 1)``.
    """

    positions: frozenset[int]
    names: frozenset[str]
    following: float


@functools.cache
def _ints_of(func: Any) -> _Ints | None:
    """Returns the int arguments of a torch function, by the schemas of the op of that name; None if it has none."""
    func = (
        inspect.unwrap(func) if isinstance(func, types.FunctionType) else func
    )  # Tensor.pow_ wraps one in C
    packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    by_name, by_position = defaultdict(set), defaultdict(set)
    for op in ops_of_packet(packet):
        for n, argument in enumerate(schema_of(op).arguments):
            type_names = _type_names(argument.real_type)
            by_name[argument.name] |= type_names
            by_position[n] |= type_names
    names = frozenset(name for name, type_names in by_name.items() if _are_ints(type_names))
    if isinstance(func, types.FunctionType):  # its parameters may be in another order
        positions = {
            n: by_name[name] for n, name in enumerate(inspect.signature(func).parameters) if name in names
        }
    else:
        positions = {n: type_names for n, type_names in by_position.items() if _are_ints(type_names)}
    lists = [n for n, type_names in positions.items() if "ListType" in type_names]
    return _Ints(frozenset(positions), names, min(lists, default=math.inf)) if names else None


def _type_names(type_: Any) -> set[str]:
    """Returns the name of a type in a schema; for a list and an optional type the name of the element, too."""
    name = type_.kind()
    return {name, *_type_names(type_.getElementType())} if name in ("ListType", "OptionalType") else {name}


def _are_ints(type_names: set[str]) -> bool:
    return "IntType" in type_names and type_names.isdisjoint({"SymIntType", "NumberType", "FloatType"})
