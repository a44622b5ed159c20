"""Derives values that the author did not pass: of other sizes, with other metadata or numbers, from a plain tensor.

A derived value must be right where the reference shows it, so that it cannot break a promise that the class keeps.
The report lists the derived options. A check is skipped where an option cannot be derived, and names that option.
"""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subclasses.layout import field_name
from subclasses.testing.calls import Case
from subclasses.testing.cases import few_of_each_rule
from subclasses.testing.errors import Skipped, skip_unless, succeeds, tried
from subclasses.testing.subject import (
    SEED,
    Factory,
    Subject,
    check_attributes,
    check_stands_for,
    is_differentiable,
    metadata,
    once,
    plainest,
)


def _same(a: Any, b: Any) -> bool:
    return succeeds(partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True), a, b)


@torch.no_grad()
def _verdicts(s: Subject, make: Factory) -> dict[str, bool]:
    """The names of the cases of each rule that run on another value, each with whether its result is right."""

    def check(case: Case, got: Any) -> None:
        check_stands_for(s, case.name, got, [case.run(p.clone()) for p in s.reference(s.make(make))])

    ran = [(case, *tried(lambda run=case.run: run(s.make(make)))) for case in few_of_each_rule(s)]
    return {case.name: succeeds(check, case, got) for case, got, error in ran if error is None}


def _right(s: Subject, make: Factory) -> set[str]:
    return {name for name, is_right in _verdicts(s, make).items() if is_right}


def of_author(find: Callable[[Subject], Any]) -> Callable[[Subject], Any]:
    """Makes a function that returns an option of the author, or else finds one, once for a class."""
    return functools.wraps(find)(once(lambda s: s.options.get(find.__name__) or find(s)))


# ---- other sizes -------------------------------------------------------------------------------------------


