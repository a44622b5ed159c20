"""Derives values that the author did not pass: of other sizes, with other metadata, from a plain tensor.

A derived value must be right where the reference shows it, so that it cannot break a promise that the class keeps.
What was derived is noted for the report; what cannot be is skipped, with the option to pass.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subclasses.layout import field_name
from subclasses.testing.cases import accepted, once
from subclasses.testing.compare import check_stands_for, plainest, same_context
from subclasses.testing.errors import Attempt, Broken, Skipped, succeeds
from subclasses.testing.property import Case
from subclasses.testing.subject import SEED, Factory, Subject, is_differentiable, seed

# ---- other sizes -------------------------------------------------------------------------------------------


@once
def sizes(s: Subject) -> list[Factory]:
    """The author's factories of values of other sizes, or two that make longer values.

    Raises:
        Skipped: there are none, and none can be derived.
    """
    if given := s.options.get("sizes"):
        return list(given)
    s.needs_flatten()
    counts = _times(s)
    for grow, how in ((_grow_inners, "its inner tensors"), (_grow, "the value")):
        if counts and all(succeeds(_check_grown, s, partial(grow, s, times), times) for times in counts):
            s.derived["sizes"] = f"{' and '.join(map(str, counts))} times {how}, concatenated"
            return [partial(grow, s, times) for times in counts]
    if s.declared:
        s.builder(s.make())  # whose constructor may be what is missing
    raise Skipped("pass sizes=[...], at least two factories of values of other sizes")


def _times(s: Subject) -> list[int]:
    """How often to repeat a value: so often that no other dim has that size, nor lies between two sizes."""
    x = s.make()
    if not x.numel() or not x.dim():
        return []
    least = max(2, max(x.shape) // x.shape[0] + 1)
    return [least, least + 1] if x.numel() * least < 2**18 else []


def _grow(s: Subject, times: int) -> Any:
    with torch.no_grad():
        return torch.cat([s.make().detach()] * times)


def _grow_inners(s: Subject, times: int) -> Any:
    x = s.make().detach()
    rows = x.shape[0]
    inners = {n: torch.cat([t] * times) if t.shape[:1] == (rows,) else t for n, t in s.inners(x).items()}
    return s.construct(x, inners)


@torch.no_grad()
def _check_grown(s: Subject, make: Factory, times: int) -> None:
    x, grown = s.make().detach(), s.make(make)
    assert type(grown) is s.cls and same_context(s.context(x), s.context(grown))
    assert grown.shape == (times * x.shape[0], *x.shape[1:])
    for got, plain in zip(s.reference(grown), s.reference(x), strict=True):
        _check_same(got, torch.cat([plain] * times))


def _check_same(got: Any, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, check_stride=False)


# ---- other metadata ----------------------------------------------------------------------------------------


@once
def variants(s: Subject) -> list[Factory]:
    """The author's factories of values with other metadata, or up to three, each with one other static field.

    Raises:
        Skipped: there are none, and none can be derived.
    """
    if given := s.options.get("variants"):
        return list(given)
    s.needs_flatten()
    if s.declared and not s.metadata(s.make()):
        raise Skipped(f"{s.name} has no metadata")
    found: list[dict[str, Any]] = []
    wrong = ""
    for change in _changes(s) if s.declared else ():
        with Attempt() as attempt:
            _check_variant(s, change)
        if attempt.error is None:
            found.append(change)
        elif isinstance(attempt.error, Broken):
            wrong = wrong or f" ({_shown(change)} was not tried: {attempt.error})"
    if not found:
        raise Skipped(f"pass variants=[...], factories of values with other metadata{wrong}")
    s.derived["variants"] = ", ".join(map(_shown, found[:3])) + wrong
    return [partial(_changed, s, change) for change in found[:3]]


def _shown(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def named_variants(s: Subject) -> list[tuple[str, Factory]]:
    """The variants with what each has other than a value of the factory, such as ``with unit='km'``.

    Raises:
        Skipped: there are none, and none can be derived.
    """
    names = []
    for i, make in enumerate(variants(s)):
        changed = changed_fields(s, s.make(make)) if s.declared else {}
        names.append((f"with {_shown(changed)}" if changed else f"of variants[{i}]", make))
    return names


def changed_fields(s: Subject, variant: Any) -> dict[str, Any]:
    """The metadata of a variant that is not that of a value of the factory."""
    usual = s.metadata(s.make())
    return {name: value for name, value in s.metadata(variant).items() if usual[name] != value}


def _changes(s: Subject) -> Iterator[dict[str, Any]]:
    hints: dict[str, Any] = {}
    with Attempt():  # an annotation may name what only the scope of the class statement knows
        hints = typing.get_type_hints(s.cls)
    x = s.make()
    for field in s.cls.__spec__.statics:
        for other in _others(hints.get(field.name), getattr(x, field.name)):
            yield {field.name: other}


def _others(hint: Any, value: Any) -> list[Any]:
    """Other values that a static field may have, judging by its value and annotation."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, enum.Enum):
        return [member for member in type(value) if member is not value]
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return [other for other in arguments if other != value]
    is_optional = typing.get_origin(hint) in (typing.Union, types.UnionType) and types.NoneType in arguments
    return [None] if is_optional and value is not None else []


