"""Renders an explanation in a terminal, and a report as one HTML page."""

from __future__ import annotations

import html
import importlib
import importlib.util
import io
import json
import sys
from importlib import resources
from string import Template

from desugar.explain.fold import fold_program
from desugar.explain.records import Program, Report
from desugar.explain.text import render_text, sections

# -------------------------------------------------------------------------------------------------- a terminal


def render(program: Program) -> str:
    """Returns the text to print, with colours if standard output is a terminal and rich is installed."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return render_rich(program)
    return render_text(program)


def render_rich(program: Program, width: int | None = None) -> str:
    """Returns the sections as coloured text, with Python code highlighted."""
    # rich is optional, so it is imported by name.
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


# ------------------------------------------------------------------------------------------------------ a page


def render_page(report: Report) -> str:
    """Returns the HTML text of a report's page."""
    template = Template(_asset("page.html"))
    folds = [fold_program(program).to_dict() for program in report.programs]
    return template.substitute(
        title=html.escape(f"{report.title} - desugar"),
        style=_asset("page.css"),
        script=_asset("cards.js") + _asset("page.js"),
        data=embed(report.to_dict()),
        folds=embed(folds),
    )


def render_frame(page: str, title: str) -> str:
    """Returns a sandboxed iframe that holds a page; the frame has an origin of its own and fetches nothing."""
    return (
        f'<iframe title="{html.escape(title)}" sandbox="allow-scripts" loading="lazy" '
        f'style="width: 100%; height: 42rem; border: 0; resize: vertical; overflow: auto" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


def embed(data: object) -> str:
    """Returns data as JSON for a script element; no character in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files("desugar.explain").joinpath("assets", name).read_text(encoding="utf-8")
