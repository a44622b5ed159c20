"""``python -m docs.prose``: reads the prose of README and docs with proselint, and with :mod:`docs.code_prose`.

Fences, tables, headings and comments are left out, and a code span is one word. Prints ``page:line: what to write`` for
each finding; the exit status is 1 if there is one. :mod:`docs.code_prose` has the rules for sentences, and reads the
docstrings, comments and messages of the packages, benchmarks, examples and tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from docs import code_prose
from docs.wrap import PAGES, ROOT, prose

# Checks of proselint that are left out: quotes and dots as in books, times of the day, "very".
LEFT_OUT = ("typography.", "dates_times.", "weasel_words.")
CODE, TARGET = re.compile(r"`[^`]*`"), re.compile(r"\]\([^)]*\)")


def prose_of(text: str) -> str:
    """The prose of a page on its own lines: all others are empty, code spans are numbered, links have no target."""
    lines = text.splitlines()
    numbers = {*prose(lines)}
    joined = "\n".join(line if number in numbers else "" for number, line in enumerate(lines))
    count = iter(range(len(joined)))
    return (
        CODE.sub(lambda span: f"code{next(count)}" + "\n" * span[0].count("\n"), TARGET.sub("]", joined))
        + "\n"
    )


def by_our_words(page: str, text: str) -> Iterator[str]:
    """Yields the findings by the list above."""
    for pattern, instead in code_prose.HABITS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield f"{page}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}: {instead}"


def by_proselint(texts: dict[str, str]) -> Iterator[str]:
    """Yields the findings of proselint."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {page: Path(folder) / page.replace("/", "--") for page in texts}
        for page, path in paths.items():
            path.write_text(texts[page])
        command = [sys.executable, "-m", "proselint", "check", *map(str, paths.values())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"proselint failed: {done.stderr}")
        for line in done.stdout.splitlines():
            file, _, said = line.partition(".md:")
            if said and not said.split(": ")[1].startswith(LEFT_OUT):
                yield f"{Path(file).name.replace('--', '/')}.md:{said}"


def find(texts: dict[str, str]) -> list[str]:
    """All findings in the text of pages."""
    plain = {page: prose_of(text) for page, text in texts.items()}
    ours = [finding for page, text in plain.items() for finding in by_our_words(page, text)]
    ours += [
        f"{page}:{line + 1}: {words!r}: {instead}"
        for page, text in plain.items()
        for line, words, instead in code_prose.by_sentences(text)
    ]
    return [*ours, *by_proselint(plain)]


if __name__ == "__main__":
    findings = find({page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES})
    findings += code_prose.find()
    print(*findings, sep="\n", end="\n" if findings else "")
    sys.exit(bool(findings))
