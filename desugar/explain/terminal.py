"""An explanation in a terminal: with rich where that is installed and somebody looks, as plain text otherwise."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys

from desugar.explain.records import Program
from desugar.explain.text import render_text, sections


def render(program: Program) -> str:
    """The text to print: coloured if standard output is a terminal and rich is installed."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return render_rich(program)
    return render_text(program)


def render_rich(program: Program, width: int | None = None) -> str:
    """The sections under rules, Python highlighted."""
    # Optional, so imported by name: the package itself needs torch and optree only.
    console_module, rule, syntax, text = (
        importlib.import_module(f"rich.{name}") for name in ("console", "rule", "syntax", "text")
    )
    file = io.StringIO()
    console = console_module.Console(file=file, force_terminal=True, width=width)
    for section in sections(program):
        console.print(rule.Rule(section.title, align="left", style="cyan"))
        if section.language == "python":
            shown = syntax.Syntax(section.body, "python", background_color="default", word_wrap=True)
        else:
            shown = text.Text(section.body)
            shown.highlight_regex(r"^\S.*:\d+: .*$", "bold")
            shown.highlight_regex(r"→.*$", "green")
            shown.highlight_regex(r"materialize\w*", "red")
            shown.highlight_regex(r"\((?:constant|dynamic)\)", "dim")
        console.print(shown, soft_wrap=True)
    return file.getvalue()
