"""Replaces the guards of Dynamo that other guards, or the recorded state of a large module, imply.

Dynamo guards a module with a tree of guards that follows every attribute that was read. For a module with hundreds of
parameters, or with hooks and `DTensor` parameters, this tree takes most of the time of a call. A few facts imply most
of these guards, and C++ compares the facts at once (`module_state`): no dictionary of the module has changed, and no
recorded object was mutated. A guard is implied under two conditions. The guarded object is the same as long as
:class:`ModuleSnapshot` holds, and the compared values are recorded in it or cannot change.

So a call leaves out the implied guards, checks these facts in their place, and checks all other guards. If a fact has
changed, Dynamo checks all its guards, and the state is recorded again.

Dynamo's setting ``use_recursive_dict_tags_for_guards`` has the same aim. It is off up to PyTorch 2.15, since it may
read freed dictionaries (https://github.com/pytorch/pytorch/pull/188103). Once it is on, it may replace the guards of
modules here.

Some guards on a wrapper call `__tensor_flatten__` in Python, twice per call. They are left out where another guard
checks the type, and the type determines the names of the inner tensors, or the metadata. Each removal has its reason in
this module; all other guards stay.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from desugar import _torch as torch_private
from desugar.dynamo.module_state import (
    HOOKS,
    OF_CELL,
    OF_DTENSOR,
    OF_FUNCTION,
    OF_PARTIAL,
    ClassAttribute,
    ModuleSnapshot,
)
from desugar.ir.values import is_wrapper
from subclasses import TensorSubclass
from subclasses._torch_distributed import DistributedTypes, distributed_types
from subclasses.adoption.contexts import guards_names
from subclasses.adoption.flatten_purity import flattens_to_constants
from subclasses.slow_paths import say_once

# ------------------------------------------------------------------------------ the recorded state of a type

# Guards whose result depends only on the identity of the object, if the object is immutable.
_OF_IDENTITY = {
    "TYPE_MATCH",
    "ID_MATCH",
    "EQUALS_MATCH",
    "NONE_MATCH",
    "TRUE_MATCH",
    "FALSE_MATCH",
    "NOT_NONE",
}
_OF_DICTS = {
    "DICT_CONTAINS",
    "DICT_LENGTH",
    "LENGTH_CHECK",
    "DICT_VERSION",
    "MAPPING_KEYS_CHECK",
    "MAPPING_KEYS_GUARD",
}
_OF_LAYOUTS = {"LAMBDA_GUARD"}  # on the metadata of a declared class: its layout, which is in its `__dict__`
# Guards on the values that a spec or a mesh holds: immutable objects in its `__dict__`.
_OF_SPECS = {"LAMBDA_GUARD", "FAKE_SCRIPT_TYPE_MATCH"}
_OF_TENSORS = {"TENSOR_MATCH", "DIMENSION_DYNAMIC_MARKING_GUARD", "NO_TENSOR_ALIASING", "NO_HASATTR"}
_ALIASING = "OBJECT_ALIASING"  # that two sources are one object
_IMMUTABLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    tuple,
    types.CodeType,
    torch.dtype,
    torch.device,
    torch.layout,
)

_ANYWHERE = re.compile("")
_MODULE = re.compile(r"^[^.]*$|\._modules\['[^']*'\]$")  # the module itself, or a registered submodule
_PARAMETER = re.compile(r"\._parameters\['[^']*'\](?:\.\w+)*$")  # a parameter, or an attribute of one
_HOOK = re.compile(rf"\.(?:{'|'.join(HOOKS)})\[")  # a hook, or a value that it holds
_MODULE_DICT = re.compile(
    rf"\.(?:{'|'.join(('__dict__', '_modules', '_parameters', *HOOKS))})$|{_HOOK.pattern}.*\.keywords$"
)
_MESH = re.compile(rf"{_PARAMETER.pattern}|{_HOOK.pattern}")


@dataclass(frozen=True, slots=True)
class _ImpliedGuards:
    """The guards on objects of one type that :class:`ModuleSnapshot` implies.

    Attributes:
        where: The sources of the objects that :class:`ModuleSnapshot` records, or that cannot change.
        guards: The implied guards on such an object.
        reads: The attributes that are the same objects as long as :class:`ModuleSnapshot` holds; None for all that
            Dynamo reads.
    """

    where: re.Pattern[str]
    guards: set[str]
    reads: Collection[str] | None = ()


_OF_TYPES = {
    types.FunctionType: _ImpliedGuards(_HOOK, _OF_IDENTITY, (*OF_FUNCTION, "__closure__")),
    types.CellType: _ImpliedGuards(_HOOK, _OF_IDENTITY, OF_CELL),
    functools.partial: _ImpliedGuards(_HOOK, _OF_IDENTITY, OF_PARTIAL),
    tuple: _ImpliedGuards(_ANYWHERE, _OF_IDENTITY | _OF_DICTS, None),
    Tensor: _ImpliedGuards(_PARAMETER, _OF_TENSORS | _OF_IDENTITY),
    nn.Parameter: _ImpliedGuards(_PARAMETER, _OF_TENSORS | _OF_IDENTITY),
}


def _implied_guards_on(node: Any, source: str) -> _ImpliedGuards | None:
    """Returns the guards that :class:`ModuleSnapshot` implies on the object of a node; None if it implies none."""
    kind = node.get_type_of_guarded_value()
    if kind is types.NoneType and source.endswith(".__dict__"):
        kind = (
            dict  # Dynamo keeps no value of a `__dict__` on Python 3.13.0, where it cannot rely on versions
        )
    implied = _implied_guards_on_type(kind) if isinstance(kind, type) else None
    return implied if implied is not None and implied.where.search(source) else None


def _implied_guards_on_type(kind: type) -> _ImpliedGuards | None:
    if kind in _OF_TYPES:
        return _OF_TYPES[kind]
    if issubclass(kind, nn.Module):
        return _ImpliedGuards(_MODULE, _OF_IDENTITY, None)
    if issubclass(kind, dict):
        return _ImpliedGuards(_MODULE_DICT, _OF_IDENTITY | _OF_DICTS, None)
    if is_generated(kind):
        return _ImpliedGuards(_PARAMETER, _OF_TENSORS | _OF_IDENTITY | _OF_LAYOUTS, _fields(kind))
    if issubclass(kind, _IMMUTABLE):
        return _ImpliedGuards(_ANYWHERE, _OF_IDENTITY | _OF_DICTS)
    distributed = distributed_types()
    return None if distributed is None else _of_distributed(kind, distributed)


def _of_distributed(kind: type, distributed: DistributedTypes) -> _ImpliedGuards | None:
    if kind is distributed.tensor:
        return _ImpliedGuards(_PARAMETER, _OF_IDENTITY, (*OF_DTENSOR, "device_mesh"))
    if kind is distributed.spec:
        return _ImpliedGuards(_PARAMETER, _OF_SPECS)
    if kind is distributed.mesh:
        return _ImpliedGuards(_MESH, _OF_IDENTITY | _OF_SPECS)
    return _ImpliedGuards(_ANYWHERE, _OF_IDENTITY) if kind in distributed.placements else None


def _fields(cls: Any) -> set[str]:
    """Returns the names of the declared fields of a class, which an instance has in its `__dict__`."""
    spec = cls.__spec__
    return {*spec.attributes, *(field.name for field in (*spec.statics, *spec.dynamics))}


# -------------------------------------------------------------------------------------- Dynamo's tree

_MIN_COST = 48  # of the implied guards; comparing the state of a smaller module takes as long as its guards
_COST_IN_PYTHON = 10  # of a guard in Python, in guards in C++
_CLASS_READ = re.compile(
    r"^dict\(type\((?P<owner>.*)\)\.__mro__\[(?P<base>\d+)\]\.__dict__\)\['(?P<name>\w+)'\]$"
)


@dataclass(frozen=True, slots=True)
class RemainingGuards:
    """Dynamo's guards without the guards that :class:`ModuleSnapshot` implies.

    Attributes:
        rest: A root guard manager.
        of_classes: The attributes of classes that `rest` does not compare.
    """

    rest: Any
    of_classes: tuple[ClassAttribute, ...]


def find_remaining_guards(root: Any, name: str, module: nn.Module) -> RemainingGuards | None:
    """Copies Dynamo's guards without the guards on a module that :class:`ModuleSnapshot` implies.

    Args:
        root: Dynamo's root guard manager.
        name: The variable of the frame that holds the module.
        module: The module.

    Returns:
        The other guards. None if guards outside the module also read a parameter, or if :class:`ModuleSnapshot` implies
        so few guards that its check takes as long.
    """
    source = f"L[{name!r}]"
    top = next((node for node in root.get_child_managers() if node.get_source() == source), None)
    if top is None or _passes_parameters(root, source):
        return None
    walk = _Walk(with_aliasing=True)
    walk.visit(top, source)
    implied = walk.implied()
    # An aliasing guard compares two sources. If only one of them is implied, the guard on the other would always hold.
    if any(_ALIASING in _guard_types(node) and node.get_source() not in implied for node in _all(root)):
        walk = _Walk(with_aliasing=False)
        walk.visit(top, source)
        implied = walk.implied()
    rest = root.clone_manager(lambda node: node.get_source() not in implied or node.get_source() == source)
    if _cost(root) - _cost(rest) < _MIN_COST:
        return None
    return RemainingGuards(rest, tuple(walk.of_classes))


def _passes_parameters(root: Any, source: str) -> bool:
    """Returns whether guards outside the module's tree read a parameter.

    Only Dynamo's whole tree checks that such a parameter is not one of the module's.
    """
    others = (node for node in root.get_child_managers() if node.get_source() != source)
    kinds = (node.get_type_of_guarded_value() for other in others for node in _all(other))
    return any(isinstance(kind, type) and issubclass(kind, nn.Parameter) for kind in kinds)


def _cost(root: Any) -> int:
    """Returns how long all guards of a tree take, in guards in C++."""
    kinds = (kind for node in _all(root) for kind in _guard_types(node))
    return sum(_COST_IN_PYTHON if kind == "LAMBDA_GUARD" else 1 for kind in kinds)


def _all(node: Any) -> Iterator[Any]:
    yield node
    for child in _children(node):
        yield from _all(child)


def _children(node: Any) -> list[Any]:
    """Returns the child nodes of a guard manager, with the managers of keys and values of a dictionary."""
    pairs = node.get_key_value_managers().values() if hasattr(node, "get_key_value_managers") else ()
    return [*node.get_child_managers(), *(part for pair in pairs for part in pair if part is not None)]


def _guard_types(node: Any) -> list[str]:
    return [type(guard).__name__ for guard in node.get_leaf_guards()]


@dataclass(slots=True)
class _Walk:
    """A walk over the guards of one module.

    Attributes:
        with_aliasing: Whether a guard that two sources are one object counts as implied; it is if both sources are.
        by_source: Whether the guards are implied, for each source. If several nodes guard one source, all of them have
            to be implied.
        of_classes: The attributes of classes that implied guards read.
    """

    with_aliasing: bool
    by_source: dict[str, bool] = field(default_factory=dict)
    of_classes: dict[ClassAttribute, None] = field(default_factory=dict)

    def implied(self) -> set[str]:
        """Returns the sources with implied guards."""
        return {source for source, is_implied in self.by_source.items() if is_implied}

    def visit(self, node: Any, source: str, *, is_same: bool = True) -> bool:
        """Returns whether :class:`ModuleSnapshot` implies the guards of a node and of all nodes below it.

        Args:
            node: A guard manager.
            source: Dynamo's expression for the object that it guards.
            is_same: Whether the object stays the same as long as :class:`ModuleSnapshot` holds, because it is read from
                an object that :class:`ModuleSnapshot` checks. A list, an object of a user's class or a class may return
                another object the next time.
        """
        recorded = _implied_guards_on(node, source) if is_same else None
        below = [self._visit_child(node, recorded, child) for child in _children(node)]
        guards = set(_guard_types(node))
        known = (
            set() if recorded is None else recorded.guards | ({_ALIASING} if self.with_aliasing else set())
        )
        is_implied = (not below and not guards) or (recorded is not None and all(below) and guards <= known)
        self.by_source[source] = self.by_source.get(source, True) and is_implied
        return is_implied

    def _visit_child(self, node: Any, recorded: _ImpliedGuards | None, child: Any) -> bool:
        read, kind = child.get_source(), node.get_type_of_guarded_value()
        if recorded is not None and read.startswith("type(") and issubclass(kind, nn.Module):
            return self._visit_class(kind, child, read)
        # A guard manager reads one attribute or item. Dynamo names a value of a dictionary by its key, and an attribute
        # of that value by the position of the key.
        is_same = recorded is not None and (
            recorded.reads is None or read.rpartition(".")[2] in recorded.reads
        )
        return self.visit(child, read, is_same=is_same)

    def _visit_class(self, cls: type, node: Any, source: str) -> bool:
        """Visits guards on the class of a module: they may read attributes, by their names in the bases.

        :class:`ModuleSnapshot` checks the type of the module, and compares each of these attributes once for all
        modules.
        """
        below = [self._visit_class(cls, child, child.get_source()) for child in _children(node)]
        read, guards = _CLASS_READ.match(source), _guard_types(node)
        if read is None or below:
            is_implied = all(below) and not guards
        else:
            is_implied = issubclass(node.get_type_of_guarded_value(), _IMMUTABLE) and _OF_IDENTITY.issuperset(
                guards
            )
        if read is not None and is_implied:
            self.of_classes[ClassAttribute(cls.__mro__[int(read["base"])], read["name"])] = None
        self.by_source[source] = self.by_source.get(source, True) and is_implied
        return is_implied


# ------------------------------------------------------------------------------------- the guards of a module

# A module that changes after fewer calls gets a strike. So few calls indicate a change from call to call, and not a
# user who switches modes or replaces a weight now and then. Recording the state takes the time that hundreds of calls
# save.
_MIN_USES = 20
_MAX_STRIKES = 3


@dataclass(frozen=True, slots=True)
class ModuleGuards:
    """The guards of one module in a frame.

    Attributes:
        name: The variable of the frame that holds the module.
        module: The module.
        remaining: Dynamo's guards without the guards that `snapshot` implies.
        snapshot: The state of the module when its guards held.
        strikes: How often the module has changed soon after its state was recorded.
    """

    name: str
    module: nn.Module
    remaining: RemainingGuards
    snapshot: ModuleSnapshot
    strikes: int = 0

    @property
    def is_given_up(self) -> bool:
        """Whether the module changes too often for these guards to save time."""
        return self.strikes >= _MAX_STRIKES


def note_module_guards(
    root: Any, frame: dict[str, Any], names: Sequence[str], earlier: ModuleGuards | None
) -> ModuleGuards | None:
    """Records the state of a frame's large module, if all of Dynamo's guards hold now.

    Args:
        root: Dynamo's root guard manager.
        frame: The variables of the frame.
        names: The variables that every call shares.
        earlier: The guards recorded before, which no longer hold.

    Returns:
        The new guards. If the guards do not hold, or no variable holds a large module, `earlier` or None. `earlier`
        gets a strike if the module changed after too few calls; after too many strikes the result is `earlier`.
    """
    if earlier is not None and earlier.snapshot.uses[0] < _MIN_USES:
        earlier = replace(earlier, strikes=earlier.strikes + 1)
        if earlier.is_given_up:
            say_once(
                f"calls of {type(earlier.module).__name__} check Dynamo's guards one by one, for the module changes "
                "between calls",
                "keep what changes in a tensor that is written in place, or pass it as an argument",
                "desugar",
            )
            return earlier
    for name in names:
        module = frame[name]
        if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
            continue
        remaining = find_remaining_guards(root, name, module) if earlier is None else earlier.remaining
        if remaining is None:
            continue
        strikes = 0 if earlier is None else earlier.strikes
        snapshot = ModuleSnapshot.of(module, remaining.of_classes, unshare=strikes > 0)
        if root.check(frame) and snapshot.still_holds():
            return ModuleGuards(name, module, remaining, snapshot, strikes)
    return earlier


# ---- guards that others imply ------------------------------------------------------------------------------

# Dynamo's options for the functions that `desugar.compile` compiles.
_DYNAMO_OPTIONS = {
    "record_runtime_overhead": False,  # otherwise Dynamo's code measures itself, which costs 1.5 µs a call
    "skip_nnmodule_hook_guards": False,  # guards detect hooks that are added to a module later
    "use_lamba_guard_for_object_aliasing": False,  # C++ compares whether two arguments are one object
}
_NAMES = ".__tensor_flatten__()[0]"  # Dynamo's suffix for a wrapper's list of inner tensor names


def dynamo_context(backend: Any, fullgraph: bool, dynamic: bool | None) -> Any:
    """Returns Dynamo's context, which compiles a function with a backend and with this guard filter."""
    context = torch_private.optimize(
        backend, nopython=fullgraph, dynamic=dynamic, guard_filter_fn=keep_guards
    )
    options = {
        name: value for name, value in _DYNAMO_OPTIONS.items() if hasattr(torch_private.dynamo_config, name)
    }
    context.enter_exit_hooks.append(torch_private.dynamo_config._make_closure_patcher(**options))
    return context


