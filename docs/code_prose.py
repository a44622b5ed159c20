"""The prose of docstrings and comments, which ``python -m docs.prose`` reads too.

A code span is one word, and code blocks are left out. Comments on neighbouring lines are one text.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator

from docs.wrap import ROOT

LIMIT = 25  # words of a sentence
# Wordings that hide the subject of a sentence, and a plain form.
RULES = {
    r"(?:\A\W*|[.;:,(—]\s+|\b(?:of|for|to|from|by|is|and|or|that|with|in|on|as|than|about|at|but"
    r"|returns?|sees?|reads?|says?|gives?)\s+)what\b(?!\s+to\b|[:,])": "name the subject",
    r"\b(?:that|those)\s+of\b": "repeat the noun, or write its genitive",
    r"\bthe\s+ones?\s+(?:that|of|which|it|they|in|with)\b": "repeat the noun",
    r"\bstands?\s+for\b": "represents, is",
    r"\b(?:told|tells?)\s+apart\b": "distinguishes",
    r"\b(?:asks|asked|knows)\b": "calls, dispatches, reads, has",
}
SPAN, WORD = re.compile(r"(?::[\w:]+:)?(`+)[^`]+\1"), re.compile(r"[\w'-]+")
BLOCK = re.compile(r"(?<=::\n)(?:[ \t]*\n|[ \t]+\S.*(?:\n|\Z))+")
END = re.compile(r"(?<=[.:])\s+|\n\s*\n|\n\s*(?:[-*]|\d+\.) |\n(?=\s*[*\w]+: )")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yields the first line and the text of each docstring, and of comments on neighbouring lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(next(iter(node.body), None), "lineno", 1), ast.get_docstring(node) or ""
    block, row, column = [""], 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start != (row + 1, column):
                yield row - len(block) + 1, "\n".join(block)
                block = []
            (row, column), block = token.start, [*block, token.string.lstrip("# ")]
    yield row - len(block) + 1, "\n".join(block)


def by_rules(path: str, source: str) -> Iterator[str]:
    """Yields the findings in the text of a file."""
    for first, text in texts(source):
        text = BLOCK.sub(lambda code: "\n" * code[0].count("\n"), text)
        text = SPAN.sub(lambda code: "code" + "\n" * code[0].count("\n"), text)
        found = [(m.start(), m[0], RULES[rule]) for rule in RULES for m in re.finditer(rule, text, re.I)]
        for start, end in itertools.pairwise([0, *(m.end() for m in END.finditer(text)), len(text)]):
            if (count := len(words := WORD.findall(text[start:end]))) > LIMIT:
                found.append((start, " ".join(words[:4]), f"{count} words in a sentence, at most {LIMIT}"))
        for at, words, plain in sorted(found):
            yield f"{path}:{first + text.count(chr(10), 0, at)}: {' '.join(words.split())!r}: {plain}"


def find() -> Iterator[str]:
    """Yields all findings."""
    for package in ("subclasses", "desugar"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from by_rules(path.relative_to(ROOT).as_posix(), path.read_text())
