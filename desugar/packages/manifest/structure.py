"""Takes the arguments and the results of calls apart, into records of their structure and a list of leaves.

A structure is made of tuples, lists and dicts, and of containers that PyTorch's pytrees know (named tuples, the outputs
and caches of transformers). The latter are named in the manifest, and have to be known to whoever loads the package.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as private
from desugar.errors import PackageError, SignatureError
from desugar.packages.manifest.records import LeafOf, Left, Node, Parameter, Tree
from subclasses.errors import one_of

BUILTIN: dict[str, type] = {
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "size": torch.Size,
    "keywords": dict,  # **kwargs, whose order is the caller's
}
_BUILTIN = {cls: kind for kind, cls in BUILTIN.items() if kind != "keywords"}
_OF_CLASSES = ("registered", "named")  # kinds of containers whose class is recorded
_SCALARS = (
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout,
)  # fmt: skip

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.VAR_POSITIONAL: "rest",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "keywords",
}
_KINDS_BACK = {text: kind for kind, text in _KINDS.items()}

# --------------------------------------------------------------------------------------------- one structure


def flatten(value: Any, leaves: list[Any], where: str, also: tuple[type, ...] = ()) -> Tree:
    """Returns the structure of a value, and adds its leaves to a list.

    Args:
        value: The value.
        leaves: Receives the leaves.
        where: The expression of the value, for errors.
        also: Classes of objects that are leaves besides.

    Raises:
        PackageError: A part is neither a known container nor a leaf that a package can hold.
    """
    if type(value) in _BUILTIN:
        keys = tuple(value) if type(value) is dict else ()
        if not all(isinstance(key, str | int | bool) for key in keys):
            raise PackageError(f"{where}: expected a dict with str or int keys, got {keys!r:.80}")
        parts = [value[key] for key in keys] if type(value) is dict else list(value)
        names = keys if type(value) is dict else range(len(parts))
        children = [
            flatten(part, leaves, f"{where}[{name!r}]", also) for part, name in zip(parts, names, strict=True)
        ]
        return Node(_BUILTIN[type(value)], None, keys, tuple(children))
    if isinstance(value, (Tensor, *_SCALARS, *also)):
        leaves.append(value)
        return LeafOf(len(leaves) - 1)
    if _is_named_tuple(type(value)):
        children = [flatten(part, leaves, f"{where}[{n}]", also) for n, part in enumerate(value)]
        return Node("named", type(value), None, tuple(children))
    if (known := private.registered_container(type(value))) is not None:
        parts, context = known.flatten_fn(value)
        children = [flatten(part, leaves, f"{where}[{n}]", also) for n, part in enumerate(parts)]
        return Node("registered", type(value), context, tuple(children))
    raise PackageError(
        f"{where}: expected tensors, numbers, text, and containers of them, got a {type(value).__qualname__}; pass its "
        "tensors, or register it with torch.utils._pytree.register_pytree_node"
    )


def build(tree: Tree, leaves: Sequence[Any]) -> Any:
    """Returns the value of a structure with these leaves."""
    if isinstance(tree, LeafOf):
        return leaves[tree.index]
    parts = [build(child, leaves) for child in tree.children]
    match tree.kind:
        case "tuple":
            return tuple(parts)
        case "list":
            return parts
        case "size":
            return torch.Size(parts)
        case "named":
            return tree.cls(*parts)  # type: ignore[misc]
        case "dict" | "keywords":
            return dict(zip(tree.keys, parts, strict=True))
    return private.registered_container(tree.cls).unflatten_fn(parts, tree.keys)


def check_tree(tree: Tree, num_leaves: int) -> None:
    """Raises `PackageError` unless a structure of a file has known containers, and leaves that exist."""
    if isinstance(tree, LeafOf):
        if not 0 <= tree.index < num_leaves:
            raise PackageError(
                f"the manifest has {num_leaves} leaves, and a structure uses number {tree.index}"
            )
        return
    is_dict, is_registered = tree.kind in ("dict", "keywords"), tree.kind == "registered"
    if tree.kind not in (*BUILTIN, *_OF_CLASSES) or (tree.kind in _OF_CLASSES) != (tree.cls is not None):
        raise PackageError(f"the manifest has a container of the unknown kind {tree.kind!r}")
    if tree.kind == "named" and not _is_named_tuple(tree.cls):
        raise PackageError(f"{tree.cls.__qualname__} is no named tuple")  # type: ignore[union-attr]
    if is_registered and private.registered_container(tree.cls) is None:
        raise PackageError(f"{tree.cls.__qualname__} is no container that torch.utils._pytree knows")  # type: ignore[union-attr]
    keys = tree.keys if is_dict else ()
    if is_dict and (type(keys) is not tuple or len(keys) != len(tree.children) or not _are_keys(keys)):
        raise PackageError("the manifest has a dict whose keys are not those of its parts")
    for child in tree.children:
        check_tree(child, num_leaves)


def _are_keys(keys: tuple[Any, ...]) -> bool:
    return all(isinstance(key, str | int | bool) for key in keys)


def _is_named_tuple(cls: Any) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def part_names(tree: Node) -> Sequence[Any]:
    """Returns by what each part of a container is looked up: its keys, or its positions."""
    return tree.keys if tree.kind in ("dict", "keywords") else range(len(tree.children))  # type: ignore[no-any-return]


def paths_of(tree: Tree, where: str) -> Iterator[tuple[int, str]]:
    """Yields (leaf, expression) of the leaves in a structure; registered containers have no such expressions."""
    if isinstance(tree, LeafOf):
        yield tree.index, where
    else:
        for name, child in zip(part_names(tree), tree.children, strict=True):
            yield from paths_of(child, f"{where}[{name!r}]")


# --------------------------------------------------------------------------------------------------- a call


@dataclass(frozen=True, slots=True)
class Flattened:
    """The arguments of one call.

    Attributes:
        parameters: The parameters of the function.
        arguments: (parameter, structure) of each argument that was passed.
        leaves: Their leaves.
    """

    parameters: tuple[Parameter, ...]
    arguments: tuple[tuple[str, Tree], ...]
    leaves: list[Any]

    def arrange(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns arguments by name as those of a call."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.name not in arguments:
                continue
            value = arguments[parameter.name]
            if parameter.kind == "rest":
                args += value
            elif parameter.kind == "keywords":
                kwargs |= value
            elif parameter.kind == "keyword" or len(args) < self._position(parameter):
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return args, kwargs

    def _position(self, parameter: Parameter) -> int:
        """Returns the position of a parameter among those that may be passed by position."""
        return [one.name for one in self.parameters if one.kind in ("positional", "either")].index(
            parameter.name
        )

    def names(self) -> dict[int, str]:
        """Returns leaf -> its expression, over the parameters."""
        return {
            index: name for parameter, tree in self.arguments for index, name in paths_of(tree, parameter)
        }


def flatten_call(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Flattened:
    """Takes the arguments of a call of a function with a signature apart.

    Raises:
        TypeError: The function cannot be called so.
        PackageError: An argument is of a kind that packages cannot take.
    """
    given = signature.bind(*args, **kwargs).arguments
    free = signature.parameters.values()
    leaves: list[Any] = []
    arguments = [(p.name, _flatten_argument(p, given[p.name], leaves)) for p in free if p.name in given]
    return Flattened(tuple(map(_parameter, free)), tuple(arguments), leaves)


def _flatten_argument(parameter: inspect.Parameter, value: Any, leaves: list[Any]) -> Tree:
    tree = flatten(value, leaves, parameter.name)
    return replace(tree, kind="keywords") if parameter.kind is inspect.Parameter.VAR_KEYWORD else tree  # type: ignore[call-arg]


def _parameter(parameter: inspect.Parameter) -> Parameter:
    is_optional = parameter.default is not inspect.Parameter.empty
    is_constant = isinstance(parameter.default, _SCALARS)
    default = parameter.default if is_optional and is_constant else Left()
    return Parameter(parameter.name, _KINDS[parameter.kind], is_optional, default)


def signature_of(parameters: Sequence[Parameter]) -> inspect.Signature:
    """Returns the signature of a package's calls.

    Raises:
        PackageError: The parameters of a file are none that a function can have.
    """
    made = []
    for one in parameters:
        if one.kind not in _KINDS_BACK or not one.name.isidentifier():
            raise PackageError(f"the manifest has the parameter {one.name!r} of kind {one.kind!r}")
        default = one.default if one.is_optional else inspect.Parameter.empty
        made.append((one.name, _KINDS_BACK[one.kind], default))
    try:
        return inspect.Signature(
            [inspect.Parameter(name, kind, default=default) for name, kind, default in made]
        )
    except ValueError as error:
        raise PackageError(f"the manifest has parameters that no function can have: {error}") from error


def match(tree: Tree, value: Any, leaves: dict[int, Any], where: str) -> None:
    """Takes an argument apart as a structure says, and puts its leaves into `leaves`.

    Raises:
        SignatureError: The argument has another structure.
    """
    if isinstance(tree, LeafOf):
        leaves[tree.index] = value
        return
    cls = tree.cls or BUILTIN[tree.kind]
    if type(value) is not cls:
        raise SignatureError(where, f"{one_of(cls)}", f"{one_of(type(value))}")
    if tree.kind == "registered":
        parts, context = registered_parts(value)
        if context != tree.keys:
            raise SignatureError(where, f"{one_of(cls)} with {tree.keys!r:.80}", f"one with {context!r:.80}")
    elif tree.kind in ("dict", "keywords"):
        is_same = set(value) == set(tree.keys) if tree.kind == "keywords" else tuple(value) == tree.keys
        if not is_same:
            raise SignatureError(where, f"the keys {list(tree.keys)!r:.80}", f"{list(value)!r:.80}")
        parts = [value[key] for key in tree.keys]
    else:
        parts = list(value)
    if len(parts) != len(tree.children):
        raise SignatureError(where, f"{len(tree.children)} items", f"{len(parts)}")
    for child, part, name in zip(tree.children, parts, part_names(tree), strict=True):
        match(child, part, leaves, f"{where}[{name!r}]")


def registered_parts(value: Any) -> tuple[list[Any], Any]:
    """Returns the parts of a container that PyTorch's pytrees know, and what else they say of it."""
    parts, context = private.registered_container(type(value)).flatten_fn(value)
    return list(parts), context
