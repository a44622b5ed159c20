"""Static metadata: its checks at a construction and at a declaration.

The static metadata of arguments is a key of compiled programs. So it is hashable, equals itself, and holds nothing that
changes in place: neither a tensor nor an object whose attributes can be set without a change of its hash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import HigherOrderOperator, OpOverload, OpOverloadPacket
from subclasses.errors import SpecError
from subclasses.spec.fields import MISSING

# ---- the checks --------------------------------------------------------------------------------------------


def check_statics(cls: str, fields: Sequence[Any], values: tuple[Any, ...]) -> None:
    """Checks each value of static metadata against the ``fields`` of the declaration.

    Raises:
        TypeError: a value is not hashable, can change in place, or contains a tensor or a symbol without a value. Also
            if it has another type than the annotation of its field.
        ValueError: a value is not among the values that the annotation of its field lists, or does not equal itself.
    """
    for field, value in zip(fields, values, strict=True):
        name = field.name
        if (tensor := find_tensor(value)) is not None:
            raise TypeError(f"{cls}.{name}: expected static metadata, got {describe(tensor)}; use inner()")
        if (symbol := _find_symbol(value)) is not None:
            raise TypeError(
                f"{cls}.{name}: expected static metadata, got {symbol}, which depends on data of a tensor. "
                f"Declare it dynamic() if it is an int, or compute it outside of the function"
            )
        try:
            hash(value)
        except TypeError as error:
            path, unhashable = _find_unhashable(f"{cls}.{name}", value)
            raise TypeError(
                f"{path}: expected hashable metadata, got {describe(unhashable)}; use a tuple or a frozen dataclass"
            ) from error
        if (changeable := find_changeable(value)) is not None:
            raise TypeError(
                f"{cls}.{name}: expected metadata that is compared by value and cannot change in place, since compiled "
                f"programs are found by it, got {describe_changeable(value, changeable)}"
            )
        if field.types and is_unlike(value, field.types):
            raise TypeError(
                f"{cls}.{name}: expected {show_types(field.types)}, as its annotation says, got {describe(value)}"
            )
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(
                f"{cls}.{name}: expected metadata that equals itself, since compiled programs are found by it, got nan"
            )
        if field.choices and is_no_choice(value, field.choices):
            raise ValueError(
                f"{cls}.{name}: expected one of {show_choices(field.choices)}, got {describe(value)}"
            )


def check_default(cls: str, field: Any) -> None:
    """Raises SpecError if the default of static metadata could not be its value."""
    if field.default is MISSING:
        return
    if find_tensor(field.default) is not None:
        raise SpecError(
            f"{cls}.{field.name}: a default cannot be a tensor",
            code="default-refused",
            hint="declare an inner() instead",
        )
    try:
        hash(field.default)
    except TypeError as error:
        raise SpecError(
            f"{cls}.{field.name}: static metadata is hashable, and the default {field.default!r} is not",
            code="default-refused",
            hint="use a tuple or a frozen dataclass",
        ) from error
    if (changeable := find_changeable(field.default)) is not None:
        raise SpecError(
            f"{cls}.{field.name}: expected a default that is compared by value and cannot change in place, since "
            f"compiled programs are found by it, got {describe_changeable(field.default, changeable)}",
            code="default-refused",
        )
    if is_no_choice(field.default, field.choices):
        raise SpecError(
            f"{cls}.{field.name}: expected a default among {show_choices(field.choices)}, got {field.default!r}",
            code="default-refused",
        )


# ---- numbers of a compiler -----------------------------------------------------------------------------------


def concrete(value: Any) -> Any:
    """Returns static metadata with Python's numbers in place of the symbols of a compiler, also in tuples.

    A compiler makes a symbol of a size, and of a number that an argument holds. Static metadata is a constant of a
    program, so the program is compiled for the symbol's value, and guards on it. A symbol without a value stays.
    """
    if type(value) is tuple:
        return tuple(map(concrete, value))
    number = _SYMBOLS.get(type(value))
    return value if number is None or _is_unknown(value) else number(value)


def _is_unknown(symbol: Any) -> bool:
    """Whether a symbol is a number that a trace cannot evaluate, and only the running program has."""
    # Imported here because it imports sympy; a symbol exists in a trace only, which has imported it.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(symbol))


_SYMBOLS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def as_number(value: Any) -> Any:
    """Returns a symbol as an object that is an instance of ``int`` or ``float``; another value unchanged.

    ``isinstance`` reads ``__class__`` if the type of an object is not a subclass. Operators compute with the symbol,
    and return another symbol. A symbol of a bool, which has two values, becomes the bool.
    """
    if type(value) is torch.SymBool:
        return concrete(value)
    number = _NUMBERS.get(type(value))
    return value if number is None else number(value.node)


def _number_class(symbol: type, number: type) -> type:
    def operator(name: str) -> Callable[..., Any]:
        return lambda self, *others: as_number(getattr(symbol, name)(symbol(self.node), *others))

    names = [n for n, f in vars(symbol).items() if n.startswith("__") and inspect.isfunction(f)]
    operators = {name: operator(name) for name in names if name != "__init__"}
    return type(symbol.__name__, (symbol,), {"__class__": property(lambda self: number), **operators})


_NUMBERS = {
    symbol: _number_class(symbol, number) for symbol, number in _SYMBOLS.items() if number is not bool
}
_SYMBOLS |= {_NUMBERS[symbol]: number for symbol, number in _SYMBOLS.items() if symbol in _NUMBERS}


def _find_symbol(value: Any) -> Any:
    if isinstance(value, tuple):
        return next((s for element in value if (s := _find_symbol(element)) is not None), None)
    return value if isinstance(value, tuple(_SYMBOLS)) else None


# ---- values that an annotation allows --------------------------------------------------------------------------


def is_unlike(value: object, allowed: tuple[type, ...]) -> bool:
    """Whether a value has none of these types; a number of numpy is accepted for any type."""
    return not isinstance(value, allowed) and not hasattr(value, "item")


def show_types(allowed: tuple[type, ...]) -> str:
    """Returns the types that an annotation names, as they are written."""
    return " | ".join(dict.fromkeys("None" if k is types.NoneType else k.__name__ for k in allowed))


def is_no_choice(value: object, choices: tuple[Any, ...]) -> bool:
    """Whether an annotation lists values, and a value is not among them.

    ``True`` is not ``1``; a member of an ``IntEnum`` or ``StrEnum`` is its value.
    """
    return bool(choices) and not any(
        c == value and (type(c) is type(value) or isinstance(c, enum.Enum)) for c in choices
    )


def show_choices(choices: tuple[Any, ...]) -> str:
    """Returns the values that an annotation lists, as they are written."""
    return ", ".join(f"{type(c).__name__}.{c.name}" if isinstance(c, enum.Enum) else repr(c) for c in choices)


# ---- objects that metadata may not hold ----------------------------------------------------------------------


def find_tensor(value: object) -> Tensor | None:
    """Returns the first tensor that a value of static metadata is or contains, or None."""
    if isinstance(value, Tensor):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, list | tuple | frozenset):
        return next((t for element in value if (t := find_tensor(element)) is not None), None)
    return None


def _find_unhashable(path: str, value: Any) -> tuple[str, Any]:
    """Returns the innermost element of metadata that has no hash, in tuples and frozen dataclasses, with its path."""
    elements: list[tuple[str, Any]] = []
    if isinstance(value, tuple):
        elements = [(f"{path}[{i}]", element) for i, element in enumerate(value)]
    elif dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        elements = [(f"{path}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    for element in elements:
        try:
            hash(element[1])
        except TypeError:
            return _find_unhashable(*element)
    return path, value


def find_changeable(value: object, met: tuple[object, ...] = ()) -> object:
    """Returns the first object in a value of static metadata that can change without a change of its hash, or None.

    Such objects are:

    - an instance of a user's class that inherits identity as equality,
    - an instance of a dataclass that hashes fields which can be set,
    - a module, optimizer or generator of PyTorch,
    - one of these, a list or a tensor that a function closes over or has as a default.

    A class that defines ``__eq__`` and ``__hash__`` itself is expected not to change the attributes that they read.

    Args:
        value: the metadata, or an element of it.
        met: the functions that contain this element.
    """
    if isinstance(value, _CHANGEABLE):
        return value
    if isinstance(value, type | enum.Enum) or any(value is f for f in met):
        return None
    elements = _elements(value)
    if elements is not None:
        met = (*met, value) if isinstance(value, types.FunctionType) else met
        return next(
            (changeable for element in elements if (changeable := find_changeable(element, met)) is not None),
            None,
        )
    return value if _has_identity(value) else None


def _elements(value: Any) -> Iterable[object] | None:
    """Returns the objects that a container, a function or a frozen dataclass holds; None for another object."""
    if isinstance(value, tuple | frozenset):
        return value
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.FunctionType):
        return _objects_of(value)
    if dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return (getattr(value, f.name) for f in dataclasses.fields(value))
    return None


def _objects_of(function: types.FunctionType) -> list[object]:
    """Returns the objects that an author's function closes over or has as defaults."""
    package = str(function.__globals__.get("__name__", "torch")).partition(".")[0]
    if package in _LIBRARIES or package in ("torch", "subclasses"):
        return []
    objects = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            objects.append(cell.cell_contents)
    return objects


