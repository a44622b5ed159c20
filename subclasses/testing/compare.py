"""Compares results: a value with the tensors that it represents, or with another value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.base import TensorSubclass
from subclasses.errors import one_of
from subclasses.layout import field_name
from subclasses.testing.errors import Attempt, Broken, first_line
from subclasses.testing.subject import Subject

# A difference, as (where, got, expected); None where the results are equal.
Found = tuple[str, str, str] | None


def leaves(value: Any) -> list[Any]:
    """A result as a flat list: lists and tuples are flattened."""
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def check_stands_for(
    s: Subject, what: str, got: Any, expected: Sequence[Any], *, rounded: bool = False
) -> None:
    """Raises unless a result represents the results on the reference.

    Args:
        s: the class under test.
        what: names the call in the message.
        got: the result on a value: a plain tensor, a value of the class, or several of them.
        expected: the result on each plain tensor that the value represents.
        rounded: compare in the dtype of the reference, as the class may keep more digits.
    """
    each = [
        _by_leaf(got, one, lambda g, e, i=i: _stands(s, g, e, i, len(expected), rounded))
        for i, one in enumerate(expected)
    ]
    _raise_first(f"{what} is not what its reference gives", each)
    for one in leaves(got):
        check_class(s, what, one)


def check_equal(s: Subject, what: str, got: Any, expected: Any) -> None:
    """Raises unless two results are the same in type, metadata, size, dtype and content."""
    _raise_first(what, [_by_leaf(got, expected, lambda g, e: _difference(s, g, e))])


def check_close(s: Subject, what: str, got: Any, expected: Any) -> None:
    """Raises unless two plain tensors are equal up to rounding."""
    _raise_first(what, [_numbers(s, got, expected)])


def value_difference(s: Subject, got: Any, expected: Any) -> str | None:
    """How two results differ in type, metadata, size, dtype or content, or None."""
    found = _by_leaf(got, expected, lambda g, e: _difference(s, g, e))
    return found and _told(found)


def difference(s: Subject, got: Any, expected: Any) -> str | None:
    """How the numbers of two tensors differ, or None."""
    found = _numbers(s, got, expected)
    return found and _told(found)


def check_class(s: Subject, what: str, got: Any) -> None:
    """Raises if a declared class has inherited a rule that makes values of the base."""
    made = type(got)
    if s.declared and made is not s.cls and issubclass(made, TensorSubclass) and issubclass(s.cls, made):
        raise Broken(
            f"{what} gives {one_of(made)}, a base of {s.name}, and not {one_of(s.cls)}",
            mend=f"for classes that inherit the rule, write type(x)(...) in place of {made.__name__}(...), which makes "
            f"{one_of(made)} whatever class its operand is of",
        )


def _told(found: tuple[str, str, str]) -> str:
    where, got, expected = found
    return f"{where}{': ' if where else ''}{got}{' instead of ' if expected else ''}{expected}"


def _raise_first(what: str, found: Sequence[Found]) -> None:
    for where, got, expected in filter(None, found):
        raise Broken(": ".join(filter(None, (what, where))), got, expected or "equal numbers")


def _by_leaf(got: Any, expected: Any, compare: Callable[[Any, Any], Found]) -> Found:
    got_leaves, wanted = leaves(got), leaves(expected)
    if len(got_leaves) != len(wanted):
        return "", f"{len(got_leaves)} results", str(len(wanted))
    for i, (g, w) in enumerate(zip(got_leaves, wanted, strict=True)):
        if found := compare(g, w):
            numbered = ": ".join(filter(None, (f"result {i}", found[0])))
            return found if len(wanted) == 1 else (numbered, *found[1:])
    return None


def _stands(s: Subject, got: Any, expected: Any, place: int, count: int, rounded: bool) -> Found:
    """How a result differs from the result on one of the plain tensors that a value represents.

    Args:
        s: the class under test.
        got: the result on the value.
        expected: the result on the plain tensor.
        place: the index of the plain tensor.
        count: how many plain tensors the value represents.
        rounded: compare in the dtype of the reference.
    """
    if not (isinstance(expected, Tensor) and isinstance(got, Tensor)):
        return _difference(s, got, expected)
    if found := _attributes(got, expected, ("shape",) if rounded else ("shape", "dtype")):
        return found
    plains = s.references(got, count)
    if len(plains) != count:
        return "", f"a value for {len(plains)} tensors", str(count)
    plain = plains[place]
    return _attributes(plain, expected, ("shape",)) or _numbers(
        s, plain.to(expected.dtype) if rounded else plain, expected
    )


def _difference(s: Subject, got: Any, expected: Any) -> Found:
    if not isinstance(expected, Tensor):
        return None if _alike(s, got, expected) else ("", repr(got), repr(expected))
    if plain_type(got) is not plain_type(expected):
        return "", one_of(type(got)), one_of(type(expected))
    if found := _attributes(got, expected, ("shape", "dtype", "device")):
        return found
    if not (is_traceable_wrapper_subclass(expected) or isinstance(expected, s.cls)):
        return _numbers(s, got, expected)
    (inners, context), (wanted, other) = [(s.inners(x), s.context(x)) for x in (got, expected)]
    if list(inners) != list(wanted):
        names, others = ([*map(field_name, found)] for found in (inners, wanted))
        return "", f"inner tensors {names}", str(others)
    if not same_context(context, other):
        return "", f"metadata {first_line(repr(context))}", first_line(repr(other))
    for name, inner in inners.items():
        if found := _difference(s, inner, wanted[name]):
            return ": ".join(filter(None, (field_name(name), found[0]))), *found[1:]
    return None


def _attributes(got: Any, expected: Any, names: Sequence[str]) -> Found:
    for name in names:
        one, other = (
            list(v) if name == "shape" else v for v in (getattr(got, name), getattr(expected, name))
        )
        if one != other:
            return "", f"{name} {one}", str(other)
    return None


def _numbers(s: Subject, got: Any, expected: Any) -> Found:
    got, expected = plainest(got), plainest(expected)
    rtol, atol = _tolerance(s, expected)
    with Attempt() as attempt:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    if attempt.error is None:
        return None
    lines = [line for line in str(attempt.error).splitlines() if line.strip()]
    return "", " ".join(lines[:3])[:300], ""


def _tolerance(s: Subject, expected: Any) -> tuple[float, float]:
    """The relative and absolute tolerance for a result.

    Rounding errors of a sum are relative to its terms, and so to the largest entry, not to each entry.
    """
    rtol, atol = s.options.get("rtol"), s.options.get("atol")
    if rtol is not None or atol is not None:
        return rtol or 0.0, atol or 0.0
    if not (expected.is_floating_point() or expected.is_complex()) or expected.device.type == "meta":
        return 0.0, 0.0
    finite = torch.where(expected.isfinite(), expected, 0).abs()
    rtol = torch.finfo(expected.dtype).eps ** 0.75
    return rtol, rtol * max(1.0, float(finite.amax()) if finite.numel() else 0.0)


def plainest(t: Any) -> Any:
    """Converts to a tensor that torch can compare.

    Unwraps a wrapper to its first inner tensor, converts float8 to float32, and resolves lazy bits.
    """
    if not isinstance(t, Tensor):
        return t
    t = t.detach()
    while is_traceable_wrapper_subclass(t):
        names, _ = t.__tensor_flatten__()  # type: ignore[attr-defined]
        t = getattr(t, names[0])
    if t.is_floating_point() and t.dtype.itemsize == 1:
        return t.to(torch.float32)  # torch compares no float8 tensors
    return t.resolve_conj().resolve_neg()


def _alike(s: Subject, got: Any, expected: Any) -> bool:
    if type(got) is not type(expected):
        return False
    if isinstance(got, float | complex):
        return _numbers(s, torch.tensor(got), torch.tensor(expected)) is None
    return bool(got == expected)


def plain_type(x: Any) -> type:
    """The type, where a parameter counts as a tensor."""
    return Tensor if type(x) is torch.nn.Parameter else type(x)


def same_context(a: Any, b: Any) -> bool:
    """Whether two flatten contexts mean the same metadata."""
    return a is b or bool(a == b)


def snapshot(s: Subject, x: Any) -> Any:
    """A copy of a value with inner tensors of its own, made without a call of the class's own copy."""
    if not (is_traceable_wrapper_subclass(x) or isinstance(x, s.cls)):
        return x.detach().clone()
    return s.unflatten(x, {name: snapshot(s, inner) for name, inner in s.inners(x).items()})
