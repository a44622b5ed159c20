"""``python -m docs.picture``: the picture of a report in README and docs, taken of the demo's own page.

Needs ``playwright`` and Debian's ``chromium``, as the tests of the page do. ``--page report.html`` takes it of a page
that is there already.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.refresh import DEMO, ROOT

PICTURE = ROOT / "docs" / "report.png"
SELECTED = "scaled_dot_product_attention"  # the line that lights up
SIZE = {"width": 1440, "height": 900}


def make_page(folder: Path) -> Path:
    """Reports on the demo; returns the page."""
    page = folder / "report.html"
    command = [sys.executable, "-m", "desugar", "report", "--report", str(page), DEMO]
    demo = ["--", "--steps", "10", "--out", str(folder / "losses.png")]
    subprocess.run([*command, *demo], cwd=ROOT, check=True)
    return page


def take_picture(page: Path, picture: Path) -> None:
    """A picture of the first program, with a line of the source selected."""
    sync_api = importlib.import_module("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shown = browser.new_page(viewport=SIZE, color_scheme="light")
        shown.goto(f"{page.resolve().as_uri()}#program-1")
        shown.locator("[data-line]", has_text=SELECTED).click()
        shown.screenshot(path=str(picture))
        browser.close()


def main() -> None:
    """Takes the picture."""
    if "--page" in sys.argv:
        take_picture(Path(sys.argv[sys.argv.index("--page") + 1]), PICTURE)
        return
    with tempfile.TemporaryDirectory() as folder:
        take_picture(make_page(Path(folder)), PICTURE)


if __name__ == "__main__":
    main()
