"""A report as one page that needs no other file and no network: text, style, script and data in one."""

from __future__ import annotations

import html
import json
from importlib import resources
from string import Template

from desugar.explain.records import Report


def render_page(report: Report) -> str:
    """The page as text."""
    template = Template(_asset("page.html"))
    return template.substitute(
        title=html.escape(f"{report.title} - desugar"),
        style=_asset("page.css"),
        script=_asset("page.js"),
        data=embed(report.to_dict()),
    )


def embed(data: object) -> str:
    """JSON that may stand inside of a script element: nothing in it ends the element or opens a comment."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files("desugar.explain").joinpath("assets", name).read_text(encoding="utf-8")
