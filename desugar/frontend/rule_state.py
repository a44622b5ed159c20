"""The Python state that rules of declared classes read besides their arguments: globals, closures, settings.

Dynamo guards what the user's function reads. Rules and `materialize()` run below it, while the graph is traced, so that
what they read there is a constant of the program. This module finds it in their code: a global or a variable of a
closure that holds a number, a string, or a small tuple, list or dictionary of them, and an attribute with such a value
of a module, class or object. The generated wrapper compares it at each call. Names that the function itself assigns are
left out, since a counter of calls counts traces.
"""

from __future__ import annotations

import copy
import dis
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from desugar.user_code import is_library_file
from subclasses import TensorSubclass
from subclasses.dispatch.rules import all_rules
from subclasses.layout import Layout

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_MAX_ITEMS = 1024  # of a container, which is compared item by item
_MISSING = object()


@dataclass(frozen=True, slots=True)
class StateRead:
    """One value that a rule reads.

    Attributes:
        holder: The namespace of a module, class or object, or the cell of a closure.
        name: The name in the namespace; of a cell, that of the variable.
        value: The value when the program was traced.
    """

    holder: Mapping[str, Any] | types.CellType
    name: str
    value: Any

    def now(self) -> Any:
        """Returns the current value."""
        if not isinstance(self.holder, types.CellType):
            return self.holder.get(self.name, _MISSING)
        try:
            return self.holder.cell_contents
        except ValueError:  # the variable was deleted
            return _MISSING

    def again(self) -> StateRead:
        """Returns the read of the current value."""
        return _read(self.holder, self.name, self.now())

    def is_as_traced(self) -> bool:
        """Returns whether the value is still the traced one; `1` is neither `True` nor `1.0`, nor is `0.0` `-0.0`."""
        now = self.now()
        return now is self.value or (_is_plain(now) and repr(now) == repr(self.value))


def state_read_by_rules(graph: fx.GraphModule, leaves: Iterable[Any]) -> tuple[StateRead, ...]:
    """Returns the state that rules and methods of the declared classes in a Dynamo graph read."""
    classes: dict[type, None] = {}
    examples = [node.meta.get("example_value") for node in graph.graph.nodes]
    for value in (*leaves, *examples):
        _add_classes(value, classes)
    methods = {str(n.target) for n in graph.graph.nodes if n.op == "call_method"}
    found: dict[tuple[int, str], StateRead] = {}
    seen: set[Any] = set()
    for cls in classes:
        for function in _functions(cls, methods):
            for read in _reads_of(function, seen):
                found.setdefault((id(read.holder), read.name), read)
    return tuple(found.values())


def _add_classes(value: Any, classes: dict[type, None]) -> None:
    if isinstance(value, tuple | list):
        for part in value:
            _add_classes(part, classes)
    elif isinstance(value, TensorSubclass):
        classes.setdefault(type(value))
        for _, layout in value._layout.nested:
            _add_nested(layout, classes)


def _add_nested(layout: Layout, classes: dict[type, None]) -> None:
    if issubclass(layout.cls, TensorSubclass):
        classes.setdefault(layout.cls)
    for _, nested in layout.nested:
        _add_nested(nested, classes)


def _functions(cls: type, methods: Iterable[str]) -> Iterator[Callable[..., Any]]:
    """Yields the rules of a class, and its methods that run while a graph is traced."""
    yield from (rule for _, rule in all_rules(cls))
    for name in ("materialize", "outer", "wrap_cotangent", *methods):
        method = inspect.getattr_static(cls, name, None)
        if method is not None and method is not inspect.getattr_static(Tensor, name, None):
            yield getattr(cls, name)


def _reads_of(function: Any, seen: set[Any]) -> Iterator[StateRead]:
    """Yields what a function of the user's reads, and the functions that it calls by a global name."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, types.FunctionType) or function in seen:
        return
    seen.add(function)
    if is_library_file(function.__code__.co_filename):
        return
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name, attribute, is_variable in _names_in(function.__code__):
        if is_variable and name not in cells:
            continue  # a variable of the function itself, which a function inside of it reads
        holder: Any = cells[name] if is_variable else function.__globals__
        value = StateRead(holder, name, None).now()
        if isinstance(value, types.FunctionType | types.MethodType):
            yield from _reads_of(value, seen)
        elif _is_plain(value):
            yield _read(holder, name, value)
        elif attribute is not None:
            yield from _attribute_read(value, attribute, seen)


def _attribute_read(value: Any, attribute: str, seen: set[Any]) -> Iterator[StateRead]:
    namespace = getattr(value, "__dict__", {})
    if isinstance(value, types.ModuleType) and is_library_file(
        getattr(value, "__file__", None) or "<built in>"
    ):
        return
    read = namespace.get(attribute, _MISSING)
    if isinstance(read, types.FunctionType):
        yield from _reads_of(read, seen)
    elif _is_plain(read):
        yield _read(namespace, attribute, read)


def _read(holder: Any, name: str, value: Any) -> StateRead:
    """Makes a read; a list or dictionary is copied, since it may change in place."""
    return StateRead(holder, name, copy.deepcopy(value) if isinstance(value, list | dict) else value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return len(value) <= _MAX_ITEMS and all(_is_plain(part) for part in value)
    if isinstance(value, dict):
        return _is_plain([*value]) and _is_plain([*value.values()])
    return type(value) in _SCALARS


def _names_in(code: types.CodeType) -> list[tuple[str, str | None, bool]]:
    """Returns the names that code reads and never assigns.

    Each comes with the attribute that is read next, and whether it is a variable of a closure rather than a global.
    """
    reads: dict[tuple[str, str | None, bool], None] = {}
    assigned: set[str] = set()
    pending = [code]
    while pending:
        code = pending.pop()
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        steps = [*dis.get_instructions(code)]
        attributes = [s.argval if s.opname in ("LOAD_ATTR", "LOAD_METHOD") else None for s in steps]
        for step, attribute in zip(steps, [*attributes[1:], None], strict=True):
            if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
                reads[step.argval, attribute, step.opname == "LOAD_DEREF"] = None
            elif step.opname in ("STORE_GLOBAL", "STORE_DEREF"):
                assigned.add(step.argval)
    return [read for read in reads if read[0] not in assigned]