@of_author
def sizes(s: Subject) -> Sequence[Factory]:
    """The author's factories of values of other sizes, or two that make longer values.

    Raises:
        Skipped: there are none, and none can be derived.
    """
    s.needs("flatten")
    x = s.make()
    # So that no other dim has one of the sizes or lies between two of them.
    least = max(2, max(x.shape) // x.shape[0] + 1) if x.numel() and x.dim() else 2**18
    for grow, how in ((_grow_inners, "its inner tensors"), (_grow, "the value")):
        grown = [partial(grow, s, times) for times in (least, least + 1)]
        if 0 < x.numel() * least < 2**18 and all(succeeds(_check_grown, s, make) for make in grown):
            s.derived["sizes"] = f"{least} and {least + 1} times {how}, concatenated"
            return grown
    raise Skipped("pass sizes=[...], at least two factories of values of other sizes")


@torch.no_grad()
def _grow(s: Subject, times: int) -> Any:
    return torch.cat([s.make().detach()] * times)


def _grow_inners(s: Subject, times: int) -> Any:
    x = s.make().detach()
    inners = s.changed(x, lambda _, t: torch.cat([t] * times) if t.shape[:1] == x.shape[:1] else t)
    return s.construct(x, inners)


@torch.no_grad()
def _check_grown(s: Subject, make: Any) -> None:
    x, grown, times = s.make().detach(), s.make(make), make.args[1]
    assert type(grown) is s.cls and s.context(x) == s.context(grown)
    assert grown.shape == (times * x.shape[0], *x.shape[1:])
    assert _same(s.reference(grown), tuple(torch.cat([plain] * times) for plain in s.reference(x)))


# ---- other metadata ----------------------------------------------------------------------------------------


@of_author
def variants(s: Subject) -> Sequence[Factory]:
    """The author's factories of values with other metadata, or up to three, each with one other static field.

    Raises:
        Skipped: there are none, and none can be derived.
    """
    s.needs("flatten", "metadata")
    makes = {_words(c): partial(lambda c: s.of_fields(s.make().detach(), **c), c) for c in _changes(s)}
    valid = [words for words, make in makes.items() if succeeds(_check_variant, s, make)][:3]
    skip_unless(valid, "pass variants=[...], factories of values with other metadata")
    s.derived["variants"] = ", ".join(valid)
    return [makes[words] for words in valid]


def named_variants(s: Subject) -> list[tuple[str, Factory]]:
    """The variants, each with words for the fields that it changes, such as ``with unit='km'``.

    Raises:
        Skipped: there are none, and none can be derived.
    """
    usual = metadata(s.make()) if s.declared else {}
    values = [{n: v for n in usual if (v := getattr(s.make(make), n)) != usual[n]} for make in variants(s)]
    words = [f"with {_words(v)}" if v else f"of variants[{i}]" for i, v in enumerate(values)]
    return list(zip(words, variants(s), strict=True))


def _words(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _changes(s: Subject) -> list[dict[str, Any]]:
    """Other values of each static field."""
    hints, _ = tried(typing.get_type_hints, s.cls)  # annotations may use names of the class statement's scope
    fields = [(f.name, getattr(s.make(), f.name)) for f in s.cls.__spec__.statics] if s.declared else []
    return [
        {name: other}
        for name, value in fields
        for other in _choices((hints or {}).get(name), value)
        if other != value
    ]


def _choices(hint: Any, value: Any) -> Sequence[Any]:
    """The values that a field may have, judging by its value and annotation; empty if unknown."""
    arguments, origin = typing.get_args(hint), typing.get_origin(hint)
    if isinstance(value, bool | enum.Enum):
        return [False, True] if isinstance(value, bool) else [*type(value)]
    is_optional = origin in (typing.Union, types.UnionType) and types.NoneType in arguments
    return arguments if origin is typing.Literal else [None] * is_optional


def _check_variant(s: Subject, make: Factory) -> None:
    """Raises unless most ops on a variant that run are right, and one does.

    A few that are wrong are faults of rules, which ``other_metadata`` tells; many, metadata that no value may have.
    """
    x = s.make(make)
    assert s.context(s.make()) != s.context(x)
    assert all(p.shape == x.shape and p.dtype == x.dtype for p in s.reference(x))
    verdicts = [*_verdicts(s, make).values()]
    assert verdicts and 4 * verdicts.count(False) <= len(verdicts)


def reference_depends_on(s: Subject, x: Any, change: dict[str, Any]) -> bool:
    """Whether the reference of a value depends on some fields, so that ops compared with it show a wrong one."""
    plains, error = tried(lambda: [s.reference(y) for y in (x, s.of_fields(x, **change))])
    pairs = zip(*plains, strict=True) if error is None else ()
    return s.has_reference and not (error is None and all(torch.equal(*map(plainest, p)) for p in pairs))


# ---- a second value ----------------------------------------------------------------------------------------


@once
def second(s: Subject) -> Factory:
    """A factory of a value of the same size and metadata, with other numbers in as many inner tensors as can be.

    Raises:
        Skipped: the factory gives equal values at each call, and no other can be derived.
    """
    rows, other = s.make().shape[:1], partial(again, s)
    s.needs("reference")
    for make in (
        partial(_with_others, s, other, lambda t: _flipped(t, t * 2) if is_differentiable(t) else t),
        other,
        partial(_with_others, s, s.make, lambda t: t.flip(0) if t.shape[:1] == rows else t),
    ):
        if succeeds(_check_second, s, make, s.factory, make is not other):
            return make
    raise Skipped(
        "the factory gives equal values at each call; let it draw random numbers, as with torch.randn"
    )


@once
def other_integers(s: Subject) -> Factory | None:
    """A factory of a second value whose integers, equal in each value of the factory, are in reverse; None if unknown.

    The integers are reversed in the first dim in which that makes a difference.
    """
    flipped = lambda t: t if is_differentiable(t) or t.dtype == torch.bool else _flipped(t, t)  # noqa: E731
    make = partial(_with_others, s, second(s), flipped)
    return make if succeeds(_check_second, s, make, second(s)) else None


def again(s: Subject) -> Any:
    """The factory once more, with another seed."""
    return s.make(number=SEED + 1).detach()


def _with_others(s: Subject, make: Factory, change: Callable[[Tensor], Tensor]) -> Any:
    """A value, with a function of the inner tensors that are the same in a value of the factory."""
    x, old = make().detach(), s.inners(s.make().detach())
    other = s.changed(x, lambda _, t: change(t))
    return s.unflatten(x, {n: other[n] if _same(t, old[n]) else t for n, t in s.inners(x).items()})


def _flipped(t: Tensor, default: Tensor) -> Tensor:
    """A tensor in reverse, in the first dim in which that makes a difference."""
    return next((r for dim in range(t.dim()) if not _same(t, r := t.flip(dim))), default)


@torch.no_grad()
def _check_second(s: Subject, make: Factory, first: Factory, checks_ops: bool = True) -> None:
    """Raises unless a value differs from another one in numbers alone, and ops on it are right."""
    x, y = s.make(first).detach(), s.make(make)
    assert type(y) is s.cls and s.context(x) == s.context(y)
    check_attributes("", y, x, "shape", "dtype")
    pairs = list(zip(s.reference(x), s.reference(y), strict=True))
    assert all(a.shape == b.shape for a, b in pairs) and not all(_same(a, b) for a, b in pairs)
    assert not (checks_ops and s.traceable) or _right(s, s.factory) <= _right(s, make)


# ---- from a plain tensor -----------------------------------------------------------------------------------

_FROM = ("from_plain", "from_float", "from_tensor", "from_dense", "from_torch", "from_hp")


@of_author
def wrap(s: Subject) -> Callable[[Tensor], Any]:
    """The author's function from a plain tensor to a value, or a derived one that checks each value.

    Raises:
        Skipped: there is none, and none can be derived.
    """
    x = s.make().detach()
    makes = {f"{s.name}.{name}": getattr(s.cls, name) for name in _FROM if hasattr(s.cls, name)}
    if len(names := [*s.inners(x)]) == 1:
        makes = {f"{s.name}({field_name(names[0])})": lambda t: s.construct(x, {names[0]: t})} | makes

    def checked(make: Callable[[Tensor], Any], plain: Tensor) -> Any:
        """A value made from a plain tensor, which represents exactly that tensor."""
        value = make(plain.detach().clone())
        assert type(value) is s.cls and _same(s.reference(value), (plain,))
        return value

    for how, make in makes.items():
        if succeeds(lambda make=make: [checked(make, t) for t in s.reference(x)]):
            s.derived["wrap"] = f'{how}; pass ops="all" for more than the common ops'
            return partial(checked, make)
    raise Skipped("pass wrap=, which makes a value from a plain tensor")
