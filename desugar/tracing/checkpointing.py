"""Traces regions under `torch.utils.checkpoint` by marking their nodes for recomputation.

Checkpointing recomputes a region through saved-tensor hooks. In a trace the hooks would put the region into the
graph twice, and the second copy would draw other random numbers. So tracing disables the hooks and marks the region's
nodes. The partitioner recomputes marked nodes in the backward and saves the results of random ops. Under selective
checkpointing, the checkpointing mode marks the nodes according to its policy.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from desugar import _torch as torch_private

_region_numbers = itertools.count(1)


def run_op(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an op of the traced function; marks its nodes if a checkpointed region is active."""
    region = _active_region()
    torch_private.rest_saved_tensors_hooks(region is not None)
    mode = torch_private.get_proxy_mode() if region is not None else None
    if region is None or mode is None:
        return func(*args, **kwargs)
    graph = mode.tracer.graph
    last = next(iter(reversed(graph.nodes)), None)
    result = func(*args, **kwargs)
    for node in reversed(graph.nodes):
        if node is last:
            break
        _mark(node, region)
    return result


def _active_region() -> int | None:
    """Returns the number of the innermost active checkpointed region, or None; numbers start at 1."""
    hooks = torch_private.top_saved_tensors_hooks(True)
    if hooks is None or not getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
        return None
    return hooks[0].__dict__.setdefault("desugar_region", next(_region_numbers))


def _mark(node: fx.Node, region: int) -> None:
    if node.op != "call_function":
        return
    node.meta["ac_graph_id"] = region
    if _is_random(node):
        node.meta.pop("recompute", None)
    else:
        node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)  # keeps a policy's decision


def _is_random(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_random(node.args[0])  # type: ignore[arg-type]
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
