"""Describes the Python code of users' classes as text, for the key of a program that was traced through it.

The rules of a class, its methods, and all functions that they call run while a program is traced. Their code is
described as it is in memory, with the values of the globals and closures that it reads. If the code reads something
that cannot be described, the program is not stored. Examples are an object with state, a function from elsewhere, the
environment, and an import inside a function.
"""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from desugar.flatten.rule_state import is_user_code
from desugar.store.pickling import CannotStore
from subclasses import TensorSubclass
from subclasses.errors import one_of
from subclasses.methods.compile_cache import describe_value
from subclasses.rules.author_code import steps_of
from subclasses.rules.registry import all_rules

# Packages whose functions depend only on their arguments, on releases, and on settings in the key.
_KNOWN = (
    "torch", "subclasses", "desugar", "builtins", "math", "operator", "_operator", "typing", "dataclasses", "enum",
    "collections", "abc", "itertools", "numbers", "__future__",
)  # fmt: skip
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size,
              torch.memory_format, type(...))  # fmt: skip


def describe_code(classes: Iterable[type], values: Iterable[Any] = ()) -> list[str]:
    """Returns the text of all code of users' classes, in order.

    Args:
        classes: The classes of a program's tensors.
        values: Static metadata, whose classes may have methods.

    Raises:
        CannotStore: The code reads an object that cannot be described.
    """
    reader = _Reader()
    for cls in classes:
        reader.add_class(cls)
    for value in values:
        reader.add_value("static metadata", value)
    return sorted(reader.texts)


def root_of(module: str) -> str:
    """Returns the package of a module."""
    return module.partition(".")[0]


