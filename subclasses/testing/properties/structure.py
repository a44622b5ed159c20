"""Flattening and unflattening a value, its metadata, its outer size and dtype, its repr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import fake_mode
from subclasses.errors import one_of
from subclasses.layout import field_name
from subclasses.testing import derive
from subclasses.testing.cases import once
from subclasses.testing.compare import check_equal, same_context
from subclasses.testing.errors import Attempt, Broken, must, problem, refusal
from subclasses.testing.faults import OTHER_SIZE
from subclasses.testing.property import promise
from subclasses.testing.subject import Subject

# ---- the least -----------------------------------------------------------------------------------------------


@once
def unreadable(s: Subject) -> tuple[str, Exception] | None:
    """The first read of a value that every promise is about, such as that of its shape, and fails; and its error."""
    reads: dict[str, Callable[[Any], Any]] = {
        "x.shape": lambda x: x.shape,
        "x.dtype": lambda x: x.dtype,
        "x.device": lambda x: x.device,
        "x.requires_grad": lambda x: x.requires_grad,
    }
    if s.declared:
        reads["x.__tensor_flatten__()"] = lambda x: x.__tensor_flatten__()
        if s.cls.__spec__.has_materialize:
            reads["x.materialize()"] = lambda x: x.materialize()
            reads["x.detach().materialize()"] = lambda x: x.detach().materialize()
    for what, read in reads.items():
        with Attempt() as attempt, torch.no_grad():
            read(s.make())
        if attempt.error is not None and refusal(attempt.error) is None:
            return what, attempt.error
    return None


@promise("correct what is named: each other promise needs it, and is tried when this one is kept")
def readable(s: Subject) -> None:
    """A value has a shape and a dtype, can be flattened, and says what it stands for, as its copy does."""
    found = unreadable(s)
    if found is not None:
        what, error = found
        raise Broken(problem(what, error), getattr(error, "mend", None)) from error


# ---- flattening ----------------------------------------------------------------------------------------------


@promise(
    "return ([names], context), where getattr(self, name) is a tensor for each name, absent ones left out"
)
def flatten(s: Subject) -> None:
    """__tensor_flatten__ names every inner tensor, by the attribute that holds it."""
    x = s.make()
    if not s.traceable:
        lacks = [n for n in ("__tensor_flatten__", "__tensor_unflatten__") if not hasattr(s.cls, n)]
        raise Broken(
            f"{s.name} has no {' and no '.join(lacks)}: no compiler, torch.export or fake tensor can take it apart",
            f"write both; its attributes hold the tensors {', '.join(s.inners(x)) or 'none'}, the names to return",
        )
    names, _ = x.__tensor_flatten__()
    if not names or not all(isinstance(n, str) for n in names):
        raise Broken(f"__tensor_flatten__ gave the names {names!r}")
    for name in names:
        inner = getattr(x, name, None)
        if not isinstance(inner, Tensor):
            raise Broken(f"{s.name}.{name} is {one_of(type(inner))}, and __tensor_flatten__ names it")


@promise(
    "__tensor_unflatten__ must use every inner tensor, the context, and give back the outer size, stride "
    "and dtype; what is neither an inner tensor nor in the context is lost under torch.compile",
    declared="a value is put together from its fields alone: let materialize(), `outer` and methods compute from "
    "fields, and declare what else they read, as `scale: float = static()`",
)
def round_trip(s: Subject) -> None:
    """A value put together from its own parts is the same value."""
    for x in _of_all_strides(s):
        back = s.unflatten(x, s.inners(x))
        if type(back) is not s.cls:
            raise Broken(f"__tensor_unflatten__ gave {one_of(type(back))}")
        for what in ("shape", "dtype", "device"):
            if getattr(back, what) != getattr(x, what):
                raise Broken(f"{what} was {getattr(x, what)} and came back as {getattr(back, what)}")
        if back.stride() != x.stride():
            raise Broken(f"stride was {x.stride()} and came back as {back.stride()}")
        for name, inner in s.inners(x).items():
            if getattr(back, name, None) is not inner and inner.numel():
                raise Broken(f"the inner tensor {field_name(name)} came back as another tensor")
        try:
            check_equal(s, "after a round trip", back, x)
            if s.has_reference:
                check_equal(s, "what it stands for, after a round trip", s.reference(back), s.reference(x))
        except Broken as error:
            raise Broken(str(error), _mend_lost(s, x, back)) from error


def _mend_lost(s: Subject, x: Any, back: Any) -> str | None:
    """The advice for attributes that a round trip changes, naming them; None if it changes none."""
    kept = vars(back)
    lost = [n for n, v in vars(x).items() if not isinstance(v, Tensor) and (n not in kept or kept[n] != v)]
    if not lost:
        return None
    names = " and ".join(f"{n} ({vars(x)[n]!r}, afterwards {kept.get(n)!r})" for n in lost)
    return (
        f"the flatten context {s.context(x)!r} loses {names}: return it in the context of __tensor_flatten__, and "
        f"give it back in __tensor_unflatten__"
    )


def _of_all_strides(s: Subject) -> list[Any]:
    """A value, and views of it with other strides and offsets as far as the class has them."""
    x = s.make()
    found = [x, x.detach()]
    for view in (lambda: x.transpose(0, -1), lambda: x[1:], lambda: x[..., ::2]):
        with Attempt() as attempt, torch.no_grad():
            found.append(view())
        s.refuses("a view of x", attempt.error)
    return [value for value in found if type(value) is s.cls]


@promise(
    "make the context a tuple or a frozen dataclass of plain values; tensors belong among the inner tensors, "
    "and an object compared by identity makes torch.compile recompile at each call"
)
def metadata(s: Subject) -> None:
    """Metadata is a constant: hashable, equal for equal values, without tensors."""
    s.needs_flatten()
    contexts = [s.context(s.make()) for _ in range(2)]
    for context in contexts:
        if _holds_tensor(context):
            raise Broken(f"the flatten context {context!r} holds a tensor")
    if not same_context(*contexts):
        raise Broken(f"two equal values have the contexts {contexts[0]!r} and {contexts[1]!r}, which differ")
    with must("hashing the flatten context"):
        hashes = {hash(context) for context in contexts}
    if len(hashes) > 1:
        raise Broken(f"the hash of the equal contexts {contexts[0]!r} differs")


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


@promise(
    "leave sizes out of the context: derive the outer size from the inner tensors or from outer_size, which "
    "__tensor_unflatten__ is given; a size in the context is wrong as soon as it is dynamic"
)
def sizes(s: Subject) -> None:
    """Sizes are no metadata: values that differ in sizes alone have one context."""
    s.needs_flatten()
    x = s.make()
    for factory in derive.sizes(s):
        other = s.make(factory)
        with Attempt() as attempt:
            if s.has_reference:
                _check_outside(s, other)
        if attempt.error is not None:
            raise Broken(
                f"of a value of size {list(other.shape)}, {problem('reference=', attempt.error)}", _OUTSIDE
            )
        if not same_context(s.context(x), s.context(other)):
            raise Broken(f"the contexts are {s.context(x)!r} and {s.context(other)!r}")
        back = s.cls.__tensor_unflatten__(s.inners(other), s.context(x), other.size(), other.stride())
        if back.shape != other.shape:
            raise Broken(
                f"inner tensors of a value of shape {list(other.shape)}, put together with the equal context of "
                f"another, gave shape {list(back.shape)}"
            )


_OUTSIDE = (
    "say with size_from=, dtype_from= or `outer` what the value shows: the size, dtype and device of what "
    "materialize() gives, computed from the inner tensors"
)


@promise(
    "pass the size, dtype and device of what the value stands for to _make_wrapper_subclass",
    declared=_OUTSIDE,
)
def outside(s: Subject) -> None:
    """The outside of a value tells the truth."""
    x = s.make()
    odd = s.odd_sizes() if s.is_mapped else {}
    if odd:
        sizes = " and ".join(f"{name} has size {size}" for name, size in odd.items())
        raise Broken(
            f"{sizes}, the value {list(x.shape)}",
            OTHER_SIZE,
        )
    _check_outside(s, x)


def _check_outside(s: Subject, x: Any) -> None:
    for plain in s.reference(x):
        for what in ("shape", "dtype", "device"):
            if getattr(plain, what) != getattr(x, what):
                raise Broken(f"{what} is {getattr(x, what)} outside, but {getattr(plain, what)} inside")


@promise(
    "no .item(), .tolist() or comparison of contents in __new__, __tensor_flatten__, __tensor_unflatten__: "
    "the compiler calls them on tensors without data; check contents in a factory function",
    declared="no .item(), .tolist() or comparison of contents in `outer`, or in a __new__ or __init__ of the class: "
    "the compiler puts values together without data; check contents in a classmethod that makes values",
)
def without_data(s: Subject) -> None:
    """Values are taken apart and put together without a look at their data."""
    s.needs_flatten()
    x = s.make()
    mode = fake_mode()
    with must("making a fake of a value"):
        fake = mode.from_tensor(x)
        if type(fake) is not s.cls or fake.shape != x.shape or fake.dtype != x.dtype:
            raise Broken(f"a fake of {_outside(x)} is {_outside(fake)}")
        with mode:
            back = s.unflatten(fake, s.inners(fake))
        if back.shape != x.shape:
            raise Broken(f"a fake of {_outside(x)} comes back as {_outside(back)}")


def _outside(x: Tensor) -> str:
    return f"{type(x).__name__}{list(x.shape)} of {x.dtype}"


@promise(
    "define __repr__(self, *, tensor_contents=None) and build the text from the inner tensors; Tensor's own "
    "runs ops that the class may not have"
)
def printing(s: Subject) -> None:
    """A value can be printed."""
    for x in (s.make(), *([fake_mode().from_tensor(s.make())] if s.traceable else [])):
        with must("repr(x)"), torch.no_grad():
            repr(x)
