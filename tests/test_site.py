"""The first page of the site in headless Chromium: nothing overflows, its picture loads, and its text can be read."""

import subprocess
import sys
from pathlib import Path

import pytest

from docs.picture import find_browser

ROOT = Path(__file__).parents[1]
CHROMIUM = find_browser()

pytestmark = [
    pytest.mark.slow,  # builds all pages
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome"),
]

# Colours as [r, g, b], and the relative luminance of WCAG 2.
CONTRAST = """element => {
    const parse = text => text.match(/[\\d.]+/g).map(Number)
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0)
    let ground = element
    while (ground && parse(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement
    const pair = [getComputedStyle(element).color, getComputedStyle(ground || document.body).backgroundColor]
    const [a, b] = pair.map(parse).map(light).sort((x, y) => y - x)
    return (a + 0.05) / (b + 0.05)
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name, reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which drives a browser")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(params=[(1400, "light"), (1400, "dark"), (400, "light"), (400, "dark")], ids=str)
def page(request, site, browser):
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto((site / "index.html").as_uri())
    yield page
    page.close()


def test_nothing_overflows(page):
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("article table").count() == 2
    assert page.locator("article .table-wrapper").count() == 2  # a wide table scrolls in a box of its own


def test_the_pictures_load_and_fit(page):
    widths = page.evaluate(
        "[...document.querySelectorAll('article img')].map(i => [i.naturalWidth, i.clientWidth])"
    )
    assert len(widths) == 1
    assert all(0 < shown <= page.viewport_size["width"] and natural > 0 for natural, shown in widths)


def test_what_it_is_stands_on_the_first_screen(page):
    box = page.locator("article img").first.bounding_box()
    assert box["y"] + box["height"] <= page.viewport_size["height"]
    assert [h.strip("¶#") for h in page.locator("article h2").all_text_contents()] == [
        "What you gain",
        "A class",
        "Try it",
        "Install",
        "Where to go",
    ]


def test_text_has_contrast(page):
    for selector in ("article h1", "article p", "article td", "article td a", "article pre span"):
        assert page.locator(selector).first.evaluate(CONTRAST) >= 4.5, selector
