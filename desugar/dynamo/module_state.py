"""The state of a module that Dynamo's guards read, recorded so that two C++ calls detect a change.

Dynamo's guards read nearly everything of a module from dictionaries (`module.__dict__`, `_modules`, `_parameters`,
hooks), and CPython counts or reports the changes of each dictionary. As long as no dictionary has changed, each of its
values is the same object. The mutable state of these objects is recorded, too:

- The type of a module.
- The dtype, device, size, stride and `requires_grad` of a parameter, all of which one C++ call compares.
- The local tensor and the spec of a `DTensor`, the dictionary of the spec, and the attributes of its mesh. Placements
  and sizes in it are immutable.
- The code of a hook, the contents of its closure, and the attributes of a `functools.partial` in it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from desugar import _torch as torch_private
from desugar.ir.values import inner_names, is_wrapper
from subclasses._torch_distributed import SPEC
from subclasses.handwritten import LOCAL, is_dtensor, is_mesh

TABLES = ("_modules", "_parameters", "_buffers")
HOOKED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# How the hooks of `HOOKED` are called; without hooks nothing reads these.
HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
HOOKS = (*HOOKED, *HOOK_FLAGS)
OF_FUNCTION = ("__code__",)  # `__closure__` cannot be assigned
OF_CELL = ("cell_contents",)
OF_PARTIAL = ("func", "args", "keywords")  # `__setstate__` replaces them
OF_DTENSOR = (
    SPEC,
    LOCAL,
    "requires_grad",
)  # the check of all tensors ignores `requires_grad` under `no_grad`


class ClassAttribute(NamedTuple):
    """An attribute in the dictionary of a class."""

    cls: type
    name: str


@dataclass(frozen=True, slots=True)
class ModuleSnapshot:
    """The state of a module at a time when Dynamo's guards held.

    Attributes:
        same_owners: A C++ check of three facts: no dictionary has changed; objects have the same type and the same
            `__dict__`; attributes outside of a `__dict__` are the same objects.
        kept_alive: The values of these attributes, and these types; their ids are in the check.
        tensors: The parameters and their inner tensors, except each `DTensor`.
        same_tensors: A C++ check of `tensors`.
        uses: A list of one int: the number of calls in which the state was unchanged.
    """

    same_owners: Callable[[], bool]
    kept_alive: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    same_tensors: Any
    uses: list[int]

    @staticmethod
    def of(
        module: nn.Module, of_classes: Iterable[ClassAttribute] = (), *, unshare: bool = False
    ) -> ModuleSnapshot:
        """Records the present state of a module, and of some attributes of its classes.

        Args:
            module: The module.
            of_classes: The attributes of its classes.
            unshare: Whether an assignment of the same value must be no change; this makes dictionaries larger.
        """
        all_tensors = {id(part): part for p in module.parameters() for part in _with_inner(p)}.values()
        dtensors, tensors = (
            tuple(part for part in all_tensors if is_dtensor(part) is wanted) for wanted in (True, False)
        )
        read = _Read()
        for m in module.modules():
            read.add_module(m)
            if unshare:
                _unshare_keys(vars(m))
        for tensor in tensors:
            read.add_dict(vars(tensor))
        for tensor in dtensors:
            read.add_dtensor(tensor)
        for cls, name in of_classes:
            read.add_class_attribute(cls, name)
        objects, attributes = tuple(read.objects.values()), tuple(read.attributes.values())
        return ModuleSnapshot(
            torch_private.unchanged_guards(tuple(read.dicts.values()), objects, attributes),
            (
                *(getattr(owner, name) for owner, names in attributes for name in names),
                *map(type, objects),
                *(type(owner) for owner, _ in attributes),
            ),
            tensors,
            torch_private.TensorGuards(
                *tensors,
                dynamic_dims_sizes=[list(tensor.size()) for tensor in tensors],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
            ).check,
            [0],
        )

    def still_holds(self) -> bool:
        """Returns whether nothing has changed since, and counts the uses."""
        if self.same_owners() and self.same_tensors(*self.tensors):
            self.uses[0] += 1
            return True
        return False


def _with_inner(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    for name in inner_names(tensor) if is_wrapper(tensor) else ():
        yield from _with_inner(getattr(tensor, name))


@dataclass(frozen=True, slots=True)
class _Read:
    """The dictionaries, objects and attributes that determine the state of a module.

    Attributes:
        dicts: Dictionaries, by id.
        objects: Objects with all entries of their `__dict__`, by id.
        attributes: (object, names of attributes that are outside of its dictionary), by id.
    """

    dicts: dict[int, dict[Any, Any]] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)
    attributes: dict[int, tuple[Any, tuple[str, ...]]] = field(default_factory=dict)

    def add_module(self, module: nn.Module) -> None:
        own = self._add_object(module)
        flags = HOOK_FLAGS if any(map(own.get, HOOKED)) else ()
        for name in (*TABLES, *HOOKED, *flags):
            if name in own:
                self.add_dict(own[name])
        for name in HOOKS:
            self._add_values(own.get(name, {}).values())

    def add_dtensor(self, tensor: Any) -> None:
        spec, *_ = self._add_attributes(tensor, OF_DTENSOR)
        self._add_object(spec)
        self._add_mesh(spec.mesh)

    def add_class_attribute(self, cls: type, name: str) -> None:
        _, names = self.attributes.get(id(cls), (cls, ()))
        self._add_attributes(cls, (*names, name))

    def add_dict(self, entries: dict[Any, Any]) -> None:
        self.dicts[id(entries)] = entries

    def _add_mesh(self, mesh: Any) -> None:
        # Each use of a mesh as a key assigns its hash again, which CPython may count as a change of its `__dict__`.
        self._add_attributes(mesh, tuple(vars(mesh)))

    def _add_object(self, owner: Any) -> dict[str, Any]:
        """Adds an object with all entries of its `__dict__`, and returns these.

        Since Python 3.13 an object and its `__dict__` share the storage of the values. Python 3.13.0 counts no change
        that is made through the object. Assigning the same dictionary again gives it a storage of its own.
        """
        own = vars(owner)
        object.__setattr__(owner, "__dict__", own)
        self.objects[id(owner)] = owner
        return own

    def _add_attributes(self, owner: Any, names: tuple[str, ...]) -> list[Any]:
        """Adds attributes of an object, and returns their values."""
        values = [getattr(owner, name) for name in names]
        self.attributes[id(owner)] = owner, names
        return values

    def _add_value(self, value: Any) -> None:
        """Adds a hook or a value that a hook holds, with the values inside it; ignores an object of another type."""
        if id(value) in self.attributes or id(value) in self.dicts:
            return
        if isinstance(value, types.FunctionType):
            self._add_attributes(value, OF_FUNCTION)
            self._add_values(value.__closure__ or ())
        elif isinstance(value, types.CellType):
            with contextlib.suppress(ValueError):  # an empty cell
                self._add_values(self._add_attributes(value, OF_CELL))
        elif type(value) is functools.partial:
            self._add_values(self._add_attributes(value, OF_PARTIAL))
        elif type(value) is tuple:
            self._add_values(value)
        elif type(value) is dict:
            self.add_dict(value)
            self._add_values(value.values())
        elif is_mesh(value):
            self._add_mesh(value)

    def _add_values(self, values: Iterable[Any]) -> None:
        for value in values:
            self._add_value(value)


def _unshare_keys(own: dict[str, Any]) -> None:
    """Gives the `__dict__` of a module keys of its own, if it shares its keys with other modules of the class.

    Since Python 3.13 a dictionary with shared keys counts a change where a value is assigned again, as `module.train()`
    does. The size of such a dictionary does not include its keys.
    """
    if sys.getsizeof(own) < sys.getsizeof({**own}):
        own.update(map(dict.popitem, (own,)))  # one call in C, so that no thread reads `own` without the item
