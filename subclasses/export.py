"""``torch.export`` of functions over declared classes: values as pytree nodes of their inner tensors.

The graph of an ``ExportedProgram`` takes and returns plain tensors, and a pytree describes its arguments. In PyTorch a
wrapper is a leaf of that pytree. Here a node replaces it, whose leaves are the inner tensors, so the layout is part of
the pytree: a program refuses values of another layout, and ``torch.export.save`` writes the layout to the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from subclasses._torch import (
    SequenceKey,
    dims_marked_dynamic,
    mark_dim_dynamic,
    register_pytree_node,
    tree_map,
)
from subclasses._torch_tracing import is_compiling_here
from subclasses.base import TensorSubclass, descendants
from subclasses.errors import full_name, one_of
from subclasses.spec.collect import SubclassSpec

__all__ = ["Flattened", "InnerTensors", "dynamic_shapes", "flatten", "unflatten"]

# The data of a node besides its tensors.
Kind = tuple[Any, tuple[str, ...], tuple[Any, ...]]

# ---- the node ----------------------------------------------------------------------------------------------


class InnerTensors:
    """A pytree node that represents a value of a declared class.

    Attributes:
        tensors: the inner tensors that are present, in order of declaration; then a tensor ``[n, 0]`` for each dynamic
            int ``n``. An inner tensor of a declared class is a node itself.
        kind: the class, the names of the fields of these inner tensors, and the static metadata.
    """

    __slots__ = ("kind", "tensors")

    def __init__(self, tensors: Iterable[Any], kind: Kind) -> None:
        self.tensors, self.kind = tuple(tensors), kind

    def __repr__(self) -> str:
        return f"InnerTensors({self.kind[0].__name__}, {len(self.tensors)} tensors)"


def flatten(tree: Any) -> Any:
    """Replaces each value of a declared class in a pytree by an :class:`InnerTensors` node.

    Args:
        tree: a value, or lists, tuples, dicts and other pytrees of values. All other leaves stay the same.
    """
    return _map(_flatten, tree, TensorSubclass)


def unflatten(tree: Any) -> Any:
    """Replaces each :class:`InnerTensors` node in a pytree by the value that it represents."""
    return _map(_unflatten, tree, InnerTensors)


def _map(change: Callable[[Any], Any], tree: Any, cls: Any, other: Callable[[Any], Any] = lambda x: x) -> Any:
    """Returns a pytree with ``change(x)`` in place of each ``x`` of a class, and ``other(x)`` for all other leaves."""

    def change_leaf(x: Any) -> Any:
        return change(x) if isinstance(x, cls) else other(x)

    # Dynamo traces this function, and not optree's.
    return tree_map(change_leaf, tree, is_leaf=lambda x: isinstance(x, cls))


def _flatten(x: Any) -> InnerTensors:
    inners, statics, dynamics = _field_names(type(x))
    present = [(name, t) for name, t in zip(inners, x.unwrap(), strict=True) if t is not None]
    varying = {} if is_compiling_here() or x._varying_dims is None else x._varying_dims()
    tensors = [flatten(_alias(t, varying.get(name, ()))) for name, t in present] + [
        _carrier(x, getattr(x, name)) for name in dynamics
    ]
    return InnerTensors(
        tensors, (type(x), tuple([n for n, _ in present]), tuple([getattr(x, n) for n in statics]))
    )


def _unflatten(node: InnerTensors) -> Any:
    cls, names, metadata = node.kind
    inners, statics, dynamics = _field_names(cls)
    tensors = [unflatten(t) for t in node.tensors]
    fields = dict.fromkeys(inners) | dict(zip(names, tensors, strict=False))
    fields |= dict(zip(statics, metadata, strict=True))
    fields |= dict(zip(dynamics, [t.size(0) for t in tensors[len(names) :]], strict=True))
    if torch.compiler.is_dynamo_compiling():
        return cls(**fields)  # Dynamo traces calls of a class, and not of the generated constructor
    return TensorSubclass.__new__(cls, **fields)


def _alias(t: Tensor, varying: Iterable[int]) -> Tensor:
    """Returns an inner tensor as a new object, with its marks, and marks on the dims that vary.

    Export deletes the marks of its arguments. It also makes one argument of two inner tensors that are one object, and
    would record that rows match where two values share their offsets.
    """
    if is_compiling_here() or isinstance(t, TensorSubclass):
        return t
    alias = t[...]
    mark_dim_dynamic(alias, *dims_marked_dynamic(t), *varying)
    return alias


def _carrier(x: Any, count: int) -> Tensor:
    """Returns a tensor whose extent is a dynamic int: AOTInductor replaces int arguments by None."""
    tensor = torch.empty((count, 0), dtype=torch.uint8, device=x.device)
    if not is_compiling_here():
        mark_dim_dynamic(tensor, 0)
    return tensor


@torch.compiler.assume_constant_result  # Dynamo cannot read a spec
def _field_names(cls: Any) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the inner tensors, of the static metadata and of the dynamic ints of a class."""
    spec: SubclassSpec = cls.__spec__
    return spec.inner_names, tuple(f.name for f in spec.statics), tuple(f.name for f in spec.dynamics)


