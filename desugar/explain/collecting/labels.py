"""Labels that tell the programs of one function apart: by the guard that failed, by size, dtype, metadata, or line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from desugar.explain.records import FailedGuard, Leaf, Program

_MOST = 3  # facts in a label
_TRIED = 24  # facts that labels are made of

Facts = Mapping[str, str]


def name_apart(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Gives a label to each program that shares its name with another."""
    groups: dict[str, list[int]] = {}
    for number, program in enumerate(programs):
        groups.setdefault(program.name, []).append(number)
    labels = [program.label for program in programs]
    for name, numbers in groups.items():
        if len(numbers) > 1:
            for number, difference in zip(numbers, _differences([programs[n] for n in numbers]), strict=True):
                labels[number] = f"{name}, {difference}"
    return tuple(replace(program, label=label) for program, label in zip(programs, labels, strict=True))


def _differences(programs: Sequence[Program]) -> list[str]:
    """What to say of each program of one function, so that no two programs are said to be the same."""
    facts = [dict(_facts(program)) for program in programs]
    several = len({found.get("line") for found in facts}) > 1
    texts = []
    for number, program in enumerate(programs):
        always = ["line"] if several and "line" in facts[number] else []
        names = _candidates(program, number, facts)
        chosen = _smallest_difference(names, number, facts, always)
        start = []
        if not chosen:
            chosen, start = [*always, *names[:1]], [f"{number + 1} of {len(programs)}"]
        texts.append(", ".join([*start, *(_say(name, facts[number][name]) for name in chosen)]))
    return texts


def _smallest_difference(
    names: Sequence[str], number: int, facts: Sequence[Facts], always: Sequence[str]
) -> list[str]:
    """The first of the smallest sets of facts that no other program shares; empty if there is none."""
    tried = ([*always, *some] for size in range(_MOST + 1) for some in combinations(names, size))
    return next((chosen for chosen in tried if _are_unique(chosen, number, facts)), [])


def _are_unique(names: Sequence[str], number: int, facts: Sequence[Facts]) -> bool:
    """True if no other program has the same values."""
    own = facts[number]
    return not any(
        all(other.get(name) == own.get(name) for name in names)
        for n, other in enumerate(facts)
        if n != number
    )


def _candidates(program: Program, number: int, facts: Sequence[Facts]) -> list[str]:
    """Facts of a program that some other one does not share: of its own failed guard, of others', the rarest first."""
    own, failed = facts[number], [name for name, value in _failed(program) if value != "any"] + ["where"]
    sharing = {name: sum(other.get(name) == value for other in facts) for name, value in own.items()}
    kept = [name for name, count in sharing.items() if count < len(facts) and name != "line"]
    return sorted(kept, key=lambda name: (name not in failed, sharing[name]))[:_TRIED]


def _say(name: str, value: str) -> str:
    return f"{name} {value}" if name in ("line", "with", "where", "error", "from") else f"{name} = {value}"


# ------------------------------------------------------------------------------------------------------ facts


def _facts(program: Program) -> Iterator[tuple[str, str]]:
    """Names and values that may differ between two programs of a function; a value that a program has comes last."""
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
    if program.ops:
        yield "from", program.ops[0].name
    for guard in program.guards:
        name, equals, value = guard.text.partition(" == ")
        if equals:
            yield name, value
        elif re.search(r" [<>]=? ", guard.text):
            yield "where", guard.text


def _failed(program: Program) -> Iterator[tuple[str, str]]:
    """What a guard of an earlier program was about, and the value that this program was compiled for."""
    for failed in map(FailedGuard.of, program.failed):
        if failed.name and failed.got:
            yield failed.name, "any" if _is_in_a_range(program, failed.name) else failed.got


def _is_in_a_range(program: Program, name: str) -> bool:
    """Whether guards compare a value, and do not ask for one: `type(k) is int` and `k <= 2`."""
    about = [guard.text for guard in program.guards if name in re.split(r"[() ]", guard.text)]
    return bool(about) and not any(text.startswith(f"{name} == ") for text in about)


def _facts_of_leaf(name: str, leaf: Leaf) -> Iterator[tuple[str, str]]:
    """What is known of a leaf and of its inner tensors."""
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
    """An extent; a symbolic one takes any value."""
    return "any" if text.endswith(" here)") else text
