"""Storage offsets: a program depends on those of its inputs only if the function reads one or counts from one.

Compiled code gets the address of a tensor's first element, so where that lies in its storage says nothing to it.
What the function computes from `storage_offset()`, and where `as_strided` begins if it is told, are constants of the
trace: then the offsets are part of the signature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from desugar.ir.storage import storage_of

# Ops and functions that count an offset from the start of the storage, and its place among their arguments.
_OPS = {
    torch.ops.aten.as_strided.default: 3,
    torch.ops.aten.as_strided_copy.default: 3,
    torch.ops.aten.as_strided_scatter.default: 4,
}
_FUNCTIONS = {
    torch.as_strided: 3,
    Tensor.as_strided: 3,
    Tensor.as_strided_: 3,
    torch.as_strided_: 3,
    torch.as_strided_copy: 3,
    torch.as_strided_scatter: 4,
    Tensor.as_strided_scatter: 4,
    **_OPS,
    **{op.overloadpacket: place for op, place in _OPS.items()},
}


def depends_on_offset(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result of a function of torch's is another one for the same tensor elsewhere in a storage."""
    if func is Tensor.storage_offset:
        return True
    place = _FUNCTIONS.get(func)
    return place is not None and (len(args) > place or kwargs.get("storage_offset") is not None)


def starts_of_windows(graph: fx.GraphModule) -> list[Any]:
    """Where inputs begin in their storage: one entry for each op that counts from the start of that storage.

    Inductor's graphs count from the first element of an input. Its lowering of `as_strided` turns the one into the
    other, but its cache of graphs knows of no offsets, and gives what was compiled for another one.
    """
    starts: dict[int, Any] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        if isinstance(value := node.meta.get("val"), Tensor):
            starts[storage_of(value)] = value.storage_offset()
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_storage_offset.default)
    for target, place in _OPS.items():
        found = graph.graph.find_nodes(op="call_function", target=target)
        nodes += [node for node in found if len(node.args) > place and node.args[place] is not None]
    storages = [storage_of(node.args[0].meta["val"]) for node in nodes]
    return [starts[storage] for storage in storages if storage in starts]
