"""Compares results: a value with the tensors that it represents, or with another value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass, storage_key
from subclasses.base import TensorSubclass
from subclasses.errors import one_of
from subclasses.layout import RAW, field_name
from subclasses.testing.errors import Broken, check_that, first_line, succeeds, tried
from subclasses.testing.subject import Subject


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
    for i, one in enumerate(expected):
        for where, g, e in _pairs(f"{what} is not what its reference gives", got, one):
            if not (isinstance(g, Tensor) and isinstance(e, Tensor)):
                check_equal(s, where, g, e)
                continue
            check_attributes(where, g, e, *("shape", "dtype")[: 1 if rounded else 2])
            plains = s.references(g, len(expected))
            check_that(
                len(plains) == len(expected), where, f"a value for {len(plains)} tensors", str(len(expected))
            )
            check_attributes(where, plains[i], e, "shape")
            check_close(s, where, plains[i].to(e.dtype) if rounded else plains[i], e)
    for one in leaves(got):
        check_class(s, what, one)


def check_equal(s: Subject, what: str, got: Any, expected: Any) -> None:
    """Raises unless two results are the same in type, metadata, size, dtype and content."""
    for where, g, e in _pairs(what, got, expected):
        if not isinstance(e, Tensor):
            check_that(_alike(s, g, e), where, repr(g), repr(e))
            continue
        check_that(plain_type(g) is plain_type(e), where, one_of(type(g)), one_of(type(e)))
        check_attributes(where, g, e, "shape", "dtype", "device")
        if not (is_traceable_wrapper_subclass(e) or isinstance(e, s.cls)):
            check_close(s, where, g, e)
            continue
        (inners, context), (wanted, other) = [(s.inners(x), s.context(x)) for x in (g, e)]
        if list(inners) != list(wanted):
            raise Broken(where, *(f"inner tensors {[*map(field_name, found)]}" for found in (inners, wanted)))
        if not same_context(context, other):
            raise Broken(where, f"metadata {first_line(repr(context))}", first_line(repr(other)))
        for name, inner in inners.items():
            check_equal(s, f"{where}: {field_name(name)}", inner, wanted[name])


def check_close(s: Subject, what: str, got: Any, expected: Any) -> None:
    """Raises unless two plain tensors are equal up to rounding."""
    got, expected = plainest(got), plainest(expected)
    rtol, atol = _tolerance(s, expected)
    compare = torch.testing.assert_close
    _, error = tried(lambda: compare(got, expected, rtol=rtol, atol=atol, equal_nan=True))
    if error is not None:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise Broken(what, " ".join(lines[:3])[:300], "equal numbers")


def differs(s: Subject, got: Any, expected: Any) -> bool:
    """Whether two results differ in type, metadata, size, dtype or content."""
    return not succeeds(check_equal, s, "", got, expected)


def check_class(s: Subject, what: str, got: Any) -> None:
    """Raises if a declared class has inherited a rule that makes values of the base."""
    made = type(got)
    if s.declared and made is not s.cls and issubclass(made, TensorSubclass) and issubclass(s.cls, made):
        raise Broken(
            f"{what} gives {one_of(made)}, a base of {s.name}, and not {one_of(s.cls)}",
            mend=f"for classes that inherit the rule, write type(x)(...) in place of {made.__name__}(...), which makes "
            f"{one_of(made)} whatever class its operand is of",
        )


def _pairs(what: str, got: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each result beside the expected one, with words for it.

    Raises:
        Broken: there are more or fewer results.
    """
    results, wanted = leaves(got), leaves(expected)
    check_that(len(results) == len(wanted), what, f"{len(results)} results", str(len(wanted)))
    for i, (g, e) in enumerate(zip(results, wanted, strict=True)):
        yield f"{what}: result {i}" if len(wanted) > 1 else what, g, e


def check_attributes(what: str, got: Any, expected: Any, *names: str) -> None:
    """Raises unless two tensors have the same shape, dtype or other attributes."""
    for name in names:
        one, other = (list(v) if name == "shape" else v for v in (getattr(t, name) for t in (got, expected)))
        check_that(one == other, what, f"{name} {one}", str(other))


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
    if isinstance(got, float | complex) and type(got) is type(expected):
        return succeeds(check_close, s, "", torch.tensor(got), torch.tensor(expected))
    return type(got) is type(expected) and bool(got == expected)


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


def memory_of(s: Subject, x: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The plain tensors inside of a value, by path, each by its storage; of a plain tensor, its own."""
    if is_traceable_wrapper_subclass(x) or isinstance(x, s.cls):
        for inner, t in s.inners(x).items():
            yield from memory_of(s, t, f"{name}.{inner.removeprefix(RAW)}")
    elif isinstance(x, Tensor) and x.numel():
        yield name, storage_key(x)


def shared_memory(s: Subject, y: Any, x: Any) -> list[tuple[str, str]]:
    """Pairs of the plain tensors in a result and in a value that lie in one storage."""
    return [(of_y, of_x) for of_y, a in memory_of(s, y) for of_x, b in memory_of(s, x) if a == b]