def _changed(s: Subject, change: dict[str, Any]) -> Any:
    x = s.make().detach()
    inners = {f.name: s.inners(x).get(f.attribute) for f in s.cls.__spec__.inners}
    return s.cls(**inners, **(s.metadata(x) | change))


@torch.no_grad()
def _check_variant(s: Subject, change: dict[str, Any]) -> None:
    """Raises unless most ops on a variant that run are right, and one does.

    A few that are wrong are faults of rules, which ``other_metadata`` tells; many, metadata that no value may have.
    """
    make = partial(_changed, s, change)
    plains = s.reference(s.make(make))
    assert not same_context(s.context(s.make()), s.context(s.make(make)))
    assert all(p.shape == s.make(make).shape and p.dtype == s.make(make).dtype for p in plains)
    works = [c for c in accepted(s) if succeeds(lambda c=c: c.run(s.make(make)))]
    assert works
    errors = []
    for case in works:
        expected = [case.run(p.clone()) for p in s.reference(s.make(make))]
        with Attempt() as attempt:
            check_stands_for(s, case.name, case.run(s.make(make)), expected)
        errors += [attempt.error] if attempt.error is not None else []
    if 4 * len(errors) > len(works):
        raise errors[0]


def is_told_apart(s: Subject, x: Any, change: dict[str, Any]) -> bool:
    """Whether the reference of a value depends on some fields, so that ops compared with it show a wrong one."""
    if not s.has_reference:
        return False
    inners = {f.name: s.inners(x).get(f.attribute) for f in s.cls.__spec__.inners}
    with Attempt():
        other = s.cls(**(inners | s.metadata(x) | change))
        pairs = zip(s.reference(x), s.reference(other), strict=True)
        return not all(torch.equal(plainest(a), plainest(b)) for a, b in pairs)
    return True


# ---- a second value ----------------------------------------------------------------------------------------


@once
def second(s: Subject) -> Factory:
    """A factory of a value of the same size and metadata, with other numbers in as many inner tensors as can be.

    Raises:
        Skipped: the factory gives equal values at each call, and no other can be derived.
    """
    s.reference(s.make().detach())
    for make, needs_check in ((_redrawn, True), (again, False), (_flipped_rows, True)):
        made = partial(make, s)
        with Attempt() as attempt:
            _check_second(s, made, needs_check)
        if attempt.error is None:
            return made
    raise Skipped(
        "the factory gives equal values at each call; let it draw random numbers, as with torch.randn"
    )


@once
def other_integers(s: Subject) -> Factory | None:
    """A factory of a second value whose integers, equal in each value of the factory, are others; None if unknown."""
    make = partial(_reordered, s)
    return make if succeeds(_check_second, s, make, True) else None


def _reordered(s: Subject) -> Any:
    """The second value with its integers in reverse, of the first dim in which that makes a difference."""
    x, y = s.make().detach(), second(s)().detach()
    old, new = s.inners(x), s.inners(y)
    changed = {
        n: _reversed(t) for n, t in new.items() if isinstance(t, Tensor) and _is_equal_integer(t, old[n])
    }
    assert any(not _same(t, new[n]) for n, t in changed.items())
    return _with_inners(s, y, new | changed)


