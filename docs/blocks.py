"""Runs the Python of a Markdown page, and compares its output with the output on the page.

A page's ```` ```python ```` fences are one program, run from top to bottom. A fence under the comment
``<!-- output -->`` shows what the fence before it printed; ``...`` stands for any text there, as in
doctest. The comment is invisible on the page, and a fence of output may name any language, so generated
source is highlighted. It lies between ``<!-- fmt: off -->`` and ``<!-- fmt: on -->``, since ruff formats the Python
of a page. The program keeps the page's line numbers, so a traceback names the page's own lines.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

OUTPUT = "<!-- output -->"
SEPARATOR = "\x1e"

# ---- page → blocks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fence: its language, the lines between its ticks, and the comment above it that marks output."""

    language: str
    first: int  # index of the first line inside
    last: int  # index of the closing ticks
    is_output: bool

    def is_program(self) -> bool:
        """Returns whether this fence runs."""
        return self.language == "python" and not self.is_output


def collect_blocks(lines: list[str]) -> list[Block]:
    """The fences of a page in order."""
    blocks, opened = [], None
    for number, line in enumerate(lines):
        if opened is not None and line.rstrip() == "```":
            above = lines[opened - 1].strip() if opened else ""
            language = lines[opened].removeprefix("```").strip()
            blocks.append(Block(language, opened + 1, number, above == OUTPUT))
            opened = None
        elif opened is None and line.startswith("```"):
            opened = number
    return blocks


# ---- blocks → what they print ------------------------------------------------------------------------------


def emit_program(lines: list[str], blocks: list[Block]) -> str:
    """The page as one module of the same line numbers; a separator is printed where a block ends."""
    program = [""] * len(lines)
    for block in blocks:
        if block.is_program():
            program[block.first : block.last] = lines[block.first : block.last]
            program[block.last] = f"print({SEPARATOR!r})"
    return "\n".join(program) + "\n"


def run_page(page: Path, folder: Path) -> list[str]:
    """Returns the output of each block of a page; the program is written to `folder` and imported from there.

    An error that names a line of the program then names the line of the page.
    """
    lines = page.read_text().splitlines()
    path = folder / f"page_{page.stem}.py"
    path.write_text(emit_program(lines, collect_blocks(lines)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # annotations, pickling and Dynamo look a class's module up by name
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        spec.loader.exec_module(module)
    texts = printed.getvalue().replace(str(path), page.name).split(SEPARATOR + "\n")[:-1]
    return [text.rstrip() + "\n" for text in texts]


# ---- outputs, on the page and printed -----------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """A fence of output, and the output of the block before it."""

    block: Block
    want: str
    got: str

    def agrees(self) -> bool:
        """Returns whether they are the same, up to ``...``."""
        return _agree(self.want, self.got)

    def renewed(self) -> list[str]:
        """The lines that were printed, in the words of those shown lines that agree with them up to ``...``."""
        open_ended = [
            line for line in self.want.splitlines() if line.replace("...", "").strip() and "..." in line
        ]
        return [
            next((line for line in open_ended if _agree(line, printed)), printed)
            for printed in self.got.rstrip().splitlines()
        ]


def _agree(want: str, got: str) -> bool:
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS | doctest.DONT_ACCEPT_TRUE_FOR_1)


def compare_outputs(page: Path, folder: Path) -> list[Shown]:
    """Returns every fence of output on a page, with the printed output."""
    lines = page.read_text().splitlines()
    blocks = collect_blocks(lines)
    printed = dict(zip(filter(Block.is_program, blocks), run_page(page, folder), strict=True))
    return [
        Shown(block, want="\n".join(lines[block.first : block.last]).rstrip() + "\n", got=printed[before])
        for before, block in pairwise(blocks)
        if block.is_output
    ]


def refresh_page(page: Path, folder: Path) -> int:
    """Rewrites the outputs of a page that no longer agree; returns how many."""
    lines = page.read_text().splitlines()
    stale = [shown for shown in compare_outputs(page, folder) if not shown.agrees()]
    for shown in reversed(stale):
        lines[shown.block.first : shown.block.last] = shown.renewed()
    if stale:
        page.write_text("\n".join(lines) + "\n")
    return len(stale)
