"""The generated ``__tensor_flatten__`` of an adopted class: one table lookup by the attributes that its method reads.

The class's own method runs once for each kind of value, and its result is kept in a table. The generated method reads
the attributes that the class's own method was proved to read, and looks the result up. Without a proof, the class's own
method runs each time, and its context is interned too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from subclasses._torch import DisableTorchFunctionSubclass
from subclasses.adoption.contexts import freeze, intern_context
from subclasses.adoption.flatten_purity import How, Reads, find_reads, join
from subclasses.source_text.build import build_functions
from subclasses.source_text.emitter import Emitter

Flattened = tuple[list[str], Any]

# A table that holds more kinds of values is emptied. If this many values in a row prove nothing, the class's own method
# runs each time.
MAX_ENTRIES, MAX_UNPROVED = 512, 8


class Adoption:
    """The state of an adopted class.

    Attributes:
        cls: weakly, the class.
        flatten: the class's own `__tensor_flatten__`.
        contexts: the interned metadata.
        guards_identity: whether Dynamo's guard on the metadata compares interned metadata by identity.
        reads: the attributes that `flatten` was proved to read; None once `unproved` has reached its limit.
        lock: held while the table or the method is replaced.
        unproved: how many values in a row proved nothing.
        table: results of `flatten` by the attributes that it read.
        key: returns these attributes of a value.
    """

    def __init__(self, cls: Any, *, guards_identity: bool) -> None:
        self.cls = weakref.ref(cls)
        self.flatten: Callable[[Any], Flattened] = cls.__tensor_flatten__
        self.contexts: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self.guards_identity = guards_identity
        self.reads: Reads | None = {}
        self.lock = threading.Lock()
        self.unproved = 0
        self.table: dict[Any, tuple[tuple[str, ...], Any]] = {}
        self.key: Callable[[Any], Any] = lambda x: None

    def interned(self, flattened: Flattened) -> Flattened:
        """Returns names and context with the context interned."""
        names, context = flattened
        return [*names], intern_context(self.cls(), tuple(names), context)

    def learn(self, x: Tensor) -> Flattened:
        """Flattens a value that is not in the table, and adds it if its result is proved."""
        cls: Any = self.cls()
        if type(x) is not cls:
            return self.flatten(x)
        if self.reads is None:
            return self.interned(self.flatten(x))
        result, noted = find_reads(x, self.flatten)
        names, context = self.interned(result)
        with self.lock:
            self._add(x, noted, (tuple(names), context))
        return names, context

    def _add(self, x: Tensor, noted: Reads | None, flattened: tuple[tuple[str, ...], Any]) -> None:
        """Adds a result to the table, and generates the method anew if the result depends on further attributes."""
        reads = None if noted is None or self.reads is None else join(self.reads, noted)
        if reads is None:
            self.unproved += 1
            if self.unproved >= MAX_UNPROVED:
                self.reads = None
            return
        if reads != self.reads:
            self.reads, self.table = reads, {}
            self.cls().__tensor_flatten__ = self.build()  # type: ignore[union-attr]
        elif len(self.table) >= MAX_ENTRIES:
            self.table.clear()
        self.unproved = 0
        self.table[self.key(x)] = flattened

    def build(self) -> Callable[[Any], Flattened]:
        """Generates the method, and the function that computes the key of a value."""
        cls: Any = self.cls()
        e = emit_flatten(self)
        made = build_functions(e.source, e.namespace, filename=f"<subclasses {cls.__name__}>", owner=cls)
        self.key = made["key_of"]
        return made["__tensor_flatten__"]


def emit_flatten(adoption: Adoption) -> Emitter:
    """Emits the method, and the function that it inlines, from the attributes that the class's own method reads."""
    e = Emitter()
    e.reserve("__tensor_flatten__", "key_of", "_self", "_dict", "_names", "_context")
    table, learn = e.bind(adoption.table, "table"), e.bind(adoption.learn, "learn")
    e.writeline("def __tensor_flatten__(_self):")
    with e.indent():
        e.writeline(f"if _self.__class__ is not {e.bind(adoption.cls(), 'Class')}:")
        e.writeline(f"    return {learn}(_self)")
        e.writeline("try:")
        with e.indent():
            e.writeline(f"_names, _context = {table}[{_emit_key(e, adoption.reads or {})}]")
        e.writeline("except (AttributeError, KeyError, TypeError):")
        e.writeline(f"    return {learn}(_self)")
        e.writeline("return [*_names], _context")
    e.writeline()
    e.writeline("def key_of(_self):")
    with e.indent():
        e.writeline(f"return {_emit_key(e, adoption.reads or {})}")
    return e


def _emit_key(e: Emitter, reads: Reads) -> str:
    """Emits the lines that read a value; returns the expression of the key."""
    e.writeline("_dict = _self.__dict__")
    keys: list[str] = []
    properties = [name for name, read in reads.items() if read.how is How.PROPERTY]
    if properties:
        e.writeline(f"with {e.bind(DisableTorchFunctionSubclass, 'DisableTorchFunctionSubclass')}():")
        e.writeline("    " + "; ".join(f"_{name} = _self.{name}" for name in properties))
    for name, read in reads.items():
        match read.how:
            case How.NONE | How.TENSOR:
                keys.append(f"_dict[{name!r}].__class__")
            case How.VALUE:
                keys += [f"_dict[{name!r}].__class__", f"_dict[{name!r}]"]
            case How.ITEMS:
                items = f"_dict[{name!r}]"
                keys.append(f"({items}.__class__, *{items}, *map(type, {items}))")
            case How.PARTS:
                keys.append(f"{e.bind(freeze, 'freeze')}(_dict[{name!r}])")
            case How.PROPERTY:
                keys.append(f"_{name}")
            case How.CONSTANT:
                keys.append(f"_self.{name} is {e.bind(read.constant, name)}")
            case How.ABSENT:
                keys.append(f"{name!r} in _dict")
    return f"({', '.join(keys)}{',' * (len(keys) == 1)})"
