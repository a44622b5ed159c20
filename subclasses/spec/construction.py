"""Checks of a construction, and small helpers that generated methods call.

Generated code tests a condition inline and calls a ``raise_`` function only if it fails, so a valid construction pays
for the test alone.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from subclasses._torch import DisableTorchFunctionSubclass, is_transformed
from subclasses.errors import DispatchError
from subclasses.spec.values import known_to_differ


def raise_not_a_tensor(cls: str, field: str, expected: type, got: object) -> NoReturn:
    """Raises TypeError: the value of an inner tensor field is not a tensor of the expected class."""
    raise TypeError(f"{cls}.{field}: expected a {expected.__name__}, got {_describe(got)}")


def raise_metadata_by_position(
    cls: str, inners: Sequence[str], metadata: Sequence[str], more: Sequence[object]
) -> NoReturn:
    """Raises TypeError: there are more positional arguments than inner tensors; metadata is passed by keyword."""
    inner = f"{len(inners)} inner tensor{'s' * (len(inners) > 1)} by position ({', '.join(inners)})"
    given = [
        f"{name}={value!r}"
        for name, value in zip(metadata, more, strict=False)
        if not isinstance(value, Tensor)
    ]
    if given and len(more) <= len(metadata):
        mend = f"pass it by keyword: {', '.join(given)}"
    else:
        mend = f"and by keyword {', '.join(metadata)}"
    raise TypeError(f"{cls} takes {inner}, got {len(inners) + len(more)}; {mend}")


def raise_no_conversion(cls: str, now: torch.dtype, asked: torch.dtype) -> NoReturn:
    """Raises TypeError: a value is to become a plain tensor of another dtype, as ``Module.half()`` does."""
    if now.is_complex and not asked.is_complex:
        raise TypeError(
            f"{cls}.data: expected a {cls}, got a plain tensor of {asked}. If this is Module.to or Module.half: {cls} "
            f"is {now}, and {asked} has no imaginary part, so the conversion materialized it. Add a rule with "
            f"@{cls}.implements(torch.ops.aten._to_copy.default) that returns a {cls} of a complex dtype where a real "
            f"one is asked for; or convert the other parameters one by one"
        )
    raise TypeError(
        f"{cls}.data: expected a {cls}, got a plain tensor of {asked}. If this is Module.to or Module.half: {cls} does "
        f"not convert from {now} to {asked}, because no inner tensor of the outer dtype is free to change, so the "
        f"conversion materialized it. Let dtype_from= or `outer` follow an inner tensor declared without dtype=, or "
        f"add a rule with @{cls}.implements(torch.ops.aten._to_copy.default)"
    )


def raise_not_an_outer(cls: str, got: object) -> NoReturn:
    """Raises TypeError: ``outer`` returned something else than an Outer."""
    shown = _describe(got)
    raise TypeError(f"{cls}.outer: expected an Outer, as in `return Outer(size=(...))`, got {shown}")


def raise_failed_outer(cls: str, error: RuntimeError) -> NoReturn:
    """Raises what ``outer`` raised, or DispatchError where it read what is in a tensor while a compiler traced it."""
    try:
        if type(error).__name__ not in _DATA_DEPENDENT:
            raise error
        raise DispatchError(
            f"{cls}.outer reads what is in an inner tensor, as int(t.max()) does, and no compiler knows it ({error}): "
            f"compute the size from sizes and metadata. Declare one that only the contents tell as a field, "
            f"`length: int = dynamic()`, and pass it to the constructor"
        ) from error
    finally:
        del error  # its traceback holds this frame


# Errors of torch.fx and of fake tensors, by name: a release has them in one module or in another.
_DATA_DEPENDENT = frozenset({"DataDependentOutputException", "GuardOnDataDependentSymNode"})


def raise_bad_outer(cls: str, outer: object, error: Exception) -> NoReturn:
    """Raises ValueError: ``outer`` returned an Outer that describes no tensor; an error of a trace stays as it is."""
    try:
        if type(error) not in (TypeError, RuntimeError):
            raise error
        negative = any(type(n) is int and n < 0 for n in getattr(outer, "size", ()))
        text = "a size is negative" if negative else str(error).splitlines()[0]
        raise ValueError(f"{cls}.outer: no tensor has what it returned, {outer}: {text}") from error
    finally:
        del error  # its traceback holds this frame


def check_materialized(x: Any, plain: Any) -> None:
    """Raises ValueError if what ``materialize`` returned is no other tensor, or one of other sizes or another dtype.

    Under autocast it may have another dtype, which the ops of ``materialize`` give.
    """
    with DisableTorchFunctionSubclass():  # reading the size of a value would ask its class
        if (
            plain.__class__ is Tensor
            and plain.dtype is x.dtype
            and plain.shape == x.shape
            and plain.device == x.device
        ):
            return
    if not isinstance(plain, Tensor):
        got = f"{plain!r} of type {type(plain).__name__}"
    elif plain is x or (type(plain) is type(x) and not x._layout.nested):
        raise ValueError(
            f"{type(x).__name__}.materialize: expected a plain tensor, which is what ops without a rule compute with, "
            f"got a {type(x).__name__} again; compute it from the inner tensors, as in self.{x._layout.present[0]}"
        )
    elif known_to_differ(plain.shape, x.shape) or not (
        plain.dtype == x.dtype or _is_autocasting(plain.device.type)
    ):
        got = f"one of size {tuple(plain.shape)} and {plain.dtype}"
    elif plain.device != x.device:
        raise ValueError(
            f"{type(x).__name__}.materialize: expected a tensor on {x.device}, where the value is, got one on "
            f"{plain.device}; make what it computes with there, as in torch.arange(n, device=self.device)"
        )
    else:
        return
    raise ValueError(
        f"{type(x).__name__}.materialize: expected a tensor of the outer size {tuple(x.shape)} and {x.dtype}, got "
        f"{got}; mend it, or say with size_from=, dtype_from= or `outer` what the value shows"
    )


def _is_autocasting(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def raise_wrong_dtype(cls: str, field: str, expected: torch.dtype, got: torch.dtype) -> NoReturn:
    """Raises ValueError: an inner tensor does not have the dtype that its field declares."""
    raise ValueError(f"{cls}.{field}: expected dtype {expected}, got {got}")


def raise_mixed_devices(cls: str, field: str, got: Any, anchor: str, expected: Any) -> NoReturn:
    """Raises ValueError: two inner tensors are on different devices."""
    raise ValueError(
        f"{cls}.{field}: expected device {expected} as of {anchor!r}, got {got}; "
        f"declare it inner(device='any') if it may live elsewhere"
    )


def raise_not_a_count(cls: str, field: str, got: object) -> NoReturn:
    """Raises for an invalid dynamic int: ValueError if it is negative, TypeError if it is not an int."""
    shown = f"{got}" if isinstance(got, int) and not isinstance(got, bool) else _describe(got)
    kind = ValueError if isinstance(got, int) and not isinstance(got, bool) else TypeError
    raise kind(f"{cls}.{field}: expected a non-negative int, got {shown}")


def check_not_transformed(cls: str, *inners: Tensor | None) -> None:
    """Raises DispatchError if a torch.func transform wrapped an inner tensor."""
    if any(t is not None and is_transformed(t) for t in inners):
        raise DispatchError(
            f"{cls}: cannot be made inside a transform of torch.func (vmap, grad, jvp, ...) from tensors that it "
            f"transforms, since an op on it would reach them after the transform was left; make it outside and pass "
            f"what is inside as plain tensors, or use torch.autograd.grad or a batch dimension"
        )


def check_statics(cls: str, fields: Sequence[Any], values: tuple[Any, ...]) -> None:
    """Checks each value of static metadata; ``fields`` are those of the declaration.

    Raises:
        TypeError: one is not hashable, could be changed in place, contains a tensor or a symbol without a value, or has
            another type than the annotation of its field.
        ValueError: one is none of those that the annotation of its field lists, or is not equal to itself.
    """
    for field, value in zip(fields, values, strict=True):
        name = field.name
        if (tensor := find_tensor(value)) is not None:
            raise TypeError(f"{cls}.{name}: expected static metadata, got {_describe(tensor)}; use inner()")
        if (symbol := _find_symbol(value)) is not None:
            raise TypeError(
                f"{cls}.{name}: expected static metadata, got {symbol}, which depends on the numbers in a tensor and "
                f"is known when the compiled function runs; declare it dynamic() if it is an int, or compute it "
                f"outside of the function"
            )
        try:
            hash(value)
        except TypeError as error:
            place, part = _find_unhashable(f"{cls}.{name}", value)
            raise TypeError(
                f"{place}: expected hashable metadata, got {_describe(part)}; use a tuple or a frozen dataclass"
            ) from error
        if (changeable := find_changeable(value)) is not None:
            raise TypeError(
                f"{cls}.{name}: expected metadata that is compared by value and cannot change in place, since compiled "
                f"programs are found by it, got {_describe(changeable)}; make {type(changeable).__name__} a "
                f"@dataclass(frozen=True), or pass what is read from it as metadata of its own"
            )
        if field.kinds and is_unlike(value, field.kinds):
            raise TypeError(
                f"{cls}.{name}: expected {show_kinds(field.kinds)}, as its annotation says, got {_describe(value)}"
            )
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(
                f"{cls}.{name}: expected metadata that equals itself, since compiled programs are found by it, got nan"
            )
        if field.choices and is_no_choice(value, field.choices):
            raise ValueError(
                f"{cls}.{name}: expected one of {show_choices(field.choices)}, got {_describe(value)}"
            )


def concrete(value: Any) -> Any:
    """Returns static metadata with Python's numbers in place of the symbols of a compiler, also in tuples.

    A compiler makes a symbol of a size, and of a number that an argument holds. Static metadata is a constant of a
    program, so the program is for the symbol's value, and guards on it. A symbol without a value stays.
    """
    if type(value) is tuple:
        return tuple(map(concrete, value))
    kind = _SYMBOLS.get(type(value))
    return value if kind is None or _is_unknown(value) else kind(value)


def _is_unknown(symbol: Any) -> bool:
    """Whether a symbol stands for a number that only the running program knows."""
    # Imported here because it imports sympy; a symbol exists in a trace only, which has imported it.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(symbol))


_SYMBOLS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def _find_symbol(value: Any) -> Any:
    if isinstance(value, tuple):
        return next((s for part in value if (s := _find_symbol(part)) is not None), None)
    return value if isinstance(value, tuple(_SYMBOLS)) else None


def _find_unhashable(place: str, value: Any) -> tuple[str, Any]:
    """Returns the innermost part of metadata that has no hash, in tuples and frozen dataclasses, with its place."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, tuple):
        parts = [(f"{place}[{i}]", part) for i, part in enumerate(value)]
    elif dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        parts = [(f"{place}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    for part in parts:
        try:
            hash(part[1])
        except TypeError:
            return _find_unhashable(*part)
    return place, value


def is_unlike(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a value has none of these types; a number of numpy may stand for one of Python."""
    return not isinstance(value, kinds) and not hasattr(value, "item")


def show_kinds(kinds: tuple[type, ...]) -> str:
    """Returns the types that an annotation names, as they are written."""
    return " | ".join(dict.fromkeys("None" if k is types.NoneType else k.__name__ for k in kinds))


def is_no_choice(value: object, choices: tuple[Any, ...]) -> bool:
    """Whether a value is none of those that an annotation lists, if it lists any.

    ``True`` is not ``1``; a member of an ``IntEnum`` or ``StrEnum`` is its value.
    """
    return bool(choices) and not any(
        c == value and (type(c) is type(value) or isinstance(c, enum.Enum)) for c in choices
    )


def show_choices(choices: tuple[Any, ...]) -> str:
    """Returns the values that an annotation lists, as they are written."""
    return ", ".join(f"{type(c).__name__}.{c.name}" if isinstance(c, enum.Enum) else repr(c) for c in choices)


def find_tensor(value: object) -> Tensor | None:
    """Returns the first tensor that a value of static metadata is or contains, or None."""
    if isinstance(value, Tensor):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, list | tuple | frozenset):
        return next((t for part in value if (t := find_tensor(part)) is not None), None)
    return None


def find_changeable(value: object) -> object:
    """Returns the first object in a value of static metadata whose attributes can be set unnoticed, or None.

    Such an object is an instance of a user's class that inherits identity as equality, or of a dataclass that hashes
    fields which can be set. A class that defines ``__eq__`` and ``__hash__`` itself is trusted to keep what they read.
    """
    cls = type(value)
    if isinstance(value, type | enum.Enum):
        return None
    if isinstance(value, tuple | frozenset):
        return _first_changeable(value)
    if isinstance(value, types.MethodType):
        return find_changeable(value.__self__)
    if isinstance(value, functools.partial):
        return _first_changeable((value.func, *value.args, *value.keywords.values()))
    if dataclasses.is_dataclass(cls):
        parameters = cls.__dataclass_params__  # type: ignore[attr-defined]
        if parameters.frozen:
            return _first_changeable(getattr(value, f.name) for f in dataclasses.fields(cls))
        if parameters.unsafe_hash:
            return value
    has_attributes = hasattr(value, "__dict__") or any(getattr(c, "__slots__", ()) for c in cls.__mro__)
    is_users = cls.__module__.partition(".")[0] not in _LIBRARIES
    return value if is_users and has_attributes and cls.__eq__ is object.__eq__ else None


def _first_changeable(values: Iterable[object]) -> object:
    return next((found for part in values if (found := find_changeable(part)) is not None), None)


# The objects of these that have an identity, such as functions and modules, are constants of a program.
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy"})


def repr_tail(x: Tensor) -> str:
    """Returns the end of a repr: ``grad_fn`` or ``requires_grad``, as for a plain tensor."""
    if x.grad_fn is not None:
        return f", grad_fn=<{type(x.grad_fn).__name__}>"
    return ", requires_grad=True" if x.requires_grad else ""


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if value is not None else "None"
