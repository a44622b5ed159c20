"""Replaces the guards of a large module by version checks of dictionaries and one C++ check of all parameters.

Dynamo guards a module with a tree of guards that follows every attribute that was read. For a module with hundreds of
parameters, this tree takes most of the time of a call. The tree reads nearly everything from dictionaries
(`module.__dict__`, `_modules`, `_parameters`, hooks), and CPython counts the changes of each dictionary. As long as no
dictionary has changed, each of its values is the same object as when the guards held. A call still checks what an
object can change in itself: the type of a module, and the dtype, device, size, stride and `requires_grad` of a
parameter, all of which one C++ call compares.

So a call checks two things: the guards of Dynamo's tree that these checks do not imply, and that nothing has changed.
If something has changed, Dynamo decides with all its guards, and the versions are recorded again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from desugar import _torch as private
from desugar.dynamo.guard_filter import is_generated
from desugar.ir.values import inner_names, is_wrapper

_MIN_PARAMETERS = 8  # with fewer, Dynamo's tree costs no more
_TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

# -------------------------------------------------------------------------------------- the state of a module


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The state of a module at a time when Dynamo's guards held.

    Attributes:
        modules, types: The module and all modules in it, and the type of each.
        dicts: The dictionaries of these modules and of their parameters that have entries.
        versions: A C++ check of the versions of `dicts`.
        empty: The dictionaries without entries; most dictionaries of hooks are empty.
        tensors: The parameters and their inner tensors.
        same_tensors: A C++ check of `tensors`.
        uses: A list of one int: the number of calls in which the state was unchanged.
    """

    modules: tuple[nn.Module, ...]
    types: list[type]
    dicts: tuple[dict[str, Any], ...]
    versions: Any
    empty: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    same_tensors: Any
    uses: list[int]

    @staticmethod
    def of(module: nn.Module) -> Unchanged:
        """Records the present state of a module."""
        modules = tuple(module.modules())
        tables = [vars(m)[name] for m in modules for name in (*_TABLES, *_HOOKS) if name in vars(m)]
        parameters = tuple({id(p): p for p in module.parameters()}.values())
        tensors = tuple({id(part): part for p in parameters for part in _with_inner(p)}.values())
        found = [*map(vars, modules), *tables, *map(vars, tensors)]
        dicts = tuple(entries for entries in found if entries)
        return Unchanged(
            modules,
            [type(m) for m in modules],
            dicts,
            private.dict_version_guards(dicts).check,
            tuple(entries for entries in found if not entries),
            tensors,
            private.TensorGuards(
                *tensors,
                dynamic_dims_sizes=[list(tensor.size()) for tensor in tensors],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
            ).check,
            [0],
        )

    def holds(self) -> bool:
        """Returns whether nothing has changed since, and counts the uses."""
        if (
            self.versions(self.dicts)
            and list(map(type, self.modules)) == self.types
            and not any(self.empty)
            and self.same_tensors(*self.tensors)
        ):
            self.uses[0] += 1
            return True
        return False


def _with_inner(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    for name in inner_names(tensor) if is_wrapper(tensor) else ():
        yield from _with_inner(getattr(tensor, name))


# -------------------------------------------------------------------------------------- the rest of Dynamo's tree

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
_OF_TENSORS = {"TENSOR_MATCH", "DIMENSION_DYNAMIC_MARKING_GUARD", "NO_TENSOR_ALIASING", "NO_HASATTR"}
_IMMUTABLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    tuple,
    torch.dtype,
    torch.device,
    torch.layout,
)

_CHILD = re.compile(r"\._modules\['[^']*'\]$")
_PART = re.compile(r"\._parameters\['[^']*'\](?:\.\w+)*$")  # a parameter, or an attribute of one
_TABLE = re.compile(rf"\.(?:{'|'.join(('__dict__', '_modules', '_parameters', *_HOOKS))})$")


def split_guards(root: Any, name: str, module: nn.Module) -> Any:
    """Copies Dynamo's guards without the guards on a module that :class:`Unchanged` implies.

    Args:
        root: Dynamo's root guard manager.
        name: The variable of the frame that holds the module.
        module: The module.

    Returns:
        A root guard manager; None if the module is small, if a parameter is also read from elsewhere, or if
        :class:`Unchanged` implies none of the guards.
    """
    if sum(1 for _ in module.parameters()) < _MIN_PARAMETERS:
        return None
    source = f"L[{name!r}]"
    top = next((node for node in root.get_child_managers() if node.get_source() == source), None)
    if top is None or _passes_parameters(root, source):
        return None
    found: dict[str, bool] = {}
    _collect_implied(top, source, found)
    implied = {name for name, is_implied in found.items() if is_implied}
    if not implied:
        return None
    return root.clone_manager(lambda node: node.get_source() not in implied or node.get_source() == source)


def _passes_parameters(root: Any, source: str) -> bool:
    """Returns whether guards outside the module's tree read a parameter.

    Only Dynamo's whole tree checks that such a parameter is not one of the module's.
    """
    others = (node for node in root.get_child_managers() if node.get_source() != source)
    return any(map(_holds_parameter, others))


