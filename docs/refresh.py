"""``make readme``: the demo's table and picture, the first page's table, and every output of pages and notebook.

The demo's table is written to ``bench/results/demo.md``, which a page includes, and the first page's table and picture
come from files (see ``docs/gains.py``). Everything else is a fence under ``<!-- output -->`` (see ``docs/blocks.py``).
``python -m docs.refresh --pages`` leaves the demo out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from docs import gains, notebook
from docs.blocks import refresh_page

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DEMO = "examples/train_ragged_lm.py"
PICTURE = "docs/train_ragged_lm.png"
CAPTION = "Loss curves of the five ways, which lie on one another, and their step times"
TABLE = ROOT / "bench" / "results" / "demo.md"


def run_demo() -> str:
    """Runs the demo, which saves the picture; returns its table, the machine, and the picture."""
    command = [sys.executable, DEMO, "--out", PICTURE]
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    out = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    table = "\n".join(line.rstrip() for line in out.stdout.rstrip().splitlines())
    where = f"Measured with PyTorch {torch.__version__} on {os.cpu_count()} CPU cores."
    return f"```text\n{table}\n```\n\n{where}\n\n![{CAPTION}](../../{PICTURE})\n"


def _refresh(page: Path, folder: Path) -> int:
    torch.compiler.reset()  # else sizes that differ from an earlier run would be symbols
    return refresh_page(page, folder)


def main() -> None:
    """Refreshes what the arguments ask for."""
    if "--pages" not in sys.argv:
        TABLE.write_text(run_demo())
    gains.write()
    notebook.refresh(notebook.TOUR)
    with tempfile.TemporaryDirectory() as folder:
        for page in [README, *sorted((ROOT / "docs").glob("*.md"))]:
            stale = _refresh(page, Path(folder))
            if stale:  # a longer output moves the lines that a later one names
                _refresh(page, Path(folder))
            print(f"{page.relative_to(ROOT)}: {stale} outputs refreshed")


if __name__ == "__main__":
    main()
