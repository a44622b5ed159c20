"""Arguments by keyword, for rules whose parameters have names of the author's own.

``F.linear(x, weight=w)`` passes a keyword ``weight``, and the rule may call that parameter ``w``. Such arguments are
passed by position, in the order of PyTorch's parameters. A rule that has all of their names is called with what the
caller wrote; so is one that takes ``**kwargs``, except for the parameters that it requires.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import resolve_name

from subclasses._torch import OpOverloadPacket, schema_of
from subclasses.errors import one_of
from subclasses.ops.schema import ops_of_packet

Rule = Callable[..., Any]
_REQUIRED = object()


# NumPy's names of parameters, which functions in C take too.
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


class Parameters(NamedTuple):
    """The parameters of a function, or of one overload, that can be passed by position."""

    names: list[str]
    defaults: list[Any]


class Taken(NamedTuple):
    """What a rule takes after the function.

    Attributes:
        names: The names of its parameters.
        count: How many arguments by position.
        required: The names of those by position that it requires.
        is_open: Whether it takes any keyword.
    """

    names: frozenset[str]
    count: float
    required: tuple[str, ...] = ()
    is_open: bool = False


def with_keyword_names(cls: type, key: Any, rule: Rule, taken: Taken | None) -> Rule:
    """Returns a rule of a class for a Python-level function that takes the keywords of that function.

    ``taken`` is what ``taken_by`` says of the rule.
    """
    if taken is None:
        return rule
    if taken.is_open:
        return _with_required(key, rule, taken)
    known = list(_forms(key))
    forms = [form for form in known if not taken.names.issuperset(form.names)]
    if not forms and not any(name in form.names for name in _OF_NUMPY.values() for form in known):
        return rule

    @functools.wraps(rule)
    def renamed(func: Any, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in taken.names:
                args, kwargs = _place(cls, key, rule, forms, taken, args, kwargs)
                break
        return rule(func, *args, **kwargs)

    return _showing(renamed, rule)


def _showing(wrapper: Rule, rule: Rule) -> Rule:
    # What looks for the author's code does not find it in a partial.
    wrapper.__wrapped__ = rule.func if isinstance(rule, functools.partial) else rule  # type: ignore[attr-defined]
    return wrapper


def _with_required(key: Any, rule: Rule, taken: Taken) -> Rule:
    """Returns a rule with ``**kwargs`` that gets by position what it requires and the caller passed by keyword."""
    forms, required = list(_forms(key)), taken.required
    if not (forms and required):
        return rule

    @functools.wraps(rule)
    def filled(func: Any, *args: Any, **kwargs: Any) -> Any:
        missing = required[len(args) :]
        if missing and not kwargs.keys() >= set(missing):
            for names, _ in forms:
                wanted = names[len(args) : len(required)]
                if len(wanted) == len(missing) and kwargs.keys() >= set(wanted):
                    args, kwargs = (*args, *[kwargs[n] for n in wanted]), kwargs.copy()
                    for name in wanted:
                        del kwargs[name]
                    break
        return rule(func, *args, **kwargs)

    return _showing(filled, rule)


def taken_by(rule: Rule) -> Taken | None:
    """Returns what a rule takes; None if it does not say."""
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


def _place(  # noqa: PLR0913
    cls: type, key: Any, rule: Rule, forms: list[Parameters], taken: Taken, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Passes the keywords that a rule does not have by position, in the first form that has them all.

    Functions in Python pass defaults on as well, such as ``_stacklevel``; those are left out.

    Raises:
        TypeError: the rule has no parameter at the position of a keyword.
    """
    kwargs = {n if n in taken.names else _OF_NUMPY.get(n, n): v for n, v in kwargs.items()}
    foreign = {n: v for n, v in kwargs.items() if n not in taken.names}
    if not foreign:
        return args, kwargs
    for names, defaults in forms:
        if all(n in names for n in foreign):
            places = [names.index(n) for n, v in foreign.items() if v is not defaults[names.index(n)]]
            last = max(places, default=-1)
            if last >= taken.count:
                raise _no_place(cls, key, rule, names[last])
            placed = [kwargs.get(names[i], defaults[i]) for i in range(len(args), last + 1)]
            if not any(value is _REQUIRED for value in placed):
                rest = {n: v for n, v in kwargs.items() if n not in foreign and n not in names[: last + 1]}
                return (*args, *placed), rest
    raise _no_place(cls, key, rule, next(iter(foreign)))


def _no_place(cls: type, key: Any, rule: Rule, keyword: str) -> TypeError:
    described = f"{resolve_name(key) or key} on {one_of(cls)}"
    name = getattr(rule, "__qualname__", type(rule).__name__)
    return TypeError(f"{described}: the rule {name}() got an unexpected keyword argument {keyword!r}")