def _holds_parameter(node: Any) -> bool:
    kind = node.get_type_of_guarded_value()
    if isinstance(kind, type) and issubclass(kind, nn.Parameter):
        return True
    return any(map(_holds_parameter, _children(node)))


def _children(node: Any) -> list[Any]:
    """Returns the child nodes of a guard manager, with the managers of keys and values of a dictionary."""
    pairs = node.get_key_value_managers().values() if hasattr(node, "get_key_value_managers") else ()
    return [*node.get_child_managers(), *(part for pair in pairs for part in pair if part is not None)]


def _collect_implied(node: Any, source: str, found: dict[str, bool], *, is_same: bool = True) -> bool:
    """Returns whether :class:`Unchanged` implies the guards of a node and of all nodes below it.

    Args:
        node: A guard manager.
        source: Dynamo's expression for the object that it guards.
        found: Receives the result for each source. If several nodes guard one source, all of them have to be implied.
        is_same: Whether the object stays the same as long as :class:`Unchanged` holds, because it is read from an
            object that :class:`Unchanged` checks. A list, an object of a user's class or a class may return another
            object the next time.
    """
    children = _children(node)
    below = [
        _collect_implied(
            child,
            child.get_source(),
            found,
            is_same=is_same and _stays_same(node, source, child.get_source()),
        )
        for child in children
    ]
    is_empty = not children and not node.get_leaf_guards()
    is_implied = is_empty or (
        is_same and all(below) and _own_guards_are_implied(node, source, bool(children))
    )
    found[source] = found.get(source, True) and is_implied
    return is_implied


def _stays_same(node: Any, source: str, read: str) -> bool:
    """Returns whether what is read from an object stays the same: it is a tuple, or :class:`Unchanged` checks it.

    Args:
        node: The guard manager of the object.
        source: Dynamo's expression for the object.
        read: Dynamo's expression for what is read from it.
    """
    kind = node.get_type_of_guarded_value()
    if not isinstance(kind, type):
        return False
    if issubclass(kind, nn.Module):
        return _is_module_inside(source)
    if issubclass(kind, dict):
        return bool(_TABLE.search(source))
    if is_generated(kind):
        return bool(_PART.search(source)) and read.removeprefix(f"{source}.") in _fields(kind)
    return kind is tuple


def _fields(cls: Any) -> set[str]:
    """Returns the names of the declared fields of a class, which an instance has in its `__dict__`."""
    spec = cls.__spec__
    return {*spec.attributes, *(field.name for field in (*spec.statics, *spec.dynamics))}


def _is_module_inside(source: str) -> bool:
    """Returns whether a source is the module itself or a registered submodule."""
    return bool(_CHILD.search(source)) or "." not in source


def _guard_types(node: Any) -> set[str]:
    return {type(guard).__name__ for guard in node.get_leaf_guards()}


def _own_guards_are_implied(node: Any, source: str, has_children: bool) -> bool:
    """Returns whether :class:`Unchanged` implies a node's own guards, by the type of the object that they guard."""
    kind, guards = node.get_type_of_guarded_value(), _guard_types(node)
    if not isinstance(kind, type):
        return False
    if issubclass(kind, nn.Module):
        return _is_module_inside(source) and guards <= _OF_IDENTITY
    if issubclass(kind, dict):
        return bool(_TABLE.search(source)) and guards <= _OF_IDENTITY | _OF_DICTS
    if kind in (Tensor, nn.Parameter):
        return bool(_PART.search(source)) and guards <= _OF_TENSORS | _OF_IDENTITY and not has_children
    if is_generated(kind):
        return bool(_PART.search(source)) and guards <= _OF_TENSORS | _OF_IDENTITY | _OF_LAYOUTS
    return issubclass(kind, _IMMUTABLE) and guards <= _OF_IDENTITY | _OF_DICTS


# ----------------------------------------------------------------------------------------------------- the guards

_MIN_USES = (
    20  # a module that changes after fewer calls gets a strike; recording its state costs about ten calls
)
_MAX_STRIKES = 3


@dataclass(frozen=True, slots=True)
class ModuleGuards:
    """The guards of one module in a frame.

    Attributes:
        name: The variable of the frame that holds the module.
        module: The module.
        rest: Dynamo's guards without those that `unchanged` implies.
        unchanged: The state of the module when its guards held.
        strikes: How often the module has changed soon after its state was recorded.
    """

    name: str
    module: nn.Module
    rest: Any
    unchanged: Unchanged
    strikes: int = 0

    @property
    def is_given_up(self) -> bool:
        """Whether the module changes too often for these guards to save time."""
        return self.strikes >= _MAX_STRIKES

    def hold(self) -> bool:
        """Returns whether the module is unchanged."""
        return self.unchanged.holds()


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
    if earlier is not None and earlier.unchanged.uses[0] < _MIN_USES:
        earlier = replace(earlier, strikes=earlier.strikes + 1)
        if earlier.is_given_up:
            return earlier
    for name in names:
        module = frame[name]
        if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
            continue
        rest = split_guards(root, name, module) if earlier is None else earlier.rest
        if rest is None:
            continue
        unchanged = Unchanged.of(module)
        if root.check(frame) and unchanged.holds():
            strikes = 0 if earlier is None else earlier.strikes
            return ModuleGuards(name, module, rest, unchanged, strikes)
    return earlier
