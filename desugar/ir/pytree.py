"""Flattens the results of a graph with optree; None is a leaf.

Dynamo's graphs return flat tuples. Dynamo itself flattens and rebuilds every other structure that the user's function
takes or returns.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def result_leaves(result: Any) -> list[Any]:
    """Returns the leaves of a function's result."""
    import optree  # the wrappers of loaded programs do not need it

    return optree.tree_leaves(result, none_is_leaf=True)


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Returns the tensors among the leaves of a tree."""
    return [leaf for leaf in result_leaves(tree) if isinstance(leaf, Tensor)]
