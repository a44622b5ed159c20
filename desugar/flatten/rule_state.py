"""The Python state that rules of declared classes read besides their arguments: globals, closures, settings.

Dynamo guards the values that the user's function reads. Rules and `materialize()` run below the function, while the
graph is traced, so the values that they read are constants of the program. This module finds these values in the code
of the rules, and makes Dynamo guard them:

- a global or closure variable that holds a number, a string, an enum member, a dtype, or a small container of them,
- such an attribute of a module, class or object that a global or closure variable refers to,
- attributes of attributes, up to five deep (``CONFIG.scaling.factor`` is two deep),
- the identity of these modules, classes and objects,
- the `Constant` that an attribute of a class holds,
- the function that a global name refers to.

The search does not follow which object an attribute belongs to. It tries every name in the code of a rule on every
object that the code refers to. So where a rule reads ``A.scale`` and ``B.step``, an ``A.step`` that no rule reads is
guarded, too.

The search covers the functions that a rule calls by a global name or as a method of its class, too. It reads the code
of the *author* alone: the user who wrote the class or a function of it. Code of torch, of the standard library and of
this project is left out. A global that a rule increments is left out: it changes on every trace, so a guard on it
would never hold.
"""

from __future__ import annotations

import copy
import dis
import enum
import functools
import inspect
import types
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as torch_private
from desugar.user_code import is_users_file
from subclasses import TensorSubclass
from subclasses.layout import Layout
from subclasses.rules.registry import all_rules
from subclasses.spec.constants import Constant

_SCALARS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_CONTAINERS = (tuple, list, dict)
_MAX_ITEMS, _MAX_DEPTH = 256, 8  # of a container, which is compared item by item
_MAX_ATTRIBUTES = 5  # in a chain
_FUNCTIONS = types.FunctionType | types.MethodType | functools.partial
_STORES = ("STORE_GLOBAL", "STORE_DEREF")
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
        """Returns whether the value is still the traced one.

        `1` is neither `True` nor `1.0`, in containers, too. `0.0` is not `-0.0`, except in a container, where both
        are equal.
        """
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
    unchanged = [read for read in reads if read.is_as_traced()]
    if unchanged:
        torch_private.guard_property(RuleState(unchanged), "is_unchanged", PREFIX)


# --------------------------------------------------------------------------------------------------- finding


def state_read_by_rules(graph: fx.GraphModule, leaves: Iterable[Any]) -> tuple[StateRead, ...]:
    """Returns the state that rules and methods of the declared classes in a Dynamo graph read."""
    search = _Search({str(node.target) for node in graph.graph.nodes if node.op == "call_method"})
    examples = [node.meta.get("example_value") for node in graph.graph.nodes]
    for value in (*leaves, *examples):
        search.add_value(value)
    return tuple(search.reads.values())


