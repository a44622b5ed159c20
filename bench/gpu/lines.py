"""Lines of JSON, one for each figure: written when it is measured, and read by a second run and by the report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

MICROSECONDS = "µs a call"
TIME, HOST, PEAK = "time", "host time", "peak memory"


@dataclass(frozen=True)
class Line:
    """One figure, one failure, or the state of a stage.

    Attributes:
        stage: The stage.
        group: The subjects that were measured in turns; the report makes one table of them.
        subject: The name of a subject; empty for the state of a stage.
        figure: The name of the figure; empty for a failure and for the state of a stage.
        value: The median of the rounds.
        unit: The unit of the value.
        low: The lower quartile.
        high: The upper quartile.
        rounds: The number of rounds.
        ratio: The value over the baseline's value in the same turns.
        text: A fact in words, such as a version.
        error: The reason why there is no figure, in one line.
        state: The state of a stage: `done`, `absent`, `crashed`, `hung` or `not run`; `begun` before a risky step.
        machine: The device and the versions, as one text.
        rehearsal: Whether the line comes from a CPU in place of a GPU.
    """

    stage: str
    group: str = ""
    subject: str = ""
    figure: str = ""
    value: float | None = None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    rounds: int | None = None
    ratio: float | None = None
    text: str = ""
    error: str = ""
    state: str = ""
    machine: str = ""
    rehearsal: bool = False

    def as_json(self) -> str:
        """Returns the line without its empty fields."""
        fields = {
            name: value
            for name, value in asdict(self).items()
            if value is not None and value != "" and value is not False
        }
        return json.dumps(fields, ensure_ascii=False)


_NAMES = {field.name for field in fields(Line)}


def parse_line(text: str) -> Line | None:
    """Returns the line of a text; None if it is incomplete, such as the last line of a process that was killed."""
    try:
        values: Any = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(values, dict) or "stage" not in values or not values.keys() <= _NAMES:
        return None
    return Line(**values)


def read_lines(path: Path) -> list[Line]:
    """Returns the whole lines of a file; an empty list if the file does not exist."""
    texts = path.read_text().splitlines() if path.exists() else []
    return [line for text in texts if (line := parse_line(text))]


def of_machine(lines: Iterable[Line], machine: str) -> list[Line]:
    """Returns the lines that were measured on this device with these versions."""
    return [line for line in lines if line.machine == machine]


def first_words(error: object) -> str:
    """Returns the kind and the beginning of an error in one line of at most 300 characters."""
    kind = type(error).__name__ if isinstance(error, BaseException) else ""
    return ": ".join(filter(None, [kind, " ".join(str(error).split())]))[:300]
