"""Guards of a whole module by what they read: versions of dictionaries, and one look at all parameters.

Dynamo guards a module by a tree that follows every attribute that was read: at hundreds of parameters it outweighs all
else in a call. Nearly everything in that tree is read from dictionaries (`module.__dict__`, `_modules`, `_parameters`,
hooks), and CPython counts the changes of each dictionary. While none has changed, each entry is the same object as when
the guards held. What an object can change in itself is still looked at: the type of a module, and the dtype, device,
size, stride and `requires_grad` of a parameter, which one call in C++ compares.

So a call checks Dynamo's guards without the part that is settled so, and that nothing has changed. If something has,
Dynamo decides with all its guards, and the versions are noted anew.
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

_FEWEST = 8  # parameters; below, Dynamo's tree is as cheap
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

# ------------------------------------------------------------------------------------------ what has not changed


@dataclass(frozen=True, slots=True)
class Unchanged:
    """A module as it was when Dynamo's guards held.

    Attributes:
        modules, types: All modules in it, and the type of each.
        dicts: Their dictionaries, and those of their parameters, that hold something.
        versions: A C++ check of the dictionaries' versions.
        empty: The dictionaries that hold nothing; most hooks do.
        tensors: The parameters, and what is inside of them.
        same_tensors: A C++ check of these.
        uses: One number: how many calls it was of use to.
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
        """The module as it is now."""
        modules = tuple(module.modules())
        tables = [vars(m)[name] for m in modules for name in (*_TABLES, *_HOOKS) if name in vars(m)]
        parameters = tuple({id(p): p for p in module.parameters()}.values())
        tensors = tuple({id(part): part for p in parameters for part in _with_parts(p)}.values())
        found = [*map(vars, modules), *tables, *map(vars, tensors)]
        dicts = tuple(one for one in found if one)
        return Unchanged(
            modules,
            [type(m) for m in modules],
            dicts,
            private.dict_version_guards(dicts).check,
            tuple(one for one in found if not one),
            tensors,
            private.TensorGuards(
                *tensors,
                dynamic_dims_sizes=[list(tensor.size()) for tensor in tensors],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
            ).check,
            [0],
        )

    def holds(self) -> bool:
        """Whether all of it is as it was."""
        if (
            self.versions(self.dicts)
            and list(map(type, self.modules)) == self.types
            and not any(self.empty)
            and self.same_tensors(*self.tensors)
        ):
            self.uses[0] += 1
            return True
        return False


