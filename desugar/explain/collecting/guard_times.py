"""Times Dynamo's guards, name by name, at the moment when they are built.

Dynamo checks a tree of guards at each call: to check `self.up.weight`, it reads `self`, then `up`, then the parameter.
What the guards of a name take is the difference between two copies of the tree, one with that name and what leads to
it, and one with what leads to it alone. Both are checked many times in turns, with the values of the call that
compiled; the minimum of each counts. So caches are warm, and what a tree shares between names is in no name's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from desugar import _torch_guards as private
from desugar.explain.collecting.guards import TakenGuards
from desugar.explain.fold import group_guards
from desugar.explain.records import GuardTimes

_TURNS, _TURN = 5, 60e-6  # seconds of one turn
_MOST = 0.1  # seconds for one program; of names that are left there is no time


@dataclass(slots=True)
class Budget:
    """Seconds that all measurements may still take."""

    left: float


def time_taken_guards(
    taken: TakenGuards, root: Any, frame: Mapping[str, Any], budget: Budget
) -> GuardTimes | None:
    """Times the guards of a program, name by name; None if nothing is left of the budget."""
    if budget.left <= 0 or not taken.guards:
        return None
    sources = taken.sources()
    groups = {
        group.key: {source for guard in group.guards for source in sources.get(guard.name or guard.text, ())}
        for group in group_guards(taken.describe())
    }
    return time_guards(root, frame, groups, budget)


def time_guards(
    root: Any, frame: Mapping[str, Any], groups: Mapping[str, Collection[str]], budget: Budget
) -> GuardTimes:
    """Times a tree of guards whole and by groups.

    Args:
        root: The tree.
        frame: Variables of the frame for which the guards hold.
        groups: Name -> Dynamo's sources of the values that its guards are about; the first are timed first.
        budget: What measurements may still take; it is charged.
    """
    start = time.perf_counter()
    end = start + min(_MOST, budget.left)
    ways: dict[str, set[str]] = {}
    for source, way in _ways(root):
        ways.setdefault(source, set()).update(way)
    whole, alone, nothing = _minima([root, private.clone_of(root, ()), private.empty_guards()], frame)
    parts = []
    for name, sources in groups.items():
        if time.perf_counter() > end:
            break
        seconds = _seconds_of(root, frame, sources, ways)
        if seconds is not None:
            parts.append((name, seconds))
    budget.left -= time.perf_counter() - start
    return GuardTimes(max(whole - nothing, 0.0), max(alone - nothing, 0.0), tuple(parts))


def _ways(manager: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the source of each value in a tree, with those of the values through which it is reached."""
    path = (*path, manager.get_source())
    for inner in private.inner_managers(manager):
        yield inner.get_source(), path
        yield from _ways(inner, path)


def _seconds_of(
    root: Any, frame: Mapping[str, Any], sources: Collection[str], ways: Mapping[str, Collection[str]]
) -> float | None:
    """The seconds of the guards about some values; None if the tree has none about them."""
    own = {source for source in sources if source in ways}
    outer = {source for one in own for source in ways[one]} - own
    if not own:
        return None
    trees = [private.clone_of(root, own | outer), private.clone_of(root, outer)]
    if not all(tree.check(frame) for tree in trees):  # guards that relate values hold in the whole tree alone
        return None
    with_own, without = _minima(trees, frame)
    return max(with_own - without, 0.0)


def _minima(trees: Sequence[Any], frame: Mapping[str, Any]) -> list[float]:
    """The seconds of one check of each tree: the least of several turns."""
    checks = [tree.check for tree in trees]
    first = _turn(checks[0], frame, 3)
    repeats = max(3, min(200, int(_TURN / max(first, 1e-9))))
    turns = [[_turn(check, frame, repeats) for check in checks] for _ in range(_TURNS)]
    return [min(times) for times in zip(*turns, strict=True)]


def _turn(check: Callable[[Mapping[str, Any]], bool], frame: Mapping[str, Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        check(frame)
    return (time.perf_counter() - start) / repeats
