"""Flattens what a graph returns, with optree; None is a leaf.

Dynamo's graphs return flat tuples. Dynamo itself flattens and rebuilds every other structure that the user's function
takes or returns.
"""

from __future__ import annotations

from typing import Any

import optree


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Returns the leaves of a tree and its structure."""
    return optree.tree_flatten(tree, none_is_leaf=True)


def result_leaves(result: Any) -> list[Any]:
    """Returns the leaves of a function's result."""
    return flatten(result)[0]
