"""The Python state that rules of declared classes read besides their arguments: globals, closures, settings.

Dynamo guards the values that the user's function reads. Rules and `materialize()` run below the function, while the
graph is traced, so the values that they read are constants of the program. This module finds these values in the code
of the rules, and makes Dynamo guard them:

- a global or closure variable that holds a number, a string, an enum member, a dtype, or a small container of them,
- an attribute with such a value, of a module, class or object that a global or closure variable refers to, at any depth
  (``CONFIG.scaling.factor``),
- the identity of these modules, classes and objects,
- the `Constant` that an attribute of a class holds,
- the function that a global name refers to.

The search covers the functions that a rule calls by a global name or as a method of its class, too. It leaves out
values that the trace itself changes: a counter of calls counts traces.
"""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private
from desugar.user_code import is_users_file
from subclasses import TensorSubclass
from subclasses.layout import Layout
from subclasses.rules.author_code import steps_of
from subclasses.rules.registry import all_rules
from subclasses.spec.constants import Constant

_SCALARS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_CONTAINERS = (tuple, list, dict)
_MAX_ITEMS, _MAX_DEPTH = 256, 8  # of a container, which is compared item by item
_MISSING = object()

PREFIX = "__state_of_rules"  # of the global variable by which a guard finds a `RuleState`

# ------------------------------------------------------------------------------------------------ one value


@dataclass(frozen=True, slots=True)
class StateRead:
    """One value that a rule reads.

    Attributes:
        holder: The namespace of a module, the cell of a closure, or the object that has the attribute.
        name: The name in the namespace, or of the attribute.
        value: The value when the graph was traced; containers are copied, since they may change in place.
        kinds: The types of the items of a container.
    """

    holder: Any
    name: str
    value: Any
    kinds: tuple[type, ...] = ()

    @staticmethod
    def of(holder: Any, name: str, value: Any) -> StateRead:
        """Makes a read of the present value."""
        if isinstance(value, _CONTAINERS) and _is_plain(value):
            return StateRead(holder, name, copy.deepcopy(value), tuple(_kinds(value)))
        return StateRead(holder, name, value)

    def now(self) -> Any:
        """Returns the current value."""
        if isinstance(self.holder, types.CellType):
            try:
                return self.holder.cell_contents
            except ValueError:  # the variable was deleted
                return _MISSING
        if type(self.holder) is dict:
            return self.holder.get(self.name, _MISSING)
        return getattr(self.holder, self.name, _MISSING)

    def is_as_traced(self) -> bool:
        """Returns whether the value is still the traced one; `1` is neither `True` nor `1.0`, nor is `0.0` `-0.0`."""
        now, value = self.now(), self.value
        if now is value:
            return True  # a container, which may change in place, was copied
        if type(now) is not type(value):
            return False
        if self.kinds:
            return bool(now == value) and tuple(_kinds(now)) == self.kinds
        return isinstance(now, _SCALARS) and repr(now) == repr(value)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if not isinstance(value, _CONTAINERS):
        return isinstance(value, _SCALARS)
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return (
        depth < _MAX_DEPTH and len(items) <= _MAX_ITEMS and all(_is_plain(item, depth + 1) for item in items)
    )


def _kinds(value: Any) -> Iterator[type]:
    """Yields the types of the items of a container, and of the containers in it."""
    yield type(value)
    if isinstance(value, _CONTAINERS):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _kinds(item)


# -------------------------------------------------------------------------------------------------- guarding


class RuleState:
    """The values that the rules of one graph read."""

    def __init__(self, reads: Iterable[StateRead]) -> None:
        self.reads = tuple(reads)

    @property
    def is_unchanged(self) -> bool:
        """Whether all values equal the traced values; Dynamo's guard reads this property at each call."""
        return all(read.is_as_traced() for read in self.reads)

    def changed(self) -> list[StateRead]:
        """Returns the values that differ from the traced values."""
        return [read for read in self.reads if not read.is_as_traced()]


def guard_state(reads: Iterable[StateRead]) -> None:
    """Makes Dynamo's compilation in progress, if there is one, guard the values that rules read.

    Values that the trace changed are left out.
    """
    kept = [read for read in reads if read.is_as_traced()]
    if kept:
        private.guard_property(RuleState(kept), "is_unchanged", PREFIX)


# --------------------------------------------------------------------------------------------------- finding


def state_read_by_rules(graph: fx.GraphModule, leaves: Iterable[Any]) -> tuple[StateRead, ...]:
    """Returns the state that rules and methods of the declared classes in a Dynamo graph read."""
    search = _Search({str(node.target) for node in graph.graph.nodes if node.op == "call_method"})
    examples = [node.meta.get("example_value") for node in graph.graph.nodes]
    for value in (*leaves, *examples):
        search.add_value(value)
    return tuple(search.found.values())


