"""What a graph returns, as optree sees it: None is a leaf.

Dynamo's graphs return flat tuples; it takes apart and rebuilds whatever else the user's function takes and returns.
"""

from __future__ import annotations

from typing import Any

import optree


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure."""
    return optree.tree_flatten(tree, none_is_leaf=True)


def result_leaves(result: Any) -> list[Any]:
    """Leaves of what a function returned."""
    return flatten(result)[0]