def dynamic_shapes(args: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the ``dynamic_shapes=`` with which ``torch.export.export`` lets the marked dims of arguments differ.

    A dim is marked by its class, as the rows of a ``JaggedTensor`` are, or by ``torch._dynamo.maybe_mark_dynamic``.

    Args:
        args: the flattened arguments of a :class:`Flattened`.
    """
    return {"args": _shapes(args)}


def _shapes(tree: Any) -> Any:
    if isinstance(tree, InnerTensors):
        return [_shapes(t) for t in tree.tensors]
    if isinstance(tree, Tensor):
        return dict.fromkeys(dims_marked_dynamic(tree), Dim.DYNAMIC)
    return _map(_shapes, tree, (InnerTensors, Tensor), lambda _: None)


class Flattened(nn.Module):
    """A module or function whose arguments and results have :class:`InnerTensors` in place of declared classes.

    ``torch.export.export`` takes it where it takes no wrappers. Parameters may be wrappers.

    Args:
        fn: the module, or a function.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    # With **kwargs, torch.export accepts no dynamic_shapes.
    def forward(self, *args: Any) -> Any:
        """Calls the function on the values that the nodes represent, and flattens its result."""
        return flatten(self.fn(*unflatten(args)))


# ---- files -------------------------------------------------------------------------------------------------


def _leaves(node: InnerTensors) -> tuple[list[Any], Kind]:
    return list(node.tensors), node.kind


def _to_json(kind: Kind) -> str:
    cls, names, statics = kind
    return json.dumps([full_name(cls), names, [_encode(cls, value) for value in statics]])


def _from_json(text: str) -> Kind:
    name, names, statics = json.loads(text)
    cls = next((cls for cls in descendants(TensorSubclass) if full_name(cls) == name), None)
    if cls is None:
        raise ValueError(
            f"this program takes or returns a {name}, which no module declares that is imported: import it before "
            f"torch.export.load"
        )
    return cls, tuple(names), tuple(map(_decode, statics))


def _encode(cls: type, value: Any) -> Any:
    """Returns metadata as JSON; PyTorch's own types and tuples as dicts of one entry."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return {"tuple": [_encode(cls, v) for v in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise TypeError(
        f"torch.export.save: expected metadata of {one_of(cls)} to be text, numbers, None, dtypes, devices or tuples "
        f"of them, got {value!r:.100} of type {type(value).__name__}; save it with desugar.save"
    )


def _decode(value: Any) -> Any:
    match value:
        case {"tuple": items}:
            return tuple(map(_decode, items))
        case {"dtype": str(name)} if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        case {"device": str(name)}:
            return torch.device(name)
        case None | bool() | int() | float() | str():
            return value
    raise ValueError(f"expected metadata that torch.export.save wrote, got {value!r:.100}")


def _leaves_with_keys(node: Any) -> tuple[list[Any], Any]:
    """Numbers the leaves; these keys are the names of leaves in errors, and of arguments in a graph."""
    leaves, context = _leaves(node)
    return [(SequenceKey(i), leaf) for i, leaf in enumerate(leaves)], context


torch.serialization.add_safe_globals([InnerTensors])
register_pytree_node(
    InnerTensors,
    _leaves,
    InnerTensors,
    serialized_type_name=f"{InnerTensors.__module__}.{InnerTensors.__qualname__}",
    to_dumpable_context=_to_json,
    from_dumpable_context=_from_json,
    flatten_with_keys_fn=_leaves_with_keys,
)
