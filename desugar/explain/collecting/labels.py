"""Labels the programs of one function with the facts that differ: a failed guard, size, dtype, metadata, or line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from desugar.explain.records import FailedGuard, Leaf, Program

_MOST = 3  # facts in a label

Facts = Mapping[str, str]


def name_apart(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Gives a label to each program that shares its name with another."""
    groups: dict[str, list[int]] = {}
    for number, program in enumerate(programs):
        groups.setdefault(program.name, []).append(number)
    named = list(programs)
    for name, numbers in groups.items():
        facts = [dict(_facts(programs[number])) for number in numbers]
        for position, number in enumerate(numbers if len(numbers) > 1 else ()):
            difference = _difference(programs[number], position, facts)
            named[number] = replace(programs[number], label=f"{name}, {difference}")
    return tuple(named)


def _difference(program: Program, position: int, facts: Sequence[Facts]) -> str:
    """Returns facts that no other program of the function has; with the program's number, if three do not suffice."""
    own, others = facts[position], [its_facts for n, its_facts in enumerate(facts) if n != position]
    chosen = []
    for name in _candidates(program, own, facts):
        alike = [other for other in others if other.get(name) == own[name]]
        if len(alike) < len(others) and len(chosen) < _MOST:
            chosen.append(_say(name, own[name]))
            others = alike
    number = [f"{position + 1} of {len(facts)}"] if others else []
    return ", ".join([*number, *chosen])


def _candidates(program: Program, own: Facts, facts: Sequence[Facts]) -> list[str]:
    """Returns names of facts: the line first, then the names in the program's failed guard, then the rarest."""
    failed = ["where", *(name for name, value in _failed(program) if value != "any")]
    sharing = {name: sum(other.get(name) == value for other in facts) for name, value in own.items()}
    return sorted(own, key=lambda name: (name != "line", name not in failed, sharing[name]))


def _say(name: str, value: str) -> str:
    return f"{name} {value}" if name in ("line", "with", "where", "error") else f"{name} = {value}"


# ------------------------------------------------------------------------------------------------------ facts


def _facts(program: Program) -> Iterator[tuple[str, str]]:
    """Yields names and values that may differ between two programs of a function; of a name, the last value counts."""
    yield from _failed(program)
    if program.error:
        yield "error", program.error.partition("\n")[0]
    place = next((op.place for op in program.ops if op.place is not None), None)
    if place is not None:
        yield "line", str(place.line)
    for leaf in (*program.inputs, *program.captured):
        yield from _facts_of_leaf(leaf.name, leaf)
    if program.graphs:
        yield "with", "gradients" if len(program.graphs) > 1 else "no gradients"
    for guard in program.guards:
        name, equals, value = guard.text.partition(" == ")
        if equals:
            yield name, value
        elif re.search(r" [<>]=? ", guard.text):
            yield "where", guard.text


def _failed(program: Program) -> Iterator[tuple[str, str]]:
    """Yields the name in a failed guard of an earlier program, and the value that this program was compiled for."""
    for failed in map(FailedGuard.of, program.failed):
        if failed.name and failed.got:
            yield failed.name, "any" if _is_in_a_range(program, failed.name) else failed.got


def _is_in_a_range(program: Program, name: str) -> bool:
    """Whether guards bound a value and do not require one value: `type(k) is int` and `k <= 2`."""
    about = [guard.text for guard in program.guards if name in re.split(r"[() ]", guard.text)]
    return bool(about) and not any(text.startswith(f"{name} == ") for text in about)


def _facts_of_leaf(name: str, leaf: Leaf) -> Iterator[tuple[str, str]]:
    """Yields the facts of a leaf and of its inner tensors."""
    if not leaf.dtype:
        if leaf.note:
            yield name, _value(leaf.note)
        return
    yield f"type of {name}", leaf.kind
    yield f"{name}.dtype", leaf.dtype
    yield f"{name}.dim()", str(len(leaf.size))
    yield from ((f"{name}.size({dim})", _value(extent)) for dim, extent in enumerate(leaf.size))
    yield f"{name}.requires_grad", str(leaf.requires_grad)
    yield f"{name}.device", leaf.device
    yield from ((f"{name}.{field}", value) for field, value in leaf.metadata)
    for inner in leaf.inner:
        yield from _facts_of_leaf(f"{name}.{inner.name}", inner)


def _value(text: str) -> str:
    """Returns an extent; "any" for a symbolic extent."""
    return "any" if text.endswith(" here)") else text