def _is_equal_integer(t: Tensor, old: Any) -> bool:
    return not is_differentiable(t) and t.dtype != torch.bool and _same(t, old)


def _reversed(t: Tensor) -> Tensor:
    return next((r for dim in range(t.dim()) if not _same(t, r := t.flip(dim))), t)


def again(s: Subject) -> Any:
    """The factory once more, with another seed."""
    seed(SEED + 1)
    return s.factory().detach()


def _redrawn(s: Subject) -> Any:
    """The same; inner tensors of floats that do not depend on the seed are flipped or, if that is the same, doubled."""
    x, y = s.make().detach(), again(s)
    old = s.inners(x)
    return _with_inners(s, y, {n: _other(t) if _same(t, old[n]) else t for n, t in s.inners(y).items()})


def _with_inners(s: Subject, x: Any, inners: dict[str, Any]) -> Any:
    """A value of other inner tensors, put together as PyTorch does it where nobody knows how a user does."""
    try:
        return s.construct(x, inners)
    except Skipped:
        return s.unflatten(x, inners)


def _other(t: Any) -> Any:
    if not is_differentiable(t):
        return t  # of integers, such as indices, other ones may have no meaning
    return t.flip(0) if t.dim() and not _same(t, t.flip(0)) else t * 2


def _flipped_rows(s: Subject) -> Any:
    x = s.make().detach()
    rows = x.shape[:1]
    return _with_inners(s, x, {n: t.flip(0) if t.shape[:1] == rows else t for n, t in s.inners(x).items()})


@torch.no_grad()
def _check_second(s: Subject, make: Factory, needs_check: bool) -> None:
    """Raises unless a value differs from one of the factory in numbers alone, and ops on it are right."""
    x, y = s.make().detach(), s.make(make)
    assert type(y) is s.cls and y.shape == x.shape and y.dtype == x.dtype
    assert same_context(s.context(x), s.context(y))
    pairs = list(zip(s.reference(x), s.reference(y), strict=True))
    assert all(a.shape == b.shape for a, b in pairs) and not all(_same(a, b) for a, b in pairs)
    if needs_check and s.traceable:
        assert _right_on(s, s.factory) <= _right_on(s, make)


def _right_on(s: Subject, make: Factory) -> set[str]:
    """The accepted cases that give on a value what they give on the reference."""

    def check(case: Case) -> None:
        expected = [case.run(plain.clone()) for plain in s.reference(s.make(make))]
        check_stands_for(s, case.name, case.run(s.make(make)), expected)

    return {case.name for case in accepted(s) if succeeds(check, case)}


def _same(a: Any, b: Any) -> bool:
    return succeeds(_check_same, a, b)


# ---- from a plain tensor -----------------------------------------------------------------------------------

_FROM = ("from_plain", "from_float", "from_tensor", "from_dense", "from_torch", "from_hp")


@once
def wrap(s: Subject) -> Callable[[Tensor], Any]:
    """The author's function from a plain tensor to a value, or one that checks what each value stands for.

    Raises:
        Skipped: there is none, and none can be derived.
    """
    if given := s.options.get("wrap"):
        return given
    x = s.make().detach()
    names = list(s.inners(x))
    makes: list[tuple[str, Callable[[Tensor], Any]]] = []
    if len(names) == 1:
        makes.append((f"{s.name}({field_name(names[0])})", lambda t: s.construct(x, {names[0]: t})))
    makes += [(f"{s.name}.{name}", getattr(s.cls, name)) for name in _FROM if hasattr(s.cls, name)]
    for how, make in makes:
        checked = partial(_wrapped, s, make)
        if succeeds(lambda c=checked: [c(t) for t in _single(s.reference(x))]):
            s.derived["wrap"] = f'{how}; pass ops="all" for more than the common ops'
            return checked
    raise Skipped("pass wrap=, which makes a value from a plain tensor")


def _wrapped(s: Subject, make: Callable[[Tensor], Any], plain: Tensor) -> Any:
    """A value made from a plain tensor, which stands for it exactly."""
    value = make(plain.detach().clone())
    assert type(value) is s.cls
    for stands_for in _single(s.reference(value)):
        _check_same(stands_for, plain)
    return value


def _single(plains: Sequence[Tensor]) -> Sequence[Tensor]:
    assert len(plains) == 1
    return plains
