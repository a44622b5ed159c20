"""Arguments and results as optree sees them, in a namespace of our own.

There a `torch.Size` is taken apart too, for its ints may be symbols; so are namespaces (`types.SimpleNamespace`),
dataclasses that hold tensors, and classes that only PyTorch's own pytree knows, each registered when it is first met.
"""

from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn

from desugar import _torch as private

NAMESPACE = "desugar"

# The order of a dict's keys is part of its structure: a function may go through them.
_in_order = optree.dict_insertion_ordered(True, namespace=NAMESPACE)
_in_order.__enter__()  # for good

optree.register_pytree_node(
    torch.Size,
    lambda size: (tuple(size), None, None),
    lambda _, extents: torch.Size(extents),
    namespace=NAMESPACE,
)


def _names_in(value: Any) -> tuple[Iterable[Any], Any, Any]:
    return list(vars(value).values()), tuple(vars(value)), tuple(vars(value))


def _namespace(names: Any, children: Iterable[Any]) -> Any:
    return types.SimpleNamespace(**dict(zip(names, children, strict=True)))


_namespace_class: Any = types.SimpleNamespace
optree.register_pytree_node(_namespace_class, _names_in, _namespace, namespace=NAMESPACE)


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure of what a function is called with or returns; None is a leaf."""
    leaves, treespec = flatten_known(tree)
    while _register_new(leaves):
        leaves, treespec = flatten_known(tree)
    return leaves, treespec


def flatten_known(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The same, where every class has been met before."""
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def result_leaves(result: Any) -> list[Any]:
    """Leaves of what a function returned."""
    return flatten(result)[0]


def result_paths(result: Any) -> list[tuple[Any, ...]]:
    """Where each leaf stands: keys of dicts, positions, names of fields."""
    return optree.tree_paths(result, none_is_leaf=True, namespace=NAMESPACE)


# ------------------------------------------------------------------------------- classes that optree knows not

_lock = threading.Lock()
_registered: set[type] = set()


def _register_new(leaves: list[Any]) -> bool:
    """Registers the classes of leaves that can be taken apart; whether there was one."""
    found = False
    for leaf in leaves:
        cls = type(leaf)
        if isinstance(leaf, Tensor | nn.Module | type) or cls in _registered:
            continue
        functions = _known_to_torch(cls) or _as_dataclass(leaf)
        if functions is None:
            continue
        with _lock:
            if cls not in _registered:
                optree.register_pytree_node(cls, *functions, namespace=NAMESPACE)
                _registered.add(cls)
        found = True
    return found


Functions = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


@dataclass(frozen=True, slots=True)
class _Context:
    """What PyTorch's pytree keeps beside the children: comparable, and not always hashable."""

    content: Any

    def __hash__(self) -> int:
        return hash(type(self.content))


def _known_to_torch(cls: type) -> Functions | None:
    """How PyTorch's own pytree takes a class apart."""
    node = private.torch_pytree_nodes.get(cls)
    if node is None:
        return None

    def take_apart(value: Any) -> tuple[Iterable[Any], Any, None]:
        children, context = node.flatten_fn(value)
        return children, _Context(context), None

    return take_apart, lambda context, children: node.unflatten_fn(list(children), context.content)


def _as_dataclass(leaf: Any) -> Functions | None:
    """How to take dataclasses of a leaf's kind apart, if it is one and holds a tensor."""
    if not dataclasses.is_dataclass(leaf):
        return None
    cls = type(leaf)
    names = tuple(field.name for field in dataclasses.fields(leaf))
    if not any(
        isinstance(part, Tensor) for part in flatten([getattr(leaf, name, None) for name in names])[0]
    ):
        return None

    def take_apart(value: Any) -> tuple[Iterable[Any], Any, Any]:
        present = tuple(name for name in names if hasattr(value, name))
        more = {name: held for name, held in getattr(value, "__dict__", {}).items() if name not in names}
        return [getattr(value, name) for name in present], _Context((present, more)), present

    def build(context: _Context, children: Iterable[Any]) -> Any:
        value = object.__new__(cls)  # its __init__ may do more than keep what it is given
        present, more = context.content
        for name, held in (*zip(present, children, strict=True), *more.items()):
            object.__setattr__(value, name, held)  # frozen ones too
        return value

    return take_apart, build