class _Search:
    """Searches the code of classes and of the functions that they call.

    Attributes:
        methods: Names of methods that the graph calls.
        reads: The reads, by their holder and name.
        seen: The functions and classes that were searched, by id.
    """

    def __init__(self, methods: set[str]) -> None:
        self.methods = methods
        self.reads: dict[tuple[int, str], StateRead] = {}
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
            self._add_member(cls, name, frozenset())

    def _add_member(self, cls: type, name: str, names: frozenset[str]) -> None:
        """Searches a method or property of the author; records a class attribute or attributes of its value."""
        member = inspect.getattr_static(cls, name, _MISSING)
        if member is _MISSING or member is inspect.getattr_static(Tensor, name, None):
            return
        if _is_method(member):
            for base in cls.__mro__:  # `super()` may call the methods of bases
                method = vars(base).get(name)
                if _is_method(method):
                    function = method.fget if isinstance(method, property) else method
                    self.add_function(getattr(function, "__func__", function), cls)
        elif isinstance(member, Constant) or not hasattr(
            type(member), "__get__"
        ):  # another descriptor returns another value
            self._add_value(cls, name, member, names)

    def add_function(self, function: Any, cls: type | None) -> None:
        """Searches a function, the functions that it wraps, and the functions that it calls.

        Args:
            function: A function, a method, a partial, or an object with a `__call__`.
            cls: The class that it is a rule or method of.
        """
        if id(function) in self.seen:
            return
        self.seen[id(function)] = function
        if not isinstance(function, types.FunctionType):
            inside = getattr(
                function, "func", getattr(function, "__func__", None)
            )  # of a partial, of a method
            inside = inside or inspect.getattr_static(type(function), "__call__", None)
            return self.add_function(inside, cls) if isinstance(inside, _FUNCTIONS) else None
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            self.add_function(wrapped, cls)
        if not is_user_code(function.__code__.co_filename):
            return None
        names = frozenset(_names_in(function.__code__)).difference(_names_in(function.__code__, _STORES))
        for name in sorted(names) if cls is not None else ():  # the store's key has the reads in their order
            self._add_member(cls, name, names)  # type: ignore[arg-type]
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        scope = function.__globals__
        holders = [
            (cells[n], n) if n in cells else (scope, n) for n in sorted(names & (cells.keys() | scope.keys()))
        ]
        for holder, name in holders:
            self._add_value(holder, name, StateRead(holder, name, None).now(), names)
        return None

    def _add_value(self, holder: Any, name: str, value: Any, names: frozenset[str], depth: int = 0) -> bool:
        """Records a value and its attributes of some names, if one of them can be compared; returns whether one can.

        Args:
            holder: The namespace, cell or object that holds the value.
            name: Its name there.
            value: The value.
            names: All names in the code. The object that has the attribute is not followed, so each name is tried.
            depth: The number of attributes that lead to the value.
        """
        if isinstance(value, type) and issubclass(value, TensorSubclass):
            self.add_class(value)
        if isinstance(value, _FUNCTIONS | classmethod | staticmethod):
            self.add_function(getattr(value, "__func__", value), None)
            is_known = depth == 0 and not isinstance(holder, type) and is_user_code(_file_of(value))
        elif _is_plain(value) or isinstance(value, Constant):
            is_known = True
        elif (
            value is _MISSING
            or isinstance(value, Tensor)
            or _is_library_module(value)
            or depth >= _MAX_ATTRIBUTES
        ):
            is_known = False
        else:
            attributes = [(one, _static(value, one)) for one in sorted(names)]
            is_known = (
                sum(self._add_value(value, one, attribute, names, depth + 1) for one, attribute in attributes)
                > 0
            )
        if is_known:
            self.reads.setdefault((id(holder), name), StateRead.of(holder, name, value))
        return is_known


def _is_method(member: Any) -> bool:
    return isinstance(member, property | types.FunctionType | staticmethod | classmethod)


def _file_of(function: Any) -> str:
    function = getattr(function, "func", getattr(function, "__func__", function))
    return getattr(getattr(function, "__code__", None), "co_filename", "")


def _is_library_module(value: Any) -> bool:
    """Whether a value is a module that the author did not write, such as ``torch``."""
    file = getattr(value, "__file__", None) if isinstance(value, types.ModuleType) else None
    return file is not None and not is_user_code(file)


def is_user_code(filename: str) -> bool:
    """Returns whether code of this file is the author's. `python -c` and `exec` name their file `<string>`."""
    return filename == "<string>" or is_users_file(filename)


def _static(owner: Any, name: str) -> Any:
    """Returns an attribute without calling a getter, but for the getter of a slot."""
    attribute = inspect.getattr_static(owner, name, _MISSING)
    return getattr(owner, name, _MISSING) if isinstance(attribute, types.MemberDescriptorType) else attribute


def _names_in(code: types.CodeType, opnames: Collection[str] = ()) -> Iterator[str]:
    """Yields the names of globals, attributes and closure variables in code, and in the functions inside of it.

    Args:
        code: The code.
        opnames: The instructions whose names are wanted; empty for all names.
    """
    steps = (step.argval for step in dis.get_instructions(code) if step.opname in opnames)
    yield from steps if opnames else (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant, opnames)
