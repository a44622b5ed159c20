"""Which sizes become symbols: those that a user marked, and those that were seen to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from desugar.inputs import DynamicPolicy
from desugar.trees import flatten
from desugar.values import dynamic_names, inner_names, is_wrapper

Place = tuple[int, tuple[str, ...]]  # leaf number, attribute path

# Attributes that torch._dynamo.mark_dynamic and maybe_mark_dynamic leave on a tensor.
_MARKS = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
_STATIC_MARK = "_dynamo_static_indices"


class History:
    """The sizes of earlier calls, by structure of the arguments."""

    def __init__(self, dynamic: bool | None) -> None:
        self.dynamic = dynamic
        self._seen: dict[Any, dict[Place, tuple[int, ...] | int]] = {}
        self._changed: dict[Any, tuple[dict[Place, frozenset[int]], frozenset[Place]]] = {}

    def policy_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DynamicPolicy:
        """What would be symbolic in a program for this call; nothing is remembered."""
        copied = History(self.dynamic)
        copied._seen = {treespec: dict(extents) for treespec, extents in self._seen.items()}
        copied._changed = dict(self._changed)
        return copied.observe(args, kwargs)[0]

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DynamicPolicy, str]:
        """What is symbolic in a program for this call, and why it is compiled."""
        call: Any = (args, kwargs)
        leaves, treespec = flatten(call)
        first = treespec not in self._seen
        if self.dynamic is not None:
            self._seen[treespec] = {}
            return DynamicPolicy(everything=self.dynamic), "first call" if first else "new signature"
        dims, ints = self._changed.get(treespec, ({}, frozenset()))
        dims, ints = dict(dims), set(ints)
        seen = self._seen.setdefault(treespec, {})
        reasons = []
        for place, extents, marked in _extents(leaves):
            earlier = seen.setdefault(place, extents)
            if isinstance(extents, int):
                if extents != earlier or marked:
                    ints.add(place)
                    reasons.append(f"{_name(place)} was {earlier}, is {extents}")
                continue
            changed = _changed_dims(earlier, extents) - _static_dims(leaves, place)
            if changed - dims.get(place, frozenset()):
                reasons.append(f"{_name(place)} had size {earlier}, has {extents}")
            if changed | marked:
                dims[place] = dims.get(place, frozenset()) | changed | marked
        self._changed[treespec] = dims, frozenset(ints)
        reason = "first call" if first else "; ".join(reasons) or "new signature"
        return DynamicPolicy(dims=dims, ints=frozenset(ints)), reason


def _extents(leaves: list[Any]) -> Iterator[tuple[Place, Any, frozenset[int]]]:
    """(place, sizes or dynamic int, dims marked dynamic) of every tensor and dynamic int in the arguments."""
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not leaf.is_nested:
            yield from _extents_of(leaf, (number, ()))


def _extents_of(tensor: Any, place: Place) -> Iterator[tuple[Place, Any, frozenset[int]]]:
    yield place, tuple(tensor.size()), _marked(tensor)
    if not is_wrapper(tensor):
        return
    leaf, path = place
    for name in inner_names(tensor)[0]:
        yield from _extents_of(getattr(tensor, name), (leaf, (*path, name)))
    for name in dynamic_names(type(tensor)):
        mark = _marked(tensor) and frozenset({0})
        yield (leaf, (*path, name)), getattr(tensor, name), mark or frozenset()


def _marked(tensor: Tensor) -> frozenset[int]:
    return frozenset().union(*(getattr(tensor, mark, ()) for mark in _MARKS))


def _static_dims(leaves: list[Any], place: Place) -> frozenset[int]:
    tensor = leaves[place[0]]
    for name in place[1]:
        tensor = getattr(tensor, name)
    return frozenset(getattr(tensor, _STATIC_MARK, ()))


def _changed_dims(earlier: Any, extents: tuple[int, ...]) -> frozenset[int]:
    if not isinstance(earlier, tuple) or len(earlier) != len(extents):
        return frozenset()
    return frozenset(dim for dim, pair in enumerate(zip(earlier, extents, strict=True)) if pair[0] != pair[1])


def _name(place: Place) -> str:
    return f"argument leaf {place[0]}" + "".join(f".{name}" for name in place[1])
