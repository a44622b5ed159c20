"""``python -m docs.picture``: the picture of a report in the docs, taken of the demo's own page.

Needs ``playwright`` and Chromium or Chrome, as the tests of the page do. ``--page report.html`` takes it of a page
that is there already.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from docs.refresh import DEMO, ROOT

PICTURE = ROOT / "docs" / "report.png"
SELECTED = "scaled_dot_product_attention"  # the line that lights up
SIZE = {"width": 1440, "height": 900}


def find_browser() -> str | None:
    """The Chromium or Chrome of this machine; None if it has none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


def make_page(folder: Path) -> Path:
    """Reports on the demo; returns the page."""
    page = folder / "report.html"
    command = [sys.executable, "-m", "desugar", "report", "--report", str(page), DEMO]
    demo = ["--steps", "10", "--out", str(folder / "losses.png")]
    subprocess.run([*command, *demo], cwd=ROOT, check=True)
    return page


def take_picture(browser: Any, page: Path, picture: Path, selected: str) -> None:
    """A picture of a page's first program, with the line of the source selected that has this text."""
    shown = browser.new_page(viewport=SIZE, color_scheme="light")
    shown.goto(f"{page.resolve().as_uri()}#program-1")
    shown.locator("[data-line]", has_text=selected).first.click()
    shown.screenshot(path=str(picture), animations="disabled")
    shown.close()


def main() -> None:
    """Takes the picture."""
    sync_api = importlib.import_module("playwright.sync_api")
    with tempfile.TemporaryDirectory() as folder, sync_api.sync_playwright() as playwright:
        given = sys.argv[sys.argv.index("--page") + 1 :] if "--page" in sys.argv else []
        page = Path(given[0]) if given else make_page(Path(folder))
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        take_picture(browser, page, PICTURE, SELECTED)
        browser.close()


if __name__ == "__main__":
    main()