def _with_parts(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    for name in inner_names(tensor)[0] if is_wrapper(tensor) else ():
        yield from _with_parts(getattr(tensor, name))


# -------------------------------------------------------------------------------------- the rest of Dynamo's tree

# Guards whose answer is settled by which object it is, as long as that object cannot change.
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
_OF_LAYOUTS = {"LAMBDA_GUARD"}  # the metadata of a declared class: its layout, which stands in its dictionary
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
_PART = re.compile(r"\._parameters\['[^']*'\](?:\.\w+)*$")  # a parameter, or what a field of it holds
_TABLE = re.compile(rf"\.(?:{'|'.join(('__dict__', '_modules', '_parameters', *_HOOKS))})$")


def split_guards(root: Any, name: str, module: nn.Module) -> Any:
    """Dynamo's guards without those of a module that :class:`Unchanged` settles.

    Args:
        root: Dynamo's root guard manager.
        name: The variable of the frame that holds the module.
        module: The module.

    Returns:
        A root guard manager; None if the module is small, or nothing would be gained.
    """
    if sum(1 for _ in module.parameters()) < _FEWEST:
        return None
    source = f"L[{name!r}]"
    top = next((node for node in root.get_child_managers() if node.get_source() == source), None)
    if top is None or _passes_parameters(root, source):
        return None
    found: dict[str, bool] = {}
    _collect_settled(top, source, found)
    settled = {name for name, is_settled in found.items() if is_settled}
    if not settled:
        return None
    return root.clone_manager(lambda node: node.get_source() not in settled or node.get_source() == source)


def _passes_parameters(root: Any, source: str) -> bool:
    """Whether a parameter comes in by another way: only Dynamo's whole tree knows that it is none of the module's."""
    others = (node for node in root.get_child_managers() if node.get_source() != source)
    return any(map(_holds_parameter, others))


def _holds_parameter(node: Any) -> bool:
    kind = node.get_type_of_guarded_value()
    if isinstance(kind, type) and issubclass(kind, nn.Parameter):
        return True
    return any(map(_holds_parameter, _children(node)))


def _children(node: Any) -> list[Any]:
    """The nodes below one; where the order of a dictionary is guarded, those of its keys and values stand apart."""
    pairs = node.get_key_value_managers().values() if hasattr(node, "get_key_value_managers") else ()
    return [*node.get_child_managers(), *(part for pair in pairs for part in pair if part is not None)]


def _collect_settled(node: Any, source: str, found: dict[str, bool], *, is_same: bool = True) -> bool:
    """Whether a node is settled with all below.

    Args:
        node: A guard manager.
        source: What it is about.
        found: Takes the answer for each source; where several nodes are about one, all have to be settled.
        is_same: It is the same object as long as :class:`Unchanged` holds, for it is read from what that looks at. What
            a list, an object of the user's or a class holds may be another one the next time.
    """
    children = _children(node)
    below = [
        _collect_settled(
            child, child.get_source(), found, is_same=is_same and _stays(node, source, child.get_source())
        )
        for child in children
    ]
    is_empty = not children and not node.get_leaf_guards()
    is_settled = is_empty or (is_same and all(below) and _is_settled_itself(node, source, bool(children)))
    found[source] = found.get(source, True) and is_settled
    return is_settled


def _stays(node: Any, source: str, read: str) -> bool:
    """Whether what is read from an object stays the same: :class:`Unchanged` looks there, or it cannot change.

    Args:
        node: Of the object.
        source: The object.
        read: What is read from it.
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
    """What stands in the dictionary of a value of a declared class, by its declaration."""
    spec = cls.__spec__
    return {*spec.inner_names, *(field.name for field in (*spec.statics, *spec.dynamics))}


def _is_module_inside(source: str) -> bool:
    """Whether a source is that of the module itself, or of one that it has registered."""
    return bool(_CHILD.search(source)) or "." not in source


def _kinds(node: Any) -> set[str]:
    return {type(guard).__name__ for guard in node.get_leaf_guards()}


def _is_settled_itself(node: Any, source: str, has_children: bool) -> bool:
    kind, guards = node.get_type_of_guarded_value(), _kinds(node)
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


# ------------------------------------------------------------------------------------------------------ together

_LEAST_USES = 20  # calls between one noting and the next, which costs as much as some ten calls
_STRIKES = 3


@dataclass(frozen=True, slots=True)
class ModuleGuards:
    """The guards of one module in a frame.

    Attributes:
        name: The variable of the frame that holds it.
        module: The module.
        rest: Dynamo's guards without the module's.
        unchanged: What the module's guards read, as it was when they held.
        strikes: How often the module has changed soon after.
    """

    name: str
    module: nn.Module
    rest: Any
    unchanged: Unchanged
    strikes: int = 0

    @property
    def is_given_up(self) -> bool:
        """Whether the module changes too often for this to be of use."""
        return self.strikes >= _STRIKES

    def hold(self) -> bool:
        """Whether nothing has changed that the module's guards read."""
        return self.unchanged.holds()


def note_module_guards(
    root: Any, frame: dict[str, Any], names: Sequence[str], earlier: ModuleGuards | None
) -> ModuleGuards | None:
    """Notes what the guards of a frame's module read, if all guards hold now.

    Args:
        root: Dynamo's root guard manager.
        frame: The variables of the frame.
        names: Those that are the same in every call.
        earlier: What was noted before, and holds no more.

    Returns:
        None where there is no large module among them, or the guards do not hold; what was noted before, with a
        strike, where it has changed too soon.
    """
    if earlier is not None and earlier.unchanged.uses[0] < _LEAST_USES:
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
