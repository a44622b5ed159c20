"""Compares results: a value with the tensors that it stands for, a value with another value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.base import TensorSubclass
from subclasses.errors import one_of
from subclasses.layout import field_name
from subclasses.testing.errors import Attempt, Broken, OfBase, first_line
from subclasses.testing.subject import Subject


def leaves(value: Any) -> list[Any]:
    """A result as a flat list: lists and tuples are flattened."""
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def check_stands_for(s: Subject, what: str, got: Any, expected: Sequence[Any]) -> None:
    """Raises unless a result stands for the results on the reference.

    Args:
        s: the class under test.
        what: what was run, for the message.
        got: the result on a value, which may be plain, of the class, or several of them.
        expected: the results on the plain tensors that the value stands for, one for each.
    """
    got_leaves, wanted = leaves(got), [leaves(e) for e in expected]
    if any(len(w) != len(got_leaves) for w in wanted):
        raise Broken(f"{what} gave {len(got_leaves)} results, its reference {len(wanted[0])}")
    for i, one in enumerate(got_leaves):
        where = what if len(got_leaves) == 1 else f"result {i} of {what}"
        _check_leaf(s, where, one, [w[i] for w in wanted])


def _check_leaf(s: Subject, what: str, got: Any, expected: Sequence[Any]) -> None:
    if not isinstance(expected[0], Tensor):
        if not all(_alike(s, got, e) for e in expected):
            raise Broken(f"{what} gave {got!r}, its reference {', '.join(map(repr, expected))}")
        return
    if not isinstance(got, Tensor):
        raise Broken(f"{what} gave {one_of(type(got))}, its reference a tensor")
    check_class(s, what, got)
    plain = s.references(got, len(expected))
    if len(plain) != len(expected):
        raise Broken(f"{what} stands for {len(plain)} tensors, its reference for {len(expected)}")
    for p, e in zip(plain, expected, strict=True):
        check_shape(what, got, e)
        if got.dtype != e.dtype:
            raise Broken(f"{what} has {got.dtype}, its reference {e.dtype}")
        check_close(s, what, p, e)


def check_class(s: Subject, what: str, got: Any) -> None:
    """Raises if a declared class has inherited a rule that makes values of the base."""
    made = type(got)
    if s.declared and made is not s.cls and issubclass(made, TensorSubclass) and issubclass(s.cls, made):
        raise OfBase(
            f"{what} gives {one_of(made)}, a base of {s.name}, and not {one_of(s.cls)}",
            f"for classes that inherit the rule, write type(x)(...) in place of {made.__name__}(...), which makes "
            f"{one_of(made)} whatever class its operand is of",
        )


def check_shape(what: str, got: Tensor, expected: Tensor) -> None:
    """Raises unless a result has the shape of its reference."""
    if got.shape != expected.shape:
        raise Broken(f"{what} has shape {list(got.shape)}, its reference {list(expected.shape)}")


def check_close(s: Subject, what: str, got: Any, expected: Any) -> None:
    """Raises unless two plain tensors are equal up to rounding."""
    check_none(f"{what} is not what its reference gives", difference(s, got, expected))


def check_none(what: str, problem: str | None) -> None:
    """Raises if there is a problem."""
    if problem:
        raise Broken(f"{what}: {problem}")


def difference(s: Subject, got: Any, expected: Any) -> str | None:
    """How two tensors differ, or None."""
    got, expected = plainest(got), plainest(expected)
    rtol, atol = _tolerance(s, expected)
    with Attempt() as attempt:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    if attempt.error is None:
        return None
    lines = [line for line in str(attempt.error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:300]


def _tolerance(s: Subject, expected: Any) -> tuple[float, float]:
    """Rounding errors of a sum are relative to what was added, so to the largest entry rather than to each."""
    rtol, atol = s.options.get("rtol"), s.options.get("atol")
    if rtol is not None or atol is not None:
        return rtol or 0.0, atol or 0.0
    if not (expected.is_floating_point() or expected.is_complex()) or expected.device.type == "meta":
        return 0.0, 0.0
    finite = torch.where(expected.isfinite(), expected, 0).abs()
    rtol = torch.finfo(expected.dtype).eps ** 0.75
    return rtol, rtol * max(1.0, float(finite.amax()) if finite.numel() else 0.0)


def plainest(t: Any) -> Any:
    """A tensor that torch can compare: no lazy bits, no float8, no wrapper whose inner tensor stands for it."""
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
        return difference(s, torch.tensor(got), torch.tensor(expected)) is None
    return bool(got == expected)


# ---- two values of the class -------------------------------------------------------------------------------


def value_difference(s: Subject, got: Any, expected: Any) -> str | None:
    """How two results differ in type, metadata, size, dtype or content, or None."""
    got_leaves, wanted = leaves(got), leaves(expected)
    if len(got_leaves) != len(wanted):
        return f"{len(got_leaves)} results instead of {len(wanted)}"
    for i, (g, w) in enumerate(zip(got_leaves, wanted, strict=True)):
        problem = _leaf_difference(s, g, w)
        if problem:
            return problem if len(wanted) == 1 else f"result {i}: {problem}"
    return None


def _leaf_difference(s: Subject, got: Any, expected: Any) -> str | None:
    if not isinstance(expected, Tensor):
        return None if _alike(s, got, expected) else f"{got!r} instead of {expected!r}"
    if plain_type(got) is not plain_type(expected):
        return f"{one_of(type(got))} instead of {one_of(type(expected))}"
    for what in ("shape", "dtype", "device"):
        if getattr(got, what) != getattr(expected, what):
            return f"{what} {getattr(got, what)} instead of {getattr(expected, what)}"
    if not (is_traceable_wrapper_subclass(expected) or isinstance(expected, s.cls)):
        return difference(s, got, expected)
    (inners, context), (wanted, other) = [(s.inners(x), s.context(x)) for x in (got, expected)]
    if list(inners) != list(wanted):
        names, others = ([*map(field_name, found)] for found in (inners, wanted))
        return f"inner tensors {names} instead of {others}"
    if not same_context(context, other):
        return f"metadata {first_line(repr(context))} instead of {first_line(repr(other))}"
    for name, inner in inners.items():
        problem = _leaf_difference(s, inner, wanted[name])
        if problem:
            return f"{field_name(name)}: {problem}"
    return None


def plain_type(x: Any) -> type:
    """The type, where a parameter counts as a tensor."""
    return Tensor if type(x) is torch.nn.Parameter else type(x)


def same_context(a: Any, b: Any) -> bool:
    """Whether two flatten contexts mean the same metadata."""
    return a is b or bool(a == b)


def check_equal(s: Subject, what: str, got: Any, expected: Any) -> None:
    """Raises unless two results are the same in every respect."""
    check_none(what, value_difference(s, got, expected))


def snapshot(s: Subject, x: Any) -> Any:
    """A value with inner tensors of its own, put together without asking the class to copy."""
    if not (is_traceable_wrapper_subclass(x) or isinstance(x, s.cls)):
        return x.detach().clone()
    return s.unflatten(x, {name: snapshot(s, inner) for name, inner in s.inners(x).items()})
