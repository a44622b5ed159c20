"""``python -m docs.wrap``: wraps the prose of README and docs at 120 columns.

Only a paragraph that has a longer line is wrapped anew. Fences, tables, headings, comments and HTML stay as they are.
No line gets to start with a mark that has a meaning there (a list, a quotation). A code span is broken up only if it is
longer than a line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = 120
PAGES = [*(page for folder in (".", "docs", "bench") for page in sorted((ROOT / folder).glob("*.md")))]

MARKER = re.compile(r"(\s*)([-*+]|\d+\.|:)(\s+)")  # of a list item or of a definition
SPAN = re.compile(r"[^\s`]*(?:`+[^`]+`+[^\s`]*)+|\S+")  # a word, code spans in it included
WITH_A_MEANING = re.compile(r"([-+*>#:|]|\d+[.)])(\s|$)|[>|]|<!--|```|#{1,6} ")

# ---- which lines are prose ---------------------------------------------------------------------------------


def prose(lines: list[str]) -> Iterator[int]:
    """The numbers of lines that are prose: outside of fences, and neither table, heading, comment nor HTML."""
    fence = ""
    for number, line in enumerate(lines):
        text = line.strip()
        if fence:
            fence = "" if text.startswith(fence) and not text.strip("`:") else fence
        elif text.startswith(("```", ":::")):
            fence = text[: len(text) - len(text.lstrip(text[0]))]
        elif text and not text.startswith(("|", "#", "<!--", "<", "![")):
            yield number


def too_long(lines: list[str]) -> list[int]:
    """The numbers of lines of prose that are longer than a line may be, and could be shorter."""
    return [
        n
        for n in prose(lines)
        if len(lines[n]) > COLUMNS and len(MARKER.sub("", lines[n], count=1).split()) > 1
    ]


# ---- wrapping ----------------------------------------------------------------------------------------------


def _words(text: str, columns: int) -> list[str]:
    """Returns the pieces that stay together: words, short code spans, and a mark with the word before it."""
    words: list[str] = []
    for span in SPAN.findall(text):
        for word in [" ".join(span.split())] if len(span) <= columns else span.split():
            if words and WITH_A_MEANING.match(word):
                words[-1] += f" {word}"
            else:
                words.append(word)
    return words


def _paragraphs(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First line and end of each paragraph of prose; a list item is one."""
    first = last = None
    for number in prose(lines):
        if first is None or number != last + 1 or MARKER.match(lines[number]):
            if first is not None:
                yield first, last + 1
            first = number
        last = number
    if first is not None:
        yield first, last + 1


def wrap_paragraph(lines: list[str]) -> list[str]:
    """One paragraph, its first line's marker and the indentation of the others kept."""
    marker = MARKER.match(lines[0])
    head = marker[0] if marker else re.match(r"\s*", lines[0])[0]
    indent = " " * len(head)
    words = _words("\n".join([lines[0][len(head) :], *lines[1:]]), COLUMNS - len(indent))
    wrapped, line = [], head + words[0]
    for word in words[1:]:
        if len(line) + 1 + len(word) <= COLUMNS:
            line += f" {word}"
        else:
            wrapped.append(line)
            line = indent + word
    return [*wrapped, line]


def wrap(text: str) -> str:
    """A page whose paragraphs with a line that is too long are wrapped."""
    lines = text.splitlines()
    long = set(too_long(lines))
    for first, end in reversed(list(_paragraphs(lines))):
        if long & set(range(first, end)):
            lines[first:end] = wrap_paragraph(lines[first:end])
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for page in [Path(name) for name in sys.argv[1:]] or PAGES:
        page.write_text(wrap(page.read_text()))