def keep_guards(entries: Sequence[Any]) -> list[bool]:
    """Returns, for each guard of a compilation, whether Dynamo checks it (Dynamo's `guard_filter_fn`)."""
    forget_guarded_objects(entries)
    wrappers = {entry.name: entry.value for entry in entries if entry.has_value and is_wrapper(entry.value)}
    return [not is_implied_by_others(entry, wrappers) for entry in entries]


def forget_guarded_objects(entries: Sequence[Any]) -> None:
    """Deletes the references of guards to the guarded objects, which Dynamo compares when it builds guards again.

    Dynamo builds the remaining guards a second time. A property then returns another tensor, which would differ.
    """
    for entry in entries:
        entry.orig_guard.obj_weakref = None


def is_implied_by_others(entry: Any, wrappers: dict[str, Tensor]) -> bool:
    """Returns whether other guards on the same wrapper imply a guard.

    Args:
        entry: The guard.
        wrappers: Dynamo's name -> tensor subclass instance.
    """
    if entry.guard_type == "TENSOR_SUBCLASS_METADATA_MATCH" and entry.name in wrappers:
        return has_fixed_metadata(wrappers[entry.name])
    if entry.guard_type == "EQUALS_MATCH" and entry.name.endswith(_NAMES):
        owner = wrappers.get(entry.name.removesuffix(_NAMES))
        return owner is not None and has_fixed_names(owner)
    return False


