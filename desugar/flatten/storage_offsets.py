"""Storage offsets: a program depends on its inputs' offsets only if the function uses an offset.

Compiled code gets the address of a tensor's first element, so it does not depend on the offset of that element in its
storage. But a result of `storage_offset()`, and the `storage_offset` argument of `as_strided`, are constants of the
trace. Whether memory can be viewed as a dtype of larger elements depends on the offset, too. If the function does one
of these, the offsets of its inputs are part of the signature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from desugar.flatten.inputs import Inputs
from subclasses._torch import storage_key

# Ops with an offset from the start of the storage -> the position of that argument.
_OPS = {
    torch.ops.aten.as_strided.default: 3,
    torch.ops.aten.as_strided_copy.default: 3,
    torch.ops.aten.as_strided_scatter.default: 4,
}


def note_offset_read(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Notes that a function reads the storage offset of a tensor."""
    inputs.offsets_matter = True
    return func, args


def depends_on_offsets(graph: fx.GraphModule) -> bool:
    """Returns whether a graph uses an offset in the storage of an input.

    A view of an input as a dtype of larger elements requires that its offset is a multiple of their size.
    """
    if input_storage_offsets(graph):
        return True
    storages = set(_input_storages(graph))
    return any(
        node.args[1].itemsize > node.args[0].meta["val"].dtype.itemsize
        and storage_key(node.args[0].meta["val"]) in storages
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype)
    )


def _input_storages(graph: fx.GraphModule) -> dict[int, Any]:
    """Returns storage -> the offset of an input in it."""
    values = (node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder"))
    return {storage_key(value): value.storage_offset() for value in values if isinstance(value, Tensor)}


def input_storage_offsets(graph: fx.GraphModule) -> list[Any]:
    """Returns the storage offset of an input, for each op that uses an offset from the start of that input's storage.

    Inductor's code counts from the first element of an input. Its lowering of `as_strided` converts the offset. But the
    key of its graph cache has no offsets, so the cache may return code that was compiled for another offset.
    """
    starts = _input_storages(graph)
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_storage_offset.default)
    for target, position in _OPS.items():
        found = graph.graph.find_nodes(op="call_function", target=target)
        nodes += [node for node in found if len(node.args) > position and node.args[position] is not None]
    storages = [storage_key(node.args[0].meta["val"]) for node in nodes]
    return [starts[storage] for storage in storages if storage in starts]
