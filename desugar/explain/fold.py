"""Folds the repeated layers of a program in its signature, ops, graphs, saved tensors, wrapper and guards.

A layer is a block of items that occurs at least three times in a row. A run of layers is found by its period: each item
equals the item one period later. Two items count as equal if they differ only in names of nodes and in indices of
names, such as `layers[0]` and `layers[1]`. Ops, sizes, dtypes and constants have to be the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from desugar.explain.records import Graph, Guard, Leaf, OuterOp, Program
from desugar.recording.record_base import Record

_INDEX = re.compile(r"\[(\d+)\]")  # in a user's name
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")  # an identifier in code, except attributes
_NUMBERED = re.compile(
    r"(?<![\w.])([A-Za-z]+)\d+"
)  # an identifier of a wrapper, up to its number: a0, x12, grad3
_PARAMETER = re.compile(r"    (\w+),  # (.+)")  # the line of a parameter of a graph's function
Item = TypeVar("Item")

_LEAST_BLOCKS, _LEAST_ITEMS = 3, 8  # a shorter run is not folded
_LEAST_NAMES = 3  # fewer names of one kind are not folded
_LONG = 240  # characters of a line; a longer line is shortened
_HEAD, _TAIL = 140, 60

# --------------------------------------------------------------------------------------- runs of equal blocks


@dataclass(frozen=True, slots=True)
class Run(Record):
    """`count` equal blocks of `length` items each; the first block starts at item `start`.

    Attributes:
        label: The names of the blocks, such as `layers[0] … layers[35]`; empty if unknown.
        inner: Runs inside the first block.
    """

    start: int
    length: int
    count: int
    label: str = ""
    inner: tuple[Run, ...] = ()

    @property
    def end(self) -> int:
        """The first item after the run."""
        return self.start + self.length * self.count


def find_runs(items: Sequence[Hashable]) -> tuple[Run, ...]:
    """Returns the runs of equal blocks, in order; the longest run is found first, then runs around and inside it."""
    numbers: dict[Hashable, int] = {}
    return tuple(_runs([numbers.setdefault(item, len(numbers)) for item in items], 0, len(items)))


def _runs(items: Sequence[int], start: int, end: int) -> Iterator[Run]:
    """Yields the runs between two items."""
    best = _longest(items, start, end)
    if best is None:
        return
    yield from _runs(items, start, best.start)
    yield replace(best, inner=tuple(_runs(items, best.start, best.start + best.length)))
    yield from _runs(items, best.end, end)


def _longest(items: Sequence[int], start: int, end: int) -> Run | None:
    """Returns the run that covers most items; of two that cover as many, the run with the shorter block."""
    runs = [run for period in _periods(items, start, end) for run in _of_period(items, start, end, period)]
    return max(runs, key=lambda run: (run.length * run.count, -run.length), default=None)


def _periods(items: Sequence[int], start: int, end: int) -> list[int]:
    """Returns the distances at which enough items are equal for a run."""
    part, longest = torch.tensor(items[start:end], device="cpu"), (end - start) // _LEAST_BLOCKS
    equal = {period: int((part[period:] == part[:-period]).sum()) for period in range(1, longest + 1)}
    return [period for period, count in equal.items() if count >= (_LEAST_BLOCKS - 1) * period]


def _of_period(items: Sequence[int], start: int, end: int, period: int) -> Iterator[Run]:
    """Yields the runs of one period."""
    first = start
    for position in range(start, end - period + 1):
        if position < end - period and items[position] == items[position + period]:
            continue
        count = (position - first) // period + 1
        if count >= _LEAST_BLOCKS and count * period >= _LEAST_ITEMS:
            yield Run(first, period, count)
        first = position + 1


# ------------------------------------------------------------------------------------------------- a program


@dataclass(frozen=True, slots=True)
class GuardGroup(Record):
    """The guards of one name, or of the names of repeated layers.

    Attributes:
        name: The guarded name, with the indices of all layers: `layers[0 … 35].weight`.
        texts: The conditions, with that name.
        count: The number of names.
        checks: The number of Dynamo's checks for all names.
        guards: The guards, name by name.
    """

    name: str
    texts: tuple[str, ...]
    count: int
    checks: int
    guards: tuple[Guard, ...]


@dataclass(frozen=True, slots=True)
class Folds(Record):
    """The repeated layers of one program. Each attribute holds runs in the program's list of the same name.

    Attributes:
        inputs, captured, outputs, ops, saved: Runs of the records.
        wrapper: Runs of lines.
        graphs: Runs of lines of each graph.
        guards: The guards by name; names with the most checks come first.
    """

    inputs: tuple[Run, ...] = ()
    captured: tuple[Run, ...] = ()
    outputs: tuple[Run, ...] = ()
    ops: tuple[Run, ...] = ()
    saved: tuple[Run, ...] = ()
    wrapper: tuple[Run, ...] = ()
    graphs: tuple[tuple[Run, ...], ...] = ()
    guards: tuple[GuardGroup, ...] = ()


def fold_program(program: Program) -> Folds:
    """Finds the repeated layers of a program."""
    names_of_ops = _names_of_ops(program)
    return Folds(
        inputs=fold_leaves(program.inputs),
        captured=fold_leaves(program.captured),
        outputs=fold_leaves(program.outputs),
        ops=_fold(program.ops, _key_of_op, lambda op: names_of_ops.get(op.number, [])),
        saved=_fold(
            program.saved,
            lambda saved: replace(
                saved, name=_without_node_number(saved.name), source=without_index(saved.source)
            ),
            lambda saved: [saved.source.removeprefix("input ")],
        ),
        wrapper=find_runs([_NUMBERED.sub(r"\1#", line) for line in program.wrapper.splitlines()]),
        graphs=tuple(map(fold_graph, program.graphs)),
        guards=group_guards(program.guards),
    )


def _fold(
    items: Sequence[Item], key: Callable[[Item], Hashable], names: Callable[[Item], Iterable[str]]
) -> tuple[Run, ...]:
    """Finds runs of equal keys, and labels them by the names in their first and last block."""
    runs = find_runs([key(item) for item in items])
    of_items = [list(names(item)) for item in items]
    return tuple(_with_label(run, of_items) for run in runs)


def _with_label(run: Run, names: Sequence[Sequence[str]]) -> Run:
    first = [name for n in range(run.start, run.start + run.length) for name in names[n]]
    last = [name for n in range(run.end - run.length, run.end) for name in names[n]]
    return replace(run, label=span(first, last), inner=tuple(_with_label(one, names) for one in run.inner))


def span(first: Sequence[str], last: Sequence[str]) -> str:
    """Names the blocks of a run by the first index that differs between the names of its first and last block."""
    for one, other in zip(first, last, strict=False):
        for start, end in zip(_INDEX.finditer(one), _INDEX.finditer(other), strict=False):
            if start[1] != end[1]:
                return f"{one[: start.end()]} … {other[: end.end()]}"
    return ""


def without_index(name: str) -> str:
    """Returns a name with `#` in place of its indices."""
    return _INDEX.sub("[#]", name)


# ------------------------------------------------------------------------------------------------ its records


def fold_leaves(leaves: Sequence[Leaf]) -> tuple[Run, ...]:
    """Finds repeated layers among arguments or results."""
    return _fold(leaves, _key_of_leaf, lambda leaf: [leaf.name])


def _key_of_leaf(leaf: Leaf) -> Leaf:
    return replace(leaf, name=without_index(leaf.name), note=without_index(leaf.note))


def _key_of_op(op: OuterOp) -> Hashable:
    parent = None if op.parent is None else op.number - op.parent
    return replace(op, number=0, parent=parent)


# ------------------------------------------------------------------------------------------------- its code


def _without_node_number(name: str) -> str:
    """Returns the name of a node without the number that PyTorch adds to nodes of one op."""
    op, _, number = name.rpartition("_")
    return op if op and number.isdigit() else name


def fold_graph(graph: Graph) -> tuple[Run, ...]:
    """Finds repeated layers among the lines of a graph: the same ops and sizes, with any operands."""
    parameters = _parameters(graph)
    names = {*parameters, *(node.name for node in graph.nodes)}
    return _fold(
        graph.text.splitlines(),
        lambda line: _key_of_line(line, names),
        lambda line: list(_names_in(line, parameters)),
    )


def _key_of_line(line: str, names: Collection[str]) -> str:
    """Returns a line without the names of its nodes, and without the indices in a parameter's user name."""
    shown = without_index(line) if _PARAMETER.match(line) else line
    return _NAME.sub(lambda match: "%" if match[0] in names else _without_node_number(match[0]), shown)


