"""Flattens the arguments and the results of calls into a structure and a list of leaves.

A structure consists of containers that PyTorch's pytrees register: tuples, lists, dicts, named tuples, the outputs and
caches of transformers. The caller of `load` passes the container classes that are not built into Python.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as torch_private
from desugar.errors import PackageError
from desugar.packages.manifest.records import Node, Parameter, Tree, Word

_SCALARS = (
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout,
)  # fmt: skip
_OF_SIZES = SimpleNamespace(
    flatten_fn=lambda size: (list(size), None), unflatten_fn=lambda parts, _: torch.Size(parts)
)

# Replaces a default that is not a constant; it marks an argument that a call leaves out.
LEFT = type("LeftOut", (), {"__repr__": lambda self: "..."})()

# --------------------------------------------------------------------------------------------- one structure


def container(cls: type) -> Any:
    """Returns the `flatten_fn` and `unflatten_fn` of a container class, as PyTorch's pytrees define them.

    Raises:
        PackageError: The class is not registered with PyTorch's pytrees.
    """
    if cls is torch.Size:
        return _OF_SIZES
    is_named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    registered = torch_private.registered_container(namedtuple if is_named_tuple else cls)
    if registered is None:
        raise PackageError(f"{cls.__qualname__} is not registered as a container in torch.utils._pytree")
    return registered


def flatten(value: Any, leaves: list[Any], where: str, also: tuple[type, ...] = ()) -> Tree:
    """Returns the structure of a value, and adds its leaves to a list.

    Args:
        value: The value.
        leaves: Receives the leaves.
        where: The expression of the value, for errors.
        also: Further classes whose objects are leaves.

    Raises:
        PackageError: A part is neither a known container nor a leaf that a package can hold.
    """
    if isinstance(value, (Tensor, *_SCALARS, *also)):
        leaves.append(value)
        return None
    try:
        parts, context = container(type(value)).flatten_fn(value)
    except PackageError as error:
        raise PackageError(
            f"{where}: expected tensors, numbers, text, and containers of them, got a {type(value).__qualname__}; pass "
            "its tensors, or register it with torch.utils._pytree.register_pytree_node"
        ) from error
    names = part_names(type(value), context, len(parts))
    children = [
        flatten(part, leaves, f"{where}[{name!r}]", also) for name, part in zip(names, parts, strict=True)
    ]
    return Node(type(value), context, tuple(children))


def part_names(cls: type, context: Any, count: int) -> Sequence[Any]:
    """Returns the keys of a dict, or the positions of the parts of another container."""
    return context if cls is dict else range(count)  # type: ignore[no-any-return]


def build(tree: Tree, leaves: Iterator[Any]) -> Any:
    """Rebuilds a value from its structure and its leaves."""
    if tree is None:
        return next(leaves)
    return container(tree.cls).unflatten_fn([build(child, leaves) for child in tree.children], tree.context)


def paths_of(tree: Tree, where: str) -> Iterator[str]:
    """Yields the expression of each leaf in a structure, for errors."""
    if tree is None:
        yield where
        return
    for name, child in zip(
        part_names(tree.cls, tree.context, len(tree.children)), tree.children, strict=True
    ):
        yield from paths_of(child, f"{where}[{name!r}]")


# --------------------------------------------------------------------------------------------------- a call


@dataclass(frozen=True, slots=True)
class Flattened:
    """The arguments of one call.

    Attributes:
        signature: The signature of the function.
        arguments: (parameter, structure) of each argument that was passed.
        leaves: Their leaves.
    """

    signature: inspect.Signature
    arguments: tuple[tuple[Word, Tree], ...]
    leaves: list[Any]


def names_of(arguments: Sequence[tuple[str, Tree]]) -> list[str]:
    """Returns the expression of each leaf of a call's arguments, over the parameters."""
    return [name for parameter, tree in arguments for name in paths_of(tree, parameter)]


def flatten_call(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Flattened:
    """Flattens the arguments of a call, by the function's signature; sorts the arguments in `**kwargs` by name.

    Raises:
        TypeError: The arguments do not match the signature.
        PackageError: A part of an argument is neither a known container nor a leaf that a package can hold.
    """
    given = signature.bind(*args, **kwargs).arguments
    leaves: list[Any] = []
    arguments = []
    for name, value in given.items():
        is_of_keywords = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        value = dict(sorted(value.items())) if is_of_keywords else value
        arguments.append((name, flatten(value, leaves, name)))
    return Flattened(signature, tuple(arguments), leaves)


def arrange(
    signature: inspect.Signature, arguments: Sequence[tuple[str, Tree]], leaves: Sequence[Any]
) -> inspect.BoundArguments:
    """Returns the arguments of a call with these leaves, as `args` and `kwargs`."""
    rest = iter(leaves)
    bound = {name: build(tree, rest) for name, tree in arguments}
    return inspect.BoundArguments(signature, bound)  # type: ignore[arg-type]


def parameters_of(signature: inspect.Signature) -> Iterator[Parameter]:
    """Yields the records of a signature's parameters."""
    for one in signature.parameters.values():
        default = None if one.default is one.empty else ()
        is_constant = default is not None and isinstance(one.default, _SCALARS)
        yield Parameter(one.name, int(one.kind), (one.default,) if is_constant else default)


def signature_of(parameters: Sequence[Parameter]) -> inspect.Signature:
    """Returns the signature of a package's calls.

    Raises:
        ValueError: The parameters in the file do not form a signature.
    """
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(
                one.name,
                one.kind,  # type: ignore[arg-type]
                default=empty if one.default is None else (*one.default, LEFT)[0],
            )
            for one in parameters
        ]
    )