def _has_identity(value: Any) -> bool:
    """Whether an object has attributes that can be set, and its equality does not compare them."""
    cls = type(value)
    if dataclasses.is_dataclass(cls) and cls.__dataclass_params__.unsafe_hash:  # type: ignore[attr-defined]
        return True
    has_attributes = hasattr(value, "__dict__") or any(getattr(c, "__slots__", ()) for c in cls.__mro__)
    is_constant = cls.__module__.partition(".")[0] in _LIBRARIES or isinstance(value, _CONSTANTS)
    return has_attributes and not is_constant and cls.__eq__ is object.__eq__


_CHANGEABLE = (Tensor, list, dict, set, bytearray, torch.nn.Module, torch.Generator)
# Objects of these libraries that are compared by identity are constants of a program. So are Python modules and ops.
_LIBRARIES = frozenset({*sys.stdlib_module_names, "numpy"})
_CONSTANTS = (types.ModuleType, OpOverload, OpOverloadPacket, HigherOrderOperator)


def describe_changeable(value: object, changeable: object) -> str:
    """Returns a phrase that describes a changeable object in metadata, with a hint."""
    cls = type(changeable)
    shown = (
        describe(changeable)
        if "\n" not in repr(changeable)
        else f"an object of {cls.__module__}.{cls.__qualname__}"
    )
    if isinstance(value, types.FunctionType):
        shown = f"the function {value.__qualname__}, which closes over {shown} or has it as a default"
    if isinstance(changeable, Tensor):
        return f"{shown}; declare the tensor with inner()"
    if isinstance(changeable, list | dict | set | bytearray):
        return f"{shown}; use a tuple, or numbers as metadata of their own"
    if isinstance(changeable, torch.nn.Module):
        hint = (
            "declare its numbers as metadata of their own, its tensors with inner(), and call a function of "
        )
        return f"{shown}; {hint}torch.nn.functional with them"
    if cls.__module__.partition(".")[0] == "torch":
        return f"{shown}; declare its numbers as metadata of their own, and its tensors with inner()"
    hint = f"make {cls.__name__} a @dataclass(frozen=True)"
    return f"{shown}; {hint}, or pass what is read from it as metadata of its own"


def describe(value: object) -> str:
    """Returns a value for an error message: its repr and type, for a tensor its dtype and shape."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if value is not None else "None"
