"""Checks for names in a class body that look like fields and declare none.

A field without its marker would be a plain class attribute, or no attribute at all: no value would have it, and no
compiler would read it. Each error names the missing marker, or shows how to declare a constant of the class.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from torch import Tensor

from subclasses.errors import SpecError
from subclasses.spec.annotations import annotations_of, is_union, resolve_annotation
from subclasses.spec.collect import OWN_FIELDS
from subclasses.spec.fields import Marker, dynamic, inner, static
from subclasses.spec.names import check_field_name, check_method_name, check_special_methods

# Final[int] is the annotation of an int that is assigned once.
_FINAL = re.compile(r"^(\w+\.)*Final\[(.*)\]$")
# A string annotation may contain a name that only type checkers import, so it is not evaluated to recognize these.
_NOT_A_FIELD = re.compile(r"(\w+\.)*(ClassVar|Final)\b")

_MISSING = object()


def check_undeclared(cls: type, scope: Mapping[str, Any]) -> None:
    """Checks the body of a class, before its markers are collected.

    Annotations of names with a leading underscore, and ``ClassVar`` or ``Final`` with a value, declare no field.

    Args:
        cls: the class with its markers.
        scope: the local names at the class statement, to resolve annotations that are strings.

    Raises:
        SpecError: a name is annotated and has no marker, or a marker is not called. Also if a plain value replaces an
            inherited field, or a base that is not a declared class has a marker.
    """
    inherited = {name for base in cls.__mro__[1:] for name in vars(base).get(OWN_FIELDS, ())}
    for name, annotation in annotations_of(cls).items():
        value = vars(cls).get(name, _MISSING)
        if _is_method_named(name, value) and not name.startswith("_"):
            raise SpecError(
                f"{cls.__name__}.{name} is annotated, as a field is, and a method or property of the class body too, "
                "of which the last one counts",
                code="name-taken",
                hint="give one of them another name",
            )
        if name.startswith("_") or _is_declared(value) or _is_constant(annotation, value):
            continue
        if name in inherited and value is _MISSING:
            continue  # narrows the type of an inherited field for type checkers
        check_field_name(cls, name)
        _raise_undeclared(cls, name, annotation, value, scope)
    check_special_methods(cls)
    for name, value in vars(cls).items():
        _check_value(cls, name, value, name in inherited)
    for base in cls.__mro__[1:]:
        for name, value in vars(base).items():
            if isinstance(value, Marker):
                raise SpecError(
                    f"{cls.__name__}: its base {base.__name__} declares the field {name!r} and is not a declared class",
                    code="base-refused",
                    hint=f"write `class {base.__name__}(TensorSubclass)`, or declare {name!r} in {cls.__name__}",
                )


def _check_value(cls: type, name: str, value: object, is_inherited_field: bool) -> None:
    """Raises SpecError if a value in a class body is a marker not called, replaces a field, or is a tensor."""
    if any(value is f for f in (inner, static, dynamic)):
        marker = value.__name__  # type: ignore[attr-defined]
        raise SpecError(
            f"{cls.__name__}: `{name} = {marker}` names a function",
            code="field-undeclared",
            hint=f"call it: `{name} = {marker}()`",
        )
    if is_inherited_field and not isinstance(value, Marker):
        replacement = "a method or property" if hasattr(type(value), "__get__") else "a constant of the class"
        raise SpecError(
            f"{cls.__name__}.{name} = {value!r} replaces an inherited field with {replacement}, which generated code "
            "does not read",
            code="field-undeclared",
            hint="declare the field again, with static(default=...), dynamic(default=...) or inner(), or choose "
            "another name",
        )
    if not isinstance(value, Marker):
        check_method_name(cls, name, value)
    if isinstance(value, Tensor):
        raise SpecError(
            f"{cls.__name__}.{name} is a tensor in the class body, which compilers refuse where a rule reads it",
            code="constant-refused",
            hint=f"write `{name} = constant(...)` with its numbers",
        )


def _is_method_named(name: str, value: Any) -> bool:
    """Whether a value in a class body is a function, or a property of one, that was defined there by a name."""
    for attribute in ("fget", "__func__", "func"):
        value = getattr(value, attribute, value)
    return isinstance(value, types.FunctionType) and value.__name__ == name


def _is_declared(value: object) -> bool:
    """Whether a value in a class body is a marker, a method or another descriptor."""
    return isinstance(value, Marker) or hasattr(type(value), "__get__")


def _is_constant(annotation: Any, value: object) -> bool:
    """Whether an annotation declares an attribute of the class; ``Final`` without a value does not."""
    if isinstance(annotation, str):
        match = _NOT_A_FIELD.match(annotation.strip())
        marker = None if match is None else {"ClassVar": ClassVar, "Final": Final}[match[2]]
    else:
        marker = typing.get_origin(annotation) or annotation
    return marker is ClassVar or (marker is Final and value is not _MISSING)


def _raise_undeclared(cls: type, name: str, annotation: Any, value: object, scope: Mapping[str, Any]) -> None:
    if isinstance(value, dataclasses.Field):  # dataclasses have another MISSING than declarations
        value = _MISSING if value.default is dataclasses.MISSING else value.default
    written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    written = _FINAL.sub(r"\2", written).replace("torch.Tensor", "Tensor")
    given = "" if value is _MISSING else f" = {_show(value)}"
    options = _options(cls, name, annotation, scope)
    fixed = f"{name}: ClassVar[{written}]{given or ' = ...'}"
    raise SpecError(
        f"{cls.__name__}: `{name}: {written}{given}` declares no field",
        code="field-undeclared",
        hint=f"{_hint(name, written, options, value)}. For a constant of the class, write "
        f"`{f'{name} = constant([...])' if _are_tensors(options) else fixed}`",
    )


def _are_tensors(options: set[Any]) -> bool:
    plain = options - {types.NoneType}
    return bool(plain) and all(isinstance(k, type) and issubclass(k, Tensor) for k in plain)


def _hint(name: str, written: str, options: set[Any], value: object) -> str:
    """Returns a hint that declares the intended field, and that the next check accepts."""
    plain = options - {types.NoneType}
    if _are_tensors(options):
        optional = types.NoneType in options
        if len(plain) > 1:
            written = "Tensor | None" if optional else "Tensor"  # of any class
        return f"an inner tensor is declared with `{name}: {written} = inner({'optional=True' * optional})`"
    mutable = {list, dict, set, bytearray}
    if any((typing.get_origin(k) or k) in mutable for k in plain) or type(value) in mutable:
        return f"metadata is hashable, so declare a tuple or a frozen dataclass, `{name}: tuple = static()`"
    default = "" if value is _MISSING else f"default={_show(value)}"
    hint = f"metadata is declared with `{name}: {written} = static({default})`"
    if plain == {int} and (value is _MISSING or (type(value) is int and value >= 0)):
        hint += f", or with dynamic({default}) if a change is not to recompile"
    return hint


def _show(value: object) -> str:
    return "..." if isinstance(value, Tensor) else repr(value)


def _options(cls: type, name: str, annotation: Any, scope: Mapping[str, Any]) -> set[Any]:
    """Returns the types that an annotation allows; empty if it cannot be evaluated."""
    try:
        hint = resolve_annotation(cls, name, annotation, scope)
    except SpecError:
        return set()
    return set(typing.get_args(hint)) if is_union(hint) else {hint}
