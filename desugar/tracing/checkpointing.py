"""Activation checkpointing inside the function.

Checkpointing computes a region again by hooks on what autograd saves. In a trace that would put the region into
the graph twice, with random numbers drawn anew. So the hooks rest, and the region's nodes are marked: the
partitioner computes them again in the backward, and saves what is random. Under selective checkpointing its mode
marks the nodes as the policy says.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from desugar import _torch as private

_numbers = itertools.count(1)


def run_op(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an op of the function that is traced; marks its nodes if it is in a checkpointed region."""
    region = _region()
    private.rest_saved_tensors_hooks(region is not None)
    mode = private.get_proxy_mode() if region is not None else None
    if region is None or mode is None:
        return func(*args, **kwargs)
    graph = mode.tracer.graph
    last = next(iter(reversed(graph.nodes)), None)
    with private.preserve_node_meta():  # where releases before 2.13 put a policy's decision
        result = func(*args, **kwargs)
    for node in reversed(graph.nodes):
        if node is last:
            break
        _mark(node, region)
    return result


def _region() -> int | None:
    """Which checkpointed region this is, counted from the first one."""
    hooks = private.top_saved_tensors_hooks(True)
    if hooks is None or not getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
        return None
    return hooks[0].__dict__.setdefault("desugar_region", next(_numbers))


def _mark(node: fx.Node, region: int) -> None:
    if node.op != "call_function":
        return
    node.meta["ac_graph_id"] = region
    if _is_random(node):
        node.meta.pop("recompute", None)
    else:
        node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)  # a policy has decided already


def _is_random(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_random(node.args[0])  # type: ignore[arg-type]
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