class _Search:
    """Searches the code of classes and of the functions that they call.

    Attributes:
        methods: Names of methods that the graph calls.
        found: The reads, by their holder and name.
        seen: The functions and classes that were searched, by id.
    """

    def __init__(self, methods: set[str]) -> None:
        self.methods = methods
        self.found: dict[tuple[int, str], StateRead] = {}
        self.seen: dict[int, Any] = {}

    def add_value(self, value: Any) -> None:
        """Searches the classes of an argument or of an example of a result."""
        if isinstance(value, tuple | list):
            for part in value:
                self.add_value(part)
        elif isinstance(value, TensorSubclass):
            self.add_class(type(value))
            self._add_nested(value._layout)

    def _add_nested(self, layout: Layout) -> None:
        for _, nested in layout.nested:
            self.add_class(nested.cls)
            self._add_nested(nested)

    def add_class(self, cls: type) -> None:
        """Searches the rules of a declared class, and its methods that run while a graph is traced."""
        if id(cls) in self.seen or not issubclass(cls, TensorSubclass):
            return
        self.seen[id(cls)] = cls
        for _, rule in all_rules(cls):
            self.add_function(rule, cls)
        for name in ("materialize", "outer", "wrap_cotangent", *sorted(self.methods)):
            self._add_member(cls, name)

    def _add_member(self, cls: type, name: str, rest: tuple[str, ...] = ()) -> None:
        """Searches a method or property of the author; records a class attribute or an attribute of its value."""
        member = inspect.getattr_static(cls, name, _MISSING)
        if member is _MISSING or member is inspect.getattr_static(Tensor, name, None):
            return
        if _is_method(member):
            for base in cls.__mro__:  # `super()` may call the methods of bases
                method = vars(base).get(name)
                if _is_method(method):
                    function = method.fget if isinstance(method, property) else method
                    self.add_function(getattr(function, "__func__", function), cls)
        elif _is_plain(member) or isinstance(member, Constant):
            self._note(cls, name, member)
        elif rest and not hasattr(type(member), "__get__"):  # a descriptor returns another value
            self._add_attribute(cls, name, member, rest)

    def add_function(self, function: Any, cls: type | None) -> None:
        """Searches a function, the functions that it wraps, and the functions that it calls.

        Args:
            function: A function, a method, a partial, or an object with a `__call__`.
            cls: The class that it is a rule or method of.
        """
        if id(function) in self.seen:
            return
        self.seen[id(function)] = function
        if isinstance(function, functools.partial):
            return self.add_function(function.func, cls)
        if isinstance(function, types.MethodType):
            return self.add_function(function.__func__, cls)
        if not isinstance(function, types.FunctionType):
            call = inspect.getattr_static(type(function), "__call__", None)
            return self.add_function(call, cls) if isinstance(call, types.FunctionType) else None
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            self.add_function(wrapped, cls)
        if is_authors(function.__code__.co_filename):
            self._add_code(function, cls)
        return None

    def _add_code(self, function: types.FunctionType, cls: type | None) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, attributes, is_variable in _names_in(function.__code__):
            if name is None:
                if cls is not None:
                    self._add_member(cls, attributes[0], attributes[1:])
            elif not is_variable:
                self._add_name(function.__globals__, name, attributes)
            elif (
                name in cells
            ):  # and not a variable of the function itself, which a function inside of it reads
                self._add_name(cells[name], name, attributes)

    def _add_name(self, holder: Any, name: str, attributes: tuple[str, ...]) -> None:
        """Records the value of a global or variable, or an attribute of the value."""
        value = StateRead(holder, name, None).now()
        if _is_plain(value):
            return self._note(holder, name, value)
        if isinstance(value, type) and issubclass(value, TensorSubclass):
            self.add_class(value)
        if _is_librarys(value):
            return None
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.add_function(value, None)
            return self._note(holder, name, value) if is_authors(_file_of(value)) else None
        if attributes:
            self._add_attribute(holder, name, value, attributes)
        return None

    def _add_attribute(self, holder: Any, name: str, value: Any, attributes: tuple[str, ...]) -> bool:
        """Records an attribute of a value, or an attribute of that attribute; returns whether it recorded one."""
        attribute, *rest = attributes
        static = inspect.getattr_static(value, attribute, _MISSING)
        if isinstance(static, types.FunctionType | classmethod | staticmethod):
            self.add_function(getattr(static, "__func__", static), None)
            return False
        if isinstance(static, types.MemberDescriptorType):  # of a class with slots
            static = getattr(value, attribute, _MISSING)
        if static is _MISSING or isinstance(static, Tensor) or _is_librarys(static):
            return False
        if _is_plain(static) or isinstance(static, Constant):
            self._note(value, attribute, static)
        elif not rest or not self._add_attribute(value, attribute, static, tuple(rest)):
            return False
        self._note(holder, name, value)
        return True

    def _note(self, holder: Any, name: str, value: Any) -> None:
        self.found.setdefault((id(holder), name), StateRead.of(holder, name, value))


def _is_method(member: Any) -> bool:
    return isinstance(member, property | types.FunctionType | staticmethod | classmethod)


def _file_of(function: Any) -> str:
    function = getattr(function, "func", getattr(function, "__func__", function))
    return getattr(getattr(function, "__code__", None), "co_filename", "")


def _is_librarys(value: Any) -> bool:
    """Whether a value is a module that is not the author's, such as ``torch``."""
    file = getattr(value, "__file__", None) if isinstance(value, types.ModuleType) else None
    return file is not None and not is_authors(file)


def is_authors(filename: str) -> bool:
    """Returns whether a file is not a library's. `python -c` and `exec` name the file of their code `<string>`."""
    return filename == "<string>" or is_users_file(filename)  # of `python -c` and of `exec`


Name = tuple[str | None, tuple[str, ...], bool]


def _names_in(code: types.CodeType) -> list[Name]:
    """Returns the names that code reads and never assigns.

    Each entry holds the name, the chain of attributes that is read from its value, and whether it is a closure variable
    (else a global). For attributes of another expression, the name is None.
    """
    reads: dict[Name, None] = {}
    assigned: set[str] = set()
    pending = [code]
    while pending:
        code = pending.pop()
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        attributes: tuple[str, ...] = ()  # that are read from the value that the step pushes
        for step in reversed(steps_of(code)):
            if step.opname == "LOAD_ATTR":
                attributes = (step.name, *attributes)
                reads[None, attributes, False] = None
                continue
            if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
                reads[step.name, attributes, step.opname == "LOAD_DEREF"] = None
            elif step.opname in ("STORE_GLOBAL", "STORE_DEREF"):
                assigned.add(step.name)
            attributes = ()
    return [read for read in reads if read[0] not in assigned]
