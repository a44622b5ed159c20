"""Counts the lines of the gallery's classes, three of them beside the same class by hand: `python -m bench.lines`.

`python -m bench.lines --torchao` prints the counts of its formats beside torchao's files, where torchao is installed.

A code line holds a token that is neither a comment nor part of a docstring. The counts are of whole files (imports,
class, helpers, rules) without the script at the end: `main` and its call. Both versions of a class pass the same tests,
in `tests/examples/classes`.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parents[1] / "examples"

# The files of torchao with the same formats, which also serve other formats, GPU kernels and conversions.
_TORCHAO = {
    "float8": "quantization/quantize_/workflows/float8/float8_tensor.py",
    "mxfp8": "prototype/mx_formats/mx_tensor.py",
    "nf4": "quantization/quantize_/workflows/nf4/nf4_tensor.py",
    "nvfp4": "prototype/mx_formats/nvfp4_tensor.py",
}
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Count:
    """The code lines of one class of the gallery, declared and, where it was written, by hand."""

    name: str
    declared: int
    by_hand: int | None

    def cells(self) -> list[str]:
        """Returns the cells of a table row."""
        if self.by_hand is None:
            return [self.name, str(self.declared), "", ""]
        return [self.name, str(self.declared), str(self.by_hand), f"{self.by_hand / self.declared:.1f}"]


def count_gallery() -> list[Count]:
    """Returns the counts of all classes; those that were written by hand too come first."""
    counts = []
    for path in sorted((EXAMPLES / "classes").glob("*.py")):
        other = EXAMPLES / "by_hand" / path.name
        by_hand = count_code_lines(other.read_text()) if other.exists() else None
        counts.append(Count(path.stem, count_code_lines(path.read_text()), by_hand))
    return sorted(counts, key=lambda count: (count.by_hand is None, count.name))


def count_torchao() -> list[Count]:
    """Returns the counts of the formats beside torchao's files; none where torchao is not installed."""
    torchao = find_spec("torchao")
    if torchao is None or not torchao.submodule_search_locations:
        return []
    (folder,) = torchao.submodule_search_locations
    declared = {count.name: count.declared for count in count_gallery()}
    theirs = {name: count_code_lines((Path(folder) / path).read_text()) for name, path in _TORCHAO.items()}
    return [Count(name, declared[name], lines) for name, lines in theirs.items()]


def count_code_lines(source: str) -> int:
    """Returns the number of code lines of a module, without its docstrings and its script."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    tree = ast.parse(source)
    for node in [*filter(_is_docstring, ast.walk(tree)), *filter(_is_script, tree.body)]:
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    return len(lines)


def _is_docstring(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _is_script(node: ast.stmt) -> bool:
    match node:
        case ast.FunctionDef(name="main"):
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
    return False


def main(torchao: bool = False) -> None:
    """Prints the table."""
    table = Table(title="Code lines of the classes in examples/classes")
    for heading in ("class", "declared", "torchao" if torchao else "by hand", "ratio"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for count in count_torchao() if torchao else count_gallery():
        table.add_row(*count.cells())
    Console(width=80).print(table)


if __name__ == "__main__":
    main("--torchao" in sys.argv[1:])
