"""Annotations of fields, evaluated."""

from __future__ import annotations

import enum
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from subclasses.errors import SpecError
from subclasses.spec.fields import MISSING
from subclasses.spec.statics import is_unlike

if sys.version_info >= (3, 14):
    import annotationlib


def annotations_of(cls: type) -> dict[str, Any]:
    """Returns the annotations in a class body; an annotation is a string if it names an undefined object.

    Python 3.14 evaluates annotations when they are read. At that time the class has no name yet.
    """
    if sys.version_info < (3, 14):
        return inspect.get_annotations(cls)
    annotations = annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    return {
        name: getattr(annotation, "__forward_arg__", annotation) for name, annotation in annotations.items()
    }


def names_around(frame: types.FrameType) -> dict[str, Any]:
    """Returns the local names at a class statement, which runs in a frame.

    Since Python 3.12 a class with type parameters runs in a frame of its own, inside the frame around the statement.
    """
    scope: dict[str, Any] = {**frame.f_locals}
    while frame.f_code.co_name.startswith("<generic parameters of ") and frame.f_back is not None:
        frame = frame.f_back
        scope = {**frame.f_locals, **scope}
    return scope


def resolve_annotation(cls: type, name: str, annotation: Any, scope: Mapping[str, Any]) -> Any:
    """Evaluates an annotation, which may be a string.

    Raises:
        SpecError: it names something that does not exist at run time.
    """
    holder = types.new_class("Holder", exec_body=lambda ns: ns.update(__annotations__={name: annotation}))
    holder.__module__ = cls.__module__
    try:
        # An annotation may name the class itself, which is not bound in the scope yet.
        return _without_aliases(typing.get_type_hints(holder, localns={**scope, cls.__name__: cls})[name])
    except (NameError, SyntaxError, AttributeError, TypeError) as error:
        raise SpecError(
            f"{cls.__name__}.{name}: cannot resolve the annotation {annotation!r}: {error}",
            code="annotation-wrong",
        ) from error


def _without_aliases(hint: Any) -> Any:
    """Returns an evaluated annotation with each name of a ``type`` statement replaced by its value."""
    while hasattr(hint, "__value__"):  # of Python 3.12
        hint = hint.__value__
    return typing.Union[tuple(map(_without_aliases, typing.get_args(hint)))] if is_union(hint) else hint  # noqa: UP007


def is_union(hint: object) -> bool:
    """Whether an evaluated annotation is a union, such as ``Tensor | None``."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def check_static_annotation(cls: type, name: str, default: Any, scope: Mapping[str, Any]) -> tuple[type, ...]:
    """Checks that static metadata is annotated as no tensor, and that a default has the annotated type.

    An annotation with a name that only type checkers import is not checked.

    Returns:
        the types that a value may have, if the annotation names only numbers, text and similar types; else nothing.

    Raises:
        SpecError: it is annotated as a tensor, or the default has another type.
    """
    try:
        hint = resolve_annotation(cls, name, annotations_of(cls).get(name, Any), scope)
    except SpecError:
        return ()
    options = typing.get_args(hint) if is_union(hint) else (hint,)
    if any(isinstance(k, type) and issubclass(k, Tensor) for k in options):
        raise SpecError(
            f"{cls.__name__}.{name}: static metadata holds no tensor, and the annotation is {_named(hint)}",
            code="annotation-wrong",
            hint="declare it with inner()",
        )
    accepted = (*options, *(_NUMBERS if complex in options else _NUMBERS[:2] if float in options else ()))
    if not set(options) <= _SIMPLE:
        return ()
    if default is not MISSING and is_unlike(default, accepted):
        raise SpecError(
            f"{cls.__name__}.{name}: expected a default of type {_named(hint)}, got {default!r}",
            code="default-refused",
            hint="change one of the two",
        )
    return accepted


# Types whose values a default can be compared with.
_SIMPLE = {int, float, complex, bool, str, bytes, types.NoneType, torch.dtype}
_NUMBERS = (int, float, complex)  # each accepts those before it


def _named(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def static_choices(cls: type, name: str, scope: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the values that an annotation lists, as an enum or a ``Literal`` does; empty if it lists none.

    An annotation with a name that only type checkers import lists none.
    """
    try:
        hint = resolve_annotation(cls, name, annotations_of(cls).get(name, Any), scope)
    except SpecError:
        return ()
    choices: list[Any] = []
    for option in typing.get_args(hint) if is_union(hint) else (hint,):
        if isinstance(option, type) and issubclass(option, enum.Enum) and not issubclass(option, enum.Flag):
            choices += option
        elif typing.get_origin(option) is Literal:
            choices += typing.get_args(option)
        elif option is types.NoneType:
            choices.append(None)
        else:
            return ()
    return tuple(choices)
