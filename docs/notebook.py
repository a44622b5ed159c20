"""Runs the code cells of a notebook from top to bottom, and compares their output with the output in the notebook.

The cells become the Python blocks of a page (see ``docs/blocks.py``), so no kernel is needed. A cell shows its output
by ``print``. ``python -m docs.notebook`` writes what the cells print into ``examples/tour.ipynb``.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from docs.blocks import run_page

TOUR = Path(__file__).parents[1] / "examples" / "tour.ipynb"


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cells(notebook: dict[str, Any], folder: Path) -> list[str]:
    """Returns the output of each code cell; the cells run as one program in `folder`."""
    page = folder / "notebook.md"
    page.write_text(
        "".join(f"```python\n{''.join(cell['source'])}\n```\n\n" for cell in code_cells(notebook))
    )
    with contextlib.chdir(folder):  # a cell writes a file
        printed = run_page(page, folder)
    return [text.strip("\n") + "\n" if text.strip() else "" for text in printed]


def shown(cell: dict[str, Any]) -> str:
    """Returns the output that a notebook has below a cell."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def with_outputs(notebook: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    """Returns the notebook with other outputs, and its cells numbered in order."""
    updated = json.loads(json.dumps(notebook))
    for number, (cell, text) in enumerate(zip(code_cells(updated), printed, strict=True), 1):
        cell["execution_count"] = number
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return updated


def refresh(path: Path) -> None:
    """Writes what the cells print into a notebook."""
    notebook = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        printed = run_cells(notebook, Path(folder))
    path.write_text(json.dumps(with_outputs(notebook, printed), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    refresh(TOUR)
