"""Reads the JSON that `report --json` and `explain --json` write, as far as reports are compared by it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from desugar.ir.record_base import Record
from subclasses.errors import one_of

_ADDRESS = re.compile(r"_\d{9,}_c\d+\b")  # `_139918512325792_c4`: an id and the number of the compilation
_DETAIL = re.compile(
    r"(: [a-z ]+) \(.*?\)(?=; |$)"
)  # of a verdict: `torch.compile: wrong (call 1 of 3: ...)`


class ReportError(ValueError):
    """A file holds no report; the message says what was expected and what came."""


@dataclass(frozen=True, slots=True)
class ProgramFacts(Record):
    """What is compared of a program. Numbers of nodes and paths of files are not: they change with anything.

    Attributes:
        name: The function.
        label: The name, and what tells the program from others of that function.
        signature: Arguments, captured tensors and results, in words; it finds the same program in another report.
        error: What ended the compilation.
        ops: The ops that the function ran, with how and how often.
        nodes: The ops of each graph, with how often.
        guards: What a call has to meet.
        materialized: Materializing fallbacks, with how often.
        effects: Aliasing and mutation, in sentences.
        calls: How often it ran; None if that was not counted.
        saved_bytes: What is kept for the backward; None with symbolic sizes, where it is that of one call.
        left_out: How many checks the wrapper does without.
        seconds: (what took them, seconds), for all that was measured.
        verdict: Whether the same call does the same in other ways, without figures; empty where that was not asked for.
    """

    name: str
    label: str
    signature: tuple[str, ...]
    error: str
    ops: Counter[str]
    nodes: Counter[str]
    guards: Counter[str]
    materialized: Counter[str]
    effects: Counter[str]
    calls: int | None
    saved_bytes: int | None
    left_out: int
    seconds: tuple[tuple[str, float], ...]
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class ReportFacts(Record):
    """A report: its title, its programs, its fallbacks in eager mode, and what was not compiled."""

    title: str
    programs: tuple[ProgramFacts, ...]
    materialized: Counter[str]
    versions: tuple[tuple[str, str], ...]
    not_compiled: Counter[str]
    breaks: Counter[str]
    slow: Counter[str]


def read_report(path: Path) -> ReportFacts:
    """Reads a report, or an explanation as a report of one program.

    Raises:
        ReportError: There is no such file, or it is no report.
    """
    expected = f"expected {path} to be the JSON that `report --json FILE` or `explain --json` writes"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{expected}; it cannot be read: {error.strerror}") from error
    except ValueError as error:  # JSON or UTF-8
        raise ReportError(f"{expected}, got a file that is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ReportError(f"{expected}, got {one_of(type(found))}")
    if "programs" not in found and "ops" in found and "guards" in found:
        found = {"title": found.get("name", ""), "programs": [found]}
    if "programs" not in found:
        keys = ", ".join(list(found)[:8]) or "none"
        raise ReportError(f"{expected}, got a dictionary without programs; its keys: {keys}")
    try:
        return ReportFacts(
            found["title"],
            tuple(map(_program, found["programs"])),
            Counter(dict(map(_materialized, found.get("materialized", ())))),
            tuple((name, version) for name, version in found.get("versions", ())),
            Counter(found.get("not_compiled", ())),
            Counter(found.get("breaks", ())),
            Counter(found.get("slow", ())),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ReportError(
            f"{expected}, got one of another release of desugar, or a part of one "
            f"({type(error).__name__}: {error}); write it anew"
        ) from error


# ------------------------------------------------------------------------------------------------ a program


def _program(data: dict[str, Any]) -> ProgramFacts:
    leaves = [*data["inputs"], *data["captured"], *({**leaf, "name": "→ result"} for leaf in data["outputs"])]
    symbolic = {extent for leaf in leaves for extent in _symbolic_extents(leaf)}
    nodes = Counter(
        f"{graph['name']}: {node['target']}" for graph in data["graphs"] for node in graph["nodes"]
    )
    return ProgramFacts(
        data["name"],
        data["label"] or data["name"],
        tuple(text for leaf in leaves for text in _leaf(leaf, "")),
        data["error"],
        Counter(_op(op) for op in data["ops"]),
        nodes,
        Counter(_without_values(guard["text"], symbolic) for guard in data["guards"]),
        Counter(dict(map(_materialized, data["materialized"]))),
        Counter([*data["aliasing"], *data["mutation"]]),
        data["calls"],
        None if data["symbols"] else data["saved_bytes"],
        len(data["left_out"]),
        tuple(_seconds(data)),
        _DETAIL.sub(r"\1", data["worth"]["verdict"]) if data["worth"] else "",
    )


def _leaf(leaf: dict[str, Any], outer: str) -> Iterator[str]:
    name = f"{outer}{leaf['name']}"
    metadata = "".join(f", {field} = {value}" for field, value in leaf["metadata"])
    extents = _without_values(", ".join(leaf["size"]), set(_symbolic_extents(leaf)))
    size = f" {leaf['dtype']}[{extents}] on {leaf['device']}" if leaf["dtype"] else ""
    grad = " requires_grad" if leaf["requires_grad"] else ""
    yield f"{name}: {leaf['kind']}{size}{grad}{metadata} {leaf['note']}".rstrip()
    for inner in leaf["inner"]:
        yield from _leaf(inner, f"{name}.")


def _symbolic_extents(leaf: dict[str, Any]) -> Iterator[str]:
    """Extents as `s0 (3 here)`, of a leaf and of its inner tensors."""
    yield from (extent for extent in leaf["size"] if extent.endswith(" here)"))
    for inner in leaf["inner"]:
        yield from _symbolic_extents(inner)


def _without_values(text: str, symbolic: Collection[str]) -> str:
    """A text with the symbols of extents alone: their values are those of the call that was traced.

    Dynamo names an object that it keeps, such as a module, by its address, which is another one in each process.
    """
    for extent in symbolic:
        text = text.replace(extent, extent.rpartition(" (")[0])
    return _ADDRESS.sub("_kept", text)


def _op(op: dict[str, Any]) -> str:
    by = "" if op["kind"] in ("plain", "inside") else f" by {op['kind']}"
    return f"{op['name']}({op['operands']}){by}"


def _materialized(found: dict[str, Any]) -> tuple[str, int]:
    place = found["place"]
    where = f": {place['text']}" if place else ""
    when = "" if found["traced"] else " in eager mode"
    return f"{found['op']} on {found['cls']}{when}{where}", found["count"]


def _seconds(data: dict[str, Any]) -> Iterator[tuple[str, float]]:
    yield "to compile", data["seconds"]
    cost = data["cost"]
    if cost is not None:
        yield "a call", cost["call"]
        yield "the graph of a call", cost["graph"]
    for way, seconds in (data["worth"] or {"ways": ()})["ways"]:
        if seconds is not None:
            yield f"a call made again, {way}", seconds