def _parameters(graph: Graph) -> dict[str, str]:
    """Returns the user's name of each parameter of a graph's function."""
    return {match[1]: match[2] for match in map(_PARAMETER.match, graph.text.splitlines()) if match}


def _names_in(line: str, parameters: dict[str, str]) -> Iterator[str]:
    """Yields the user's names of the parameters that a line reads."""
    return (parameters[name] for name in _NAME.findall(line.partition("  # ")[0]) if name in parameters)


def _names_of_ops(program: Program) -> dict[int, list[str]]:
    """Returns, for each outer op, the user's names of the parameters that the graph reads."""
    names_by_op: dict[int, list[str]] = {}
    for graph in program.graphs[:1]:
        lines, parameters = graph.text.splitlines(), _parameters(graph)
        for node in graph.nodes:
            if node.op is not None:
                names_by_op.setdefault(node.op, []).extend(_names_in(lines[node.line], parameters))
    return names_by_op


# ------------------------------------------------------------------------------------------------- its guards


def group_guards(guards: Sequence[Guard]) -> tuple[GuardGroup, ...]:
    """Groups guards by name, and the names of repeated layers; names with the most checks come first."""
    by_name: dict[str, list[Guard]] = {}
    for guard in guards:
        by_name.setdefault(guard.name or guard.text, []).append(guard)
    alike: dict[Hashable, list[list[Guard]]] = {}
    for of_names in by_name.values():
        key = tuple(
            (_rename(guard, without_index(guard.name)), guard.place, guard.checks) for guard in of_names
        )
        alike.setdefault(key, []).append(of_names)
    folded = [
        group
        for of_names in alike.values()
        for group in (
            [_group(of_names)]
            if len(of_names) >= _LEAST_NAMES and of_names[0][0].name
            else [_group([one]) for one in of_names]
        )
    ]
    return tuple(sorted(folded, key=lambda group: (not group.name, -group.checks)))  # modes come last


