"""``python -m docs.subject FILE``: checks the subject of a commit message, as a hook of git.

A subject is imperative, has at most 72 characters, and names one change.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LIMIT = 72
# A pattern, and the advice where a subject matches it.
RULES = {
    rf".{{{LIMIT + 1}}}": f"write at most {LIMIT} characters",
    r"[^A-Z]": "begin with a capital letter",
    r"\S+:\s": "name no area before the verb",
    r"(?!Embed|Exceed|Feed|Need|Proceed|Seed|Speed)\w+ed\b": "write the imperative: Add, not Added",
    r"(?!Bring\b)\w+ing\b": "write the imperative: Add, not Adding",
    r"\w+[^su\W]s\b": "write the imperative: Add, not Adds",
    r".*\.$": "leave out the full stop",
    r".*(?:;|, and\b|, also\b|\band also\b)": "make a commit of each change",
}
WRITTEN_BY_GIT = re.compile(r"Merge |Revert \"|(?:fixup|squash|amend)! ")


def by_rules(subject: str) -> Iterator[str]:
    """Yields the advice for a subject."""
    if not WRITTEN_BY_GIT.match(subject):
        yield from (advice for pattern, advice in RULES.items() if re.match(pattern, subject))


if __name__ == "__main__":
    first = next(iter(Path(sys.argv[1]).read_text().splitlines()), "")
    findings = list(by_rules(first))
    print(*(f"{first!r}: {finding}" for finding in findings), sep="\n", end="\n" if findings else "")
    sys.exit(bool(findings))