class _Reader:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self._seen: dict[int, Any] = {}

    def _is_new(self, thing: Any) -> bool:
        """Marks a class or function as read; returns whether it was not read before."""
        if id(thing) in self._seen:
            return False
        self._seen[id(thing)] = thing
        return True

    def add_class(self, cls: type) -> None:
        """Reads the rules, methods and attributes of a class and of its bases, unless they are not the user's."""
        if root_of(cls.__module__) in _KNOWN or not self._is_new(cls):
            return
        if isinstance(cls, type) and issubclass(cls, TensorSubclass):
            for key, rule in all_rules(cls):
                self.texts.append(
                    f"rule for {key if isinstance(key, str) else getattr(key, '__name__', key)}"
                )
                self.add_function(rule)
        for base in cls.__mro__:
            if root_of(base.__module__) not in _KNOWN:
                for name, member in vars(base).items():
                    self._add_member(f"{base.__qualname__}.{name}", name, member)

    def _add_member(self, read_by: str, name: str, member: Any) -> None:
        for part in _functions_of(member):
            if is_user_code(part.__code__.co_filename) and not _is_generated(part):
                self.add_function(part)
        is_generated = name.startswith("_") or name in ("implements", "torch")
        if not is_generated and isinstance(member, (*_CONSTANTS, tuple, list, dict, set, frozenset)):
            self.add_value(read_by, member)

    def add_function(self, function: Any) -> None:
        """Reads a function, and the functions that it calls."""
        while isinstance(function, functools.partial):
            for argument in (*function.args, *function.keywords.values()):
                self.add_value("an argument of a partial", argument)
            function = function.func
        if isinstance(function, types.MethodType):
            self.add_value("the owner of a method", function.__self__)
            function = function.__func__
        if not isinstance(function, types.FunctionType):
            if root_of(_home_of(function)) in _KNOWN:
                return
            raise CannotStore(f"the behaviour of {function!r} does not follow from its code")
        if not self._is_new(function):
            return
        if root_of(function.__globals__.get("__name__") or "") in _KNOWN:
            # A wrapper around a function of the user's; its class and its registration are in the key.
            self._add_wrapped(function)
            return
        if (inside := getattr(function, "__wrapped__", None)) is not None:
            self.add_function(inside)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add_value(f"a default of {function.__qualname__}", value)
        self._add_code(function, function.__code__)

    def _add_wrapped(self, function: types.FunctionType) -> None:
        """Reads the functions that a wrapper of this project closes over."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            inside = self._content_of(cell, f"{function.__qualname__} reads {name}")
            if isinstance(inside, types.FunctionType | types.MethodType | functools.partial):
                self.add_function(inside)

    def _content_of(self, cell: types.CellType, read_by: str) -> Any:
        try:
            return cell.cell_contents
        except ValueError as error:  # the variable is empty
            raise CannotStore(read_by) from error

    def _add_code(self, function: types.FunctionType, code: types.CodeType) -> None:
        self.texts.append(repr((function.__qualname__, code.co_code, code.co_names, code.co_varnames)))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        steps = steps_of(code)
        for number, step in enumerate(steps):
            read_by = f"{function.__qualname__} reads {step.name}"
            if step.opname == "IMPORT_NAME" and root_of(str(step.name)) not in _KNOWN:
                raise CannotStore(f"{function.__qualname__} imports {step.name}")
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                attributes = [s.name for s in steps[number + 1 : number + 9]]
                self._add_global(read_by, function.__globals__, step.name, attributes)
            elif step.opname == "LOAD_DEREF" and step.name in cells:
                self.add_value(read_by, self._content_of(cells[step.name], read_by))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_code(function, constant)
            else:
                self.texts.append(describe_value(constant))

    def _add_global(self, read_by: str, scope: dict[str, Any], name: str, attributes: list[Any]) -> None:
        if name not in scope and hasattr(builtins, name):
            return
        value = scope.get(name)
        while isinstance(value, types.ModuleType) and root_of(value.__name__) not in _KNOWN:
            attribute = attributes.pop(0) if attributes else None
            if not isinstance(attribute, str) or not hasattr(value, attribute):
                raise CannotStore(f"{read_by}, a module")
            value, read_by = getattr(value, attribute), f"{read_by}.{attribute}"
        if not isinstance(value, types.ModuleType):
            self.add_value(read_by, value)

    def add_value(self, read_by: str, value: Any) -> None:
        """Reads a value: a constant, a container, a function or a class.

        Raises:
            CannotStore: The value is an object whose state and code cannot be described.
        """
        if type(value) in _CONSTANTS:
            self.texts.append(f"{read_by}: {describe_value(value)}")
        elif isinstance(value, type):
            self.texts.append(f"{read_by}: {value.__module__}.{value.__qualname__}")
            self._add_type(read_by, value)
        elif isinstance(value, enum.Enum):
            self.texts.append(f"{read_by}: {value!r}")
            self._add_type(read_by, type(value))
        elif type(value) in (tuple, list, frozenset, set, dict):
            items = value.items() if isinstance(value, dict) else value
            for item in sorted(items, key=repr) if isinstance(value, set | frozenset) else items:
                self.add_value(read_by, item)
        elif callable(value) and _is_function(value):
            self.add_function(value)
        elif root_of(type(value).__module__) == "typing" or type(value) is types.GenericAlias:
            return
        elif (
            getattr(type(value), "__dataclass_params__", None) is not None
            and type(value).__dataclass_params__.frozen
        ):
            self._add_type(read_by, type(value))
            for name in type(value).__dataclass_fields__:
                self.add_value(f"{read_by}.{name}", getattr(value, name))
        else:
            raise CannotStore(f"{read_by}, {one_of(type(value))}")

    def _add_type(self, read_by: str, cls: type) -> None:
        if root_of(cls.__module__) in _KNOWN:
            return
        if not issubclass(cls, torch.Tensor | enum.Enum | BaseException) and not hasattr(
            cls, "__dataclass_params__"
        ):
            raise CannotStore(f"{read_by}, the class {cls.__qualname__}")
        if issubclass(cls, enum.Enum):
            self.texts += [repr(member.value) for member in cls]
        self.add_class(cls)


def _is_generated(function: types.FunctionType) -> bool:
    """Whether `dataclasses` wrote a method; its fields are in the description of each value."""
    name = function.__code__.co_name
    return function.__code__.co_filename == "<string>" and name.startswith("__") and hasattr(object, name)


def _home_of(function: Any) -> str:
    """Returns the module of a function in C; for a method of an object, the module of the object's class."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    if owner is not None and not isinstance(owner, type):
        return "" if type(owner).__module__ == "builtins" else type(owner).__module__
    return getattr(function, "__module__", None) or getattr(owner, "__module__", "builtins")


def _is_function(value: Any) -> bool:
    kinds = types.FunctionType | types.MethodType | types.BuiltinFunctionType | functools.partial
    return isinstance(value, kinds) or root_of(type(value).__module__) == "torch"


def _functions_of(member: Any) -> Iterator[types.FunctionType]:
    """Yields the functions of a member of a class."""
    is_property = isinstance(member, property)
    functions = (
        [member.fget, member.fset, member.fdel] if is_property else [getattr(member, "__func__", member)]
    )
    for part in functions:
        part = inspect.unwrap(part) if callable(part) else part
        if isinstance(part, types.FunctionType):
            yield part
