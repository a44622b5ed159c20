"""Python floats that change from call to call.

Dynamo passes such a float to its graph as a tensor without dimensions and reads it there with `item()`. Compiled
kernels take tensors, not numbers from tensors, so arithmetic with the number becomes arithmetic with the tensor, by
PyTorch's own pass. For an op that takes numbers alone, the pass makes the float a constant of the program, and Dynamo
captures the function again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from desugar import _torch as private


def replace_floats(graph: fx.GraphModule, mode: Any) -> None:
    """Replaces arithmetic with symbolic floats in a traced graph by arithmetic with the tensors that hold them.

    Args:
        graph: The graph; changed in place.
        mode: The fake mode of its trace.

    Raises:
        TensorifyScalarRestartAnalysis: An op takes such a float as a number. Dynamo captures the function again.
    """
    items = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default)
    if any(isinstance(node.meta.get("val"), torch.SymFloat) for node in items):
        private.tensorify_python_scalars(graph, mode.shape_env, mode)
        graph.recompile()
