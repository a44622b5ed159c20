"""The rules for sentences, which ``python -m docs.prose`` applies to pages, docstrings, comments and messages.

A code span is one word. Code blocks and indented commands are left out. Comments on neighbouring lines are one text. A
message is any string of at least five words: the text of an error, a warning, a log line or a report. A string that
Python parses is a program, not a message. A placeholder of an f-string is one word.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator, Mapping

from docs.wrap import ROOT

LIMIT = 25  # words of a sentence
# Wordings that hide the subject of a sentence, and a plain form.
RULES = {
    r"(?:\A\W*|[.;:,(—]\s+|\b(?:of|for|to|from|by|is|and|or|that|with|in|on|as|than|about|at|but"
    r"|returns?|sees?|reads?|says?|gives?)\s+)what\b(?!\s+to\b|[:,])": "name the subject",
    r"\b(?:that|those)\s+of\b": "repeat the noun, or write its genitive",
    r"\bthe\s+ones?\s+(?:that|of|which|it|they|in|with)\b": "repeat the noun",
    r"\bstands?\s+(?:for|in|on|at)\b": "represents, is",
    r"\bgives?\s+what\b": "has the result that",
    r"\bas\s+good\s+as\s+nothing\b": "almost nothing",
    r"\b(?:told|tells?)\s+(?:\w+\s+){0,4}apart\b": "distinguishes",
    r"\b(?:asks|asked|knows)\b": "calls, dispatches, reads, has",
    r"\b(?:mend(?:s|ed|ing)?|heirs?|doors?|who\s+asks)\b(?!:)": "fix, subclass, function, caller",
}
# Habits of ours, and the plain English for each.
HABITS = {
    r"(?<!there\s)\b(?:is|are)\s+no\s+(?!longer|more|less)": "is not a, has no",
    r"\bstand-ins?\b": "a placeholder, a fake tensor",
    r"\btak(?:e|es|ing|en)\s+(?:\w+\s+){0,3}apart\b": "flattens, decomposes",
}
SPAN, WORD = re.compile(r"(?::[\w:]+:)?(`+)[^`]+\1"), re.compile(r"[\w'-]+")
SPANS = re.compile(r"\bcode\d*(?:,\s+code\d*)+")  # a list of code spans is one word
BLOCK = re.compile(
    r"(?<=::\n)(?:[ \t]*\n|[ \t]+\S.*(?:\n|\Z))+|(?m:^ {4}(?:\w+=\S+ )*(?:python|make|torchrun) .*(?:\n|\Z))"
)
END = re.compile(r"(?<=[.:?!])[)\"'”*_]*\s+|\n\s*\n|\n\s*(?:[-*]|\d+\.|:) |\n(?=\s*[*\w]+: |\|)")


def texts(source: str, literals: bool = True) -> Iterator[tuple[int, str]]:
    """Yields the first line and the text of each docstring, of comments on neighbouring lines, and of each message.

    Without ``literals``, the messages of assertions are the only strings: others in a test are data, such as code or
    the expected text of an error.
    """
    tree, documented = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(first := next(iter(node.body), None), "lineno", 1), ast.get_docstring(node) or ""
            documented.add(getattr(first, "value", None))
    block, row, column = [""], 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start != (row + 1, column):
                yield row - len(block) + 1, "\n".join(block)
                block = []
            (row, column), block = token.start, [*block, token.string.lstrip("# ")]
    yield row - len(block) + 1, "\n".join(block)
    roots = [tree] if literals else [n.msg for n in ast.walk(tree) if isinstance(n, ast.Assert) and n.msg]
    for line, text in (message for root in roots for message in messages(root, documented)):
        if len(text.split()) >= 5 and not is_program(text):
            yield line, text


def is_program(text: str) -> bool:
    """Returns whether Python parses a text."""
    try:
        return bool(ast.parse(text))
    except (SyntaxError, ValueError):  # a ValueError for null bytes
        return False


def messages(node: ast.AST, documented: set[ast.AST | None]) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each string below a node, without docstrings and lists of names."""
    match node:
        case ast.JoinedStr(values=values):
            yield (
                node.lineno,
                "".join(str(v.value) if isinstance(v, ast.Constant) else "code" for v in values),
            )
            for value in values:
                if isinstance(value, ast.FormattedValue):
                    yield from messages(value.value, documented)
        case ast.Constant(value=str(text)) if node not in documented:
            yield node.lineno, text
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="split")):
            return
        case _:
            for child in ast.iter_child_nodes(node):
                yield from messages(child, documented)


def by_sentences(text: str, rules: Mapping[str, str] = RULES) -> Iterator[tuple[int, str, str]]:
    """Yields the line, the words and the advice of each finding in a text, whose lines are counted from 0."""
    findings = [
        (m.start() + re.search(r"\w", m[0]).start(), m[0], rules[rule])  # type: ignore[union-attr]
        for rule in rules
        for m in re.finditer(rule, text, re.I)
    ]
    for start, end in itertools.pairwise([0, *(m.end() for m in END.finditer(text)), len(text)]):
        if (count := len(words := WORD.findall(SPANS.sub("code", text[start:end])))) > LIMIT:
            findings.append((start, " ".join(words[:4]), f"{count} words in a sentence, at most {LIMIT}"))
    for at, words, plain in sorted(findings):
        yield text.count("\n", 0, at), " ".join(words.split()), plain


def by_rules(path: str, source: str, literals: bool = True) -> Iterator[str]:
    """Yields the findings in the text of a file, with or without its string literals."""
    for first, text in texts(source, literals):
        text = BLOCK.sub(lambda code: "\n" * code[0].count("\n"), text)
        text = SPAN.sub(lambda code: "code" + "\n" * code[0].count("\n"), text)
        for line, words, plain in by_sentences(text, RULES | HABITS):
            yield f"{path}:{first + line}: {words!r}: {plain}"


def find() -> Iterator[str]:
    """Yields all findings."""
    for package in ("subclasses", "desugar", "docs", "bench", "examples", "typing_tests", "tests"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from by_rules(path.relative_to(ROOT).as_posix(), path.read_text(), package != "tests")
