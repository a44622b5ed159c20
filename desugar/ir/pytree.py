"""Flattens what a graph returns, with optree; None is a leaf.

Dynamo's graphs return flat tuples. Dynamo itself flattens and rebuilds every other structure that the user's function
takes or returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from optree import PyTreeSpec


def flatten(tree: Any) -> tuple[list[Any], PyTreeSpec]:
    """Returns the leaves of a tree and its structure."""
    import optree  # the wrappers of loaded programs do without it

    return optree.tree_flatten(tree, none_is_leaf=True)


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Returns the tensors among the leaves of a tree."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def result_leaves(result: Any) -> list[Any]:
    """Returns the leaves of a function's result."""
    return flatten(result)[0]
