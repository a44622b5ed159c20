"""Arguments by keyword, for rules whose parameters have names of the author's own.

``F.linear(x, weight=w)`` passes a keyword ``weight``, and the rule may call that parameter ``w``. Such arguments are
passed by position, in the order of PyTorch's parameters. A rule that has all of their names is called with the caller's
arguments. So is a rule that takes ``**kwargs``, except for the parameters that it requires.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from subclasses._torch import OpOverloadPacket, schema_of
from subclasses.op_schemas.schema import ops_of_packet

Rule = Callable[..., Any]
_REQUIRED = object()


# NumPy's names of parameters, which functions in C take too.
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


class Parameters(NamedTuple):
    """The parameters of a function, or of one overload, that can be passed by position."""

    names: list[str]
    defaults: list[Any]


class Taken(NamedTuple):
    """The arguments that a rule takes after the function.

    Attributes:
        names: The names of its parameters.
        count: How many arguments it takes by position.
        required: The names of required parameters that may be passed by position.
        is_open: Whether it takes any keyword.
    """

    names: frozenset[str]
    count: float
    required: tuple[str, ...] = ()
    is_open: bool = False

    def takes(self, args: Any, kwargs: Any) -> bool:
        """Whether the rule has a parameter for each keyword, and an argument for each parameter that it requires."""
        return (self.is_open or kwargs.keys() <= self.names) and kwargs.keys() >= {
            *self.required[len(args) :]
        }


def with_keyword_names(key: Any, rule: Rule, taken: Taken | None) -> Rule:
    """Returns a rule for a Python-level function that takes the keywords of that function.

    ``taken`` is the result of ``taken_by`` for the rule.
    """
    forms = list(_forms(key))
    known = {name for names, _ in forms for name in names}
    if taken is None or not known:
        return rule
    renames = {old: new for old, new in _OF_NUMPY.items() if new in known and old not in taken.names}
    if not renames and (known.issubset(taken.names) or (taken.is_open and not taken.required)):
        return rule

    @functools.wraps(rule)
    def renamed(func: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs = {renames.get(n, n): v for n, v in kwargs.items()}
            if not taken.takes(args, kwargs):
                args, kwargs = _pass_by_position(forms, taken, args, kwargs)
        return rule(func, *args, **kwargs)

    return renamed


def taken_by(rule: Rule) -> Taken | None:
    """Returns the arguments that a rule takes; None if it has no signature."""
    try:
        parameters = list(inspect.signature(rule).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    kinds = [p.kind for p in parameters]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    return Taken(
        frozenset(p.name for p in named),
        float("inf") if inspect.Parameter.VAR_POSITIONAL in kinds else len(placed),
        tuple(p.name for p in placed if p.default is p.empty),
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


def _forms(key: Any) -> Iterator[Parameters]:
    """Yields the parameters of each overload of a function; none where they are not known."""
    key = (
        inspect.unwrap(key) if isinstance(key, types.FunctionType) else key
    )  # Tensor.__ipow__ wraps pow_, in C
    if isinstance(key, types.FunctionType):
        parameters = inspect.signature(key).parameters.values()
        if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            placed = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            defaults = [_REQUIRED if p.default is p.empty else p.default for p in placed]
            yield Parameters([p.name for p in placed], defaults)
        return
    packet = getattr(torch.ops.aten, getattr(key, "__name__", ""), None)
    for op in ops_of_packet(packet) if isinstance(packet, OpOverloadPacket) else ():
        arguments = [a for a in schema_of(op).arguments if not a.kwarg_only]
        # Functions in Python call the parameter "input" that schemas call "self".
        names = ["input" if a.name == "self" else a.name for a in arguments]
        yield Parameters(names, [a.default_value if a.has_default_value() else _REQUIRED for a in arguments])


def _pass_by_position(forms: list[Parameters], taken: Taken, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Passes the keywords that a rule does not have, or requires, by position, in the first form that has them.

    Functions in Python pass defaults on as well, such as ``_stacklevel``; these are left out. A keyword without a
    position stays, and the call of the rule raises.
    """
    for names, defaults in forms:
        if not taken.is_open and not kwargs.keys() <= taken.names | {*names}:
            continue
        count = len(taken.required) if taken.is_open else taken.count
        foreign = [i for i, n in enumerate(names) if n in kwargs and (taken.is_open or n not in taken.names)]
        given = [i for i in foreign if i < len(taken.required) or kwargs[names[i]] is not defaults[i]]
        last = max((i for i in given if len(args) <= i < count), default=-1)
        placed = [kwargs.get(names[i], defaults[i]) for i in range(len(args), last + 1)]
        if not any(value is _REQUIRED for value in placed):
            left_out = {
                *names[: last + 1],
                *([] if taken.is_open else (names[i] for i in {*foreign} - {*given})),
            }
            return (*args, *placed), {n: v for n, v in kwargs.items() if n not in left_out}
    return args, kwargs