def _group(of_names: Sequence[list[Guard]]) -> GuardGroup:
    """Returns one group of the guards of several names."""
    name = join_names([guards[0].name for guards in of_names])
    return GuardGroup(
        name,
        tuple(_rename(guard, name) for guard in of_names[0]),
        len(of_names),
        sum(guard.checks for guards in of_names for guard in guards),
        tuple(guard for guards in of_names for guard in guards),
    )


def _rename(guard: Guard, name: str) -> str:
    return guard.text.replace(guard.name, name) if guard.name else guard.text


def join_names(names: Sequence[str]) -> str:
    """Joins names that differ in indices: `a[0].b`, `a[1].b` and `a[2].b` are `a[0 … 2].b`."""
    columns = [
        sorted(set(column))
        for column in zip(*(map(int, _INDEX.findall(name)) for name in names), strict=True)
    ]
    texts = iter([f"[{_range(column)}]" for column in columns])
    return _INDEX.sub(lambda match: next(texts), names[0])


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1:
        return str(first) if first == last else f"{first} … {last}"
    return ", ".join(map(str, numbers)) if len(numbers) <= _LEAST_NAMES else f"{first}, {numbers[1]} … {last}"


# -------------------------------------------------------------------------------------------------- its lines


def run_title(run: Run) -> str:
    """Returns the title of a run, such as `x 36, layers[0] … layers[35]`."""
    return f"x {run.count}" + (f", {run.label}" if run.label else "")


def fold_lines(
    show: Callable[[int], Iterator[str]], end: int, runs: Sequence[Run], start: int = 0
) -> Iterator[str]:
    """Yields the lines of items; of a run, its title, and the lines of its first block behind a bar.

    Args:
        show: Yields the lines of an item.
        end: The first item that is not shown.
        runs: The runs among the items, in order.
        start: The first item.
    """
    for run in runs:
        yield from (line for n in range(start, run.start) for line in show(n))
        yield f"{run_title(run)}; the first of them:"
        for line in fold_lines(show, run.start + run.length, run.inner, run.start):
            yield f"│ {line}"
        start = run.end
    yield from (line for n in range(start, end) for line in show(n))


def fold_code(lines: Sequence[str], end: int, runs: Sequence[Run], start: int = 0) -> Iterator[str]:
    """Yields lines of code; of a run, the lines of its first block between two comments. Shortens long lines."""
    for run in runs:
        yield from map(shorten, lines[start : run.start])
        indent = lines[run.start][: len(lines[run.start]) - len(lines[run.start].lstrip())]
        yield f"{indent}# {run_title(run)}; the first of them: {{"
        yield from fold_code(lines, run.start + run.length, run.inner, run.start)
        yield f"{indent}# }}"
        start = run.end
    yield from map(shorten, lines[start:end])


def shorten(line: str) -> str:
    """Returns a line, without its middle if it is long."""
    if len(line) <= _LONG:
        return line
    return f"{line[:_HEAD]} …{len(line) - _HEAD - _TAIL} more characters… {line[-_TAIL:]}"
