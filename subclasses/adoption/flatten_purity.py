"""Proves that the result of a value's ``__tensor_flatten__`` depends only on recorded attributes.

The method runs once on a proxy for the value, which records each attribute that the method reads, and its value. Inner
tensors are proxies too, which only show whether they are present. If the method returns the same result as for the
value itself, the result depends on the recorded reads alone: equal reads imply an equal result. Code that reads
anything else (the sizes of an inner tensor, ``self.__dict__``, an object of another class) proves nothing, and is
called each time.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import DisableTorchFunctionSubclass
from subclasses.adoption.contexts import NotConstant, freeze, is_atom

# Properties of a tensor, in C++, that may be part of its metadata.
PROPERTIES = frozenset({"device", "dtype", "layout", "ndim", "requires_grad", "shape"})


# Instructions that read no argument, no global name and no attribute.
_CONSTANT = frozenset(
    {
        "RESUME",
        "NOP",
        "LOAD_CONST",
        "LOAD_SMALL_INT",
        "RETURN_CONST",
        "BUILD_LIST",
        "BUILD_TUPLE",
        "LIST_EXTEND",
        "RETURN_VALUE",
    }
)


@functools.cache
def flattens_to_constants(cls: type) -> bool:
    """Returns whether ``cls.__tensor_flatten__`` returns the same names and context for every instance.

    True if its bytecode only builds constants, as in ``return ["a", "b"], None``.
    """
    code = getattr(cls.__tensor_flatten__, "__code__", None)  # type: ignore[attr-defined]
    return code is not None and all(i.opname in _CONSTANT for i in dis.get_instructions(code))


class NotProved(Exception):
    """Raised if a method reads an object that is not recorded."""


class How(enum.IntEnum):
    """The property of an attribute that determines the result."""

    NONE = 0  # that it is None
    TENSOR = 1  # that it is there
    VALUE = 2  # a plain value
    ITEMS = 3  # a list or tuple of plain values
    PARTS = 4  # another container, a dataclass, a float
    PROPERTY = 5  # of the tensor, in C++
    CONSTANT = 6  # of the class
    ABSENT = 7  # a method of the class, or nothing: the value itself has no such attribute


@dataclass(frozen=True, slots=True)
class Read:
    """An attribute that was read.

    Attributes:
        how: the property of it that determines the result.
        constant: the object itself, for a constant of the class.
    """

    how: How
    constant: Any = None


Reads = dict[str, Read]


def find_reads(x: Tensor, method: Any) -> tuple[Any, Reads | None]:
    """Returns the result of a method without arguments, and the attributes that it read; None if not proved."""
    result = method(x)
    if reads_state(method):
        return result, None
    noted: Reads = {}
    # The method is code of another library, which may raise any error on a proxy. Then nothing is proved.
    with contextlib.suppress(Exception):
        if freeze(list(method(_Value(x, noted)))) == freeze(list(result)):
            return result, noted
    return result, None


def reads_state(function: Any, known: frozenset[Any] = frozenset()) -> bool:
    """Returns whether a function reads global names or closure cells that hold data, or calls one that does.

    Constants of torch, such as dtypes, do not count as data; attributes of other modules do.
    """
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or function in known:
        return code is None and not isinstance(function, types.BuiltinFunctionType | type)
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    values += [cell.cell_contents for cell in function.__closure__ or ()]
    return any(_is_state(value, known | {function}) for value in values)


def _is_state(value: Any, known: frozenset[Any]) -> bool:
    if isinstance(value, types.FunctionType):
        return reads_state(value, known)
    if isinstance(value, types.ModuleType):
        return value is not torch
    return not isinstance(value, type | types.BuiltinFunctionType | torch.dtype)


class _Value:
    """A proxy for a value, which records the attributes that are read."""

    def __init__(self, x: Tensor, noted: Reads) -> None:
        object.__setattr__(self, "_of", (x, noted))

    def __getattribute__(self, name: str) -> Any:
        x, noted = object.__getattribute__(self, "_of")
        cls = type(x)
        if name == "__class__":
            return cls
        if name.startswith("__") and not callable(getattr(cls, name, None)):
            raise NotProved(name)
        of_class = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
        is_own = name in x.__dict__ and not hasattr(of_class, "__set__")
        if is_own:
            noted[name] = _read_of(value := x.__dict__[name])
            return _Inner() if isinstance(value, Tensor) else value
        if of_class is None and not hasattr(cls, name):
            noted[name] = Read(How.ABSENT)
            raise AttributeError(name)
        return _of_class(self, x, name, of_class, noted)

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotProved(f"sets {name}")


def _of_class(stand_in: _Value, x: Tensor, name: str, attribute: Any, noted: Reads) -> Any:
    """Returns an attribute of the class, bound to the proxy."""
    match attribute:
        case types.FunctionType() | staticmethod() | classmethod() if reads_state(attribute):
            raise NotProved(name)
        case property(fget=getter) if reads_state(getter):
            raise NotProved(name)
        case types.FunctionType():
            noted[name] = Read(How.ABSENT)
            return types.MethodType(attribute, stand_in)
        case staticmethod() | classmethod():
            noted[name] = Read(How.ABSENT)
            return attribute.__get__(None, type(x))
        case property(fget=getter) if getter is not None:
            return getter(stand_in)
        case types.GetSetDescriptorType() if name in PROPERTIES:
            with DisableTorchFunctionSubclass():
                value = getattr(x, name)
            freeze(value)
            noted[name] = Read(How.PROPERTY)
            return value
    if hasattr(attribute, "__get__"):
        raise NotProved(name)
    noted[name] = Read(How.CONSTANT, attribute)
    return attribute


def _read_of(value: Any) -> Read:
    if value is None or isinstance(value, Tensor):
        return Read(How.NONE if value is None else How.TENSOR)
    try:
        freeze(value)
    except NotConstant:
        raise NotProved(f"{type(value).__name__} is not a plain value") from None
    if is_atom(value):
        return Read(How.VALUE)
    return Read(How.ITEMS if type(value) in (list, tuple) and all(map(is_atom, value)) else How.PARTS)


class _Inner:
    """A proxy for an inner tensor, which supports the comparison with None, and the test for a tensor."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Tensor
        raise NotProved(f"reads {name} of an inner tensor")

    def __bool__(self) -> bool:
        raise NotProved("the truth of an inner tensor")

    def __eq__(self, other: object) -> bool:
        raise NotProved("compares an inner tensor")

    __hash__ = None  # type: ignore[assignment]


def join(known: Reads, new: Reads) -> Reads | None:
    """Returns the joint reads of two runs, for each attribute the property that covers both.

    None if that is not proved: an attribute is missing on one of the values, or is a tensor on one of them only.
    """
    joined = dict(known)
    for name, read in new.items():
        old = joined.get(name, read)
        if old.how is not read.how:
            how = _join_how(*sorted((old.how, read.how)))
            read = None if how is None else Read(how)
        if read is None:
            return None
        joined[name] = read
    return joined


def _join_how(less: How, more: How) -> How | None:
    if less is How.NONE and more <= How.VALUE:
        return more
    return None if less is How.TENSOR or more > How.PARTS else How.PARTS