def has_fixed_metadata(wrapper: Tensor) -> bool:
    """Returns whether all instances of a wrapper's type have the same metadata; TYPE_MATCH guards the type.

    The metadata of a declared class is its layout: the static fields, which optional inner tensors are present, and
    the layouts of inner wrappers. So it is fixed for a class without static fields, without optional fields and without
    marked cotangents, where no inner tensor is a wrapper. The metadata of a handwritten class is fixed if the bytecode
    of `__tensor_flatten__` only builds constants.
    """
    cls: Any = type(wrapper)
    if not is_generated(cls):
        return flattens_to_constants(cls)
    spec, layout = cls.__spec__, wrapper._layout  # type: ignore[attr-defined]
    has_no_choice = not spec.statics and not any(field.optional for field in spec.inners)
    return has_no_choice and not any(is_wrapper(getattr(wrapper, name)) for name in layout.present)


def has_fixed_names(wrapper: Tensor) -> bool:
    """Returns whether the names of the inner tensors follow from the type and the metadata, which have other guards.

    The layout of a declared class, which is its metadata, holds the names. So does the metadata of an adopted class
    that is interned. The names of a handwritten class are fixed if the bytecode of `__tensor_flatten__` only builds
    constants.
    """
    cls: Any = type(wrapper)
    return is_generated(cls) or flattens_to_constants(cls) or guards_names(wrapper)


def is_generated(cls: type) -> bool:
    """Returns whether a class is a declared one with generated `__tensor_flatten__` and `__metadata_guard__`."""
    hooks = (getattr(cls, name, None) for name in ("__tensor_flatten__", "__metadata_guard__"))
    return issubclass(cls, TensorSubclass) and all(hasattr(hook, "__source__") for hook in hooks)
