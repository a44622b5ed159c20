"""Tables of outcomes in pages of the docs: the outcome of each case, with numbered notes of error messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.wrap import wrap

END = "<!-- end -->"
LONGEST = 160  # characters of an error message

Notes = dict[str, int]


@dataclass(frozen=True, slots=True)
class PageTable:
    """The tables of one page, between two comments.

    Attributes:
        page: The page.
        begin: The comment before the tables, which names the command that writes them.
        columns: The titles of the cells.
        sections: Section -> the names of its cases.
    """

    page: Path
    begin: str
    columns: Collection[str]
    sections: Mapping[str, Iterable[str]]

    def emit(self, found: Mapping[str, Sequence[Any]], cell: Callable[[Any, Notes], str]) -> str:
        """The text of the tables; `found` has the cells of each `section: case`."""
        notes: Notes = {}
        lines = [self.begin, ""]
        for section, cases in self.sections.items():
            lines += [f"| {section} | {' | '.join(self.columns)} |", "|---" * (len(self.columns) + 1) + "|"]
            for name in cases:
                cells = found[f"{section}: {name}"]
                lines.append(f"| {name} | {' | '.join(cell(one, notes) for one in cells)} |")
            lines.append("")
        lines += [f"{number}. {note}" for note, number in notes.items()]
        return wrap("\n".join([*lines, "", END])).rstrip("\n")

    def read(self, text: str) -> str:
        """The tables in the text of the page."""
        return text[text.index(self.begin) : text.index(END) + len(END)]

    def cells(self) -> dict[str, dict[str, str]]:
        """The cells that the page shows for each `section: case`, by column."""
        rows = re.findall(r"^\| (.+) \|$", self.read(self.page.read_text()), re.MULTILINE)
        found, section = {}, ""
        for name, *cells in (row.split(" | ") for row in rows):
            if cells == list(self.columns):
                section = name
            else:
                found[f"{section}: {name}"] = dict(zip(self.columns, cells, strict=True))
        return found

    def main(self, outcomes: Callable[[list[str]], Any], emit: Callable[[Any], str]) -> None:
        """Writes the page; with words as arguments, prints what came of the cases that have one in their names."""
        words = sys.argv[1:]
        names = [f"{section}: {name}" for section, cases in self.sections.items() for name in cases]
        found = outcomes([name for name in names if not words or any(word in name for word in words)])
        if not words:
            self.write(emit(found))
            return
        for name, cells in found.items():
            print(name, *(f"    {column:20} {cell}" for column, cell in cells.items()), sep="\n")

    def write(self, section: str) -> None:
        """Replaces the tables of the page."""
        pattern = f"{re.escape(self.begin)}.*?{re.escape(END)}"
        self.page.write_text(re.sub(pattern, lambda _: section, self.page.read_text(), flags=re.DOTALL))


def outcome_cell(outcome: tuple[str, str], notes: Notes) -> str:
    """The text of an outcome, with the number of the note that has what an error said."""
    kind, said = outcome
    if not said:
        return kind or "not run"
    note = f"`{said.replace('`', '').replace('|', '/')[:LONGEST]}`"
    return f"{kind} ({notes.setdefault(note, len(notes) + 1)})"
