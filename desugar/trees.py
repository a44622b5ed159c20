"""Results as optree sees them; a `torch.Size` is taken apart too, for its ints may be symbols."""

from __future__ import annotations

from typing import Any

import optree
import torch

_NAMESPACE = "desugar"

optree.register_pytree_node(
    torch.Size,
    lambda size: (tuple(size), None, None),
    lambda _, extents: torch.Size(extents),
    namespace=_NAMESPACE,
)


def flatten_result(result: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure of what a function returned."""
    return optree.tree_flatten(result, none_is_leaf=True, namespace=_NAMESPACE)


def result_leaves(result: Any) -> list[Any]:
    """Leaves of what a function returned."""
    return flatten_result(result)[0]
