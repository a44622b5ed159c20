"""The page in headless Chromium: it opens without an error, lights up counterparts, searches, and stays quick."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import desugar
from desugar.explain.collector import Collector
from desugar.explain.records import Program, Report, Worth
from desugar.explain.render import render_page
from docs.picture import find_browser, take_picture
from tests.desugar.explain.subjects import layer, make_weight, make_x
from tests.desugar.explain.test_fold import Stack

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which drives a browser")
CHROMIUM = find_browser()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome")

# Without these a fresh profile looks for updates and the like.
FLAGS = (
    "no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"
)


@pytest.fixture(scope="module")
def report():
    collector, compiled, w = Collector(), desugar.compile(layer, backend="eager"), make_weight()
    with collector.collecting():
        compiled(make_x(), w).sum().backward()
        compiled(make_x(5), w)
    return collector.report("test report")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        flags = [f"--{flag}" for flag in FLAGS.split()]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, report, tmp_path):
    """A function that opens the page; when the test ends, there was no error and nothing was fetched."""
    errors, urls, pages = [], [], []

    def open_page(shown=report, width=1300, **options):
        path = tmp_path / "report.html"
        path.write_text(render_page(shown), encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield open_page
    assert errors == []
    assert all(url.startswith("file:") for url in urls)
    for page in pages:
        page.close()


def keep(page, name):
    """Saves a screenshot if DESUGAR_SCREENSHOTS names a folder."""
    if folder := os.environ.get("DESUGAR_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{folder}/{name}.png")


def test_the_overview_has_a_bar_for_each_program(opened):
    page = opened()
    assert page.locator(".program").count() == 2
    assert page.locator(".program .timed .bar").count() == 2
    assert "x.size(0): expected 2, got 5" in page.locator(".program").nth(1).inner_text()
    assert "z = w * 2" in page.locator("table").inner_text()
    keep(page, "overview")


def test_a_line_an_op_and_a_node_light_up_together(opened):
    page = opened()
    page.locator(".program").first.click()
    page.locator("[data-line]", has_text="F.linear").click()
    lit = page.locator("[data-of].on").all_inner_texts()
    assert any("mm.default" in text for text in lit)
    assert "torch.nn.functional.linear" in page.locator("[data-op].on").first.inner_text()
    keep(page, "program")
    page.locator("[data-of]", has_text="sum.default").first.click()
    assert "torch.Tensor.sum" in page.locator("[data-op].on").inner_text()
    assert "z.sum()" in page.locator("[data-line].on").inner_text()
    page.locator("[data-op]", has_text="torch.Tensor.mul").first.click()
    assert "w * 2" in page.locator("[data-line].on").inner_text()
    assert page.locator("[data-op].on").count() == 2  # the op, and the ops that ran inside


def test_what_was_not_compiled_has_a_page_too(opened, report):
    failed = Program(
        "broken", "first call", "eager", 0.1, error="it <depends> on data\n  instead: torch.where"
    )
    page = opened(replace(report, programs=(failed, *report.programs)))
    assert "it <depends> on data" in page.locator(".program").first.inner_text()
    page.locator(".program").first.click()
    page.wait_for_selector("h1:has-text('broken')")
    assert "instead: torch.where" in page.locator("main").inner_text()


def test_search_finds_in_programs_and_in_the_overview(opened):
    page = opened()
    page.keyboard.press("/")
    page.keyboard.type("no such thing")
    assert page.locator(".program:visible").count() == 0
    page.fill("#search", "rule_for_linear")
    assert page.locator("#found").inner_text() == "2 programs"
    page.keyboard.press("Enter")
    page.wait_for_selector(".panes")
    assert page.locator(".hit").count() > 0
    page.fill("#search", "relu")
    page.keyboard.press("Enter")
    assert page.locator("#found").inner_text().startswith("1 of ")


def test_everything_is_reached_by_keys(opened):
    page = opened()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".panes")
    assert page.url.endswith("#program-2")
    page.keyboard.press("j")
    assert page.locator("[data-op].on").count() == 1
    page.keyboard.press("[")
    page.wait_for_url("**#program-1")
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")  # while it is open, keys are its own
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.wait_for_selector("#programs")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_theme_is_that_of_the_system_and_can_be_changed(opened, scheme):
    page = opened(color_scheme=scheme)
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == scheme
    keep(page, scheme)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    assert page.evaluate(theme) != scheme
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


@pytest.mark.parametrize("place", ["", "#program-1"])
def test_a_phone_needs_no_sideways_scrolling(opened, place):
    page = opened(width=360)
    page.evaluate(f"location.hash = '{place}'")
    page.wait_for_selector(".panes" if place else "#programs")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    keep(page, f"phone{place.strip('#')}")


@pytest.fixture(scope="module")
def deep():
    """An explanation of a model of equal layers."""
    return desugar.explain(Stack(layers=9), torch.ones(2, 3))


def test_repeated_layers_are_folded_and_open(opened, deep):
    page = opened(Report("deep", (deep.program,)))
    card = page.locator("section", has=page.locator("h2", has_text="Signature"))
    fold = card.locator(".fold")
    assert fold.count() == 1 and "\u00d7 9 self.layers[0] … self.layers[8]" in fold.inner_text()
    second = card.get_by_text("self.layers[1].up.weight", exact=True)
    assert not second.is_visible()
    keep(page, "folded")
    fold.locator("button").click()
    assert second.is_visible() and fold.locator("button").get_attribute("aria-expanded") == "true"
    fold.locator("button").click()
    assert not second.is_visible()


def test_search_and_selection_open_what_is_folded(opened, deep):
    page = opened(Report("deep", (deep.program,)))
    page.fill("#search", "self.layers[5].down.bias")
    page.keyboard.press("Enter")
    assert page.locator(".hit:visible").count() > 0
    page.fill("#search", "")
    page.locator("[data-line]", has_text="self.down").click()
    lit = page.locator("[data-op].on")
    assert lit.count() == 4 * 9 and lit.first.is_visible() and not lit.last.is_visible()
    page.keyboard.press("Escape")
    for _ in range(4):
        page.keyboard.press("j")  # steps over what is folded
        assert page.locator("[data-op].on").first.is_visible()


def test_guards_of_layers_are_one_block_with_their_number(opened, deep):
    page = opened(Report("deep", (deep.program,)))
    guards = page.locator("section", has=page.locator("h2", has_text="A call runs this"))
    assert (
        "checks of Dynamo's" in guards.inner_text() and guards.locator(".row .n").first.inner_text().isdigit()
    )
    block = guards.locator(".fold", has_text="self.layers[0 … 8].up.weight").first
    assert "\u00d7 9" in block.inner_text()
    block.locator("button").click()
    assert block.get_by_text("self.layers[3].up.weight").is_visible()


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("place", ["", "#program-1"])
def test_every_part_of_the_time_bar_has_a_label(opened, width, place):
    page = opened(width=width)
    page.evaluate(f"location.hash = '{place}'")
    page.wait_for_selector(".panes" if place else "#programs")
    parts, labels = page.locator(".bar.tall i"), page.locator(".bar.tall + .legend > span")
    colours = [part.evaluate("node => getComputedStyle(node).backgroundColor") for part in parts.all()]
    assert len(colours) > 5 and len(set(colours)) == len(colours), "each part has a colour of its own"
    named = [
        one.locator("i").evaluate("node => getComputedStyle(node).backgroundColor") for one in labels.all()
    ]
    assert named == colours
    for one in labels.all():
        box = one.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    text = page.locator(".bar.tall + .legend").inner_text()
    assert "trace" in text and "the rest" in text and "%" in text
    keep(page, f"bar-{width}{place.strip('#')}")


def test_programs_of_one_function_have_names_of_their_own(opened):
    names = opened().locator(".program .name").all_inner_texts()
    assert names == ["layer, x.size(0) = 2", "layer, x.size(0) = any"]


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_answer_stands_in_the_overview_and_the_reason_why_there_is_none_in_the_program(
    opened, report, width, scheme
):
    (first, second) = report.programs
    ways = (("eager", 4e-3), ("torch.compile", None), ("desugar.compile", 1e-3))
    worth = Worth(
        ways, "2 calls compared", "yes, 4 times faster than eager", (("eager", 2**20),), ("slow: why",)
    )
    shown = replace(first, worth=worth), replace(second, no_worth="its arguments share memory")
    page = opened(
        replace(report, programs=shown, breaks=("a.py:3: y: a branch",)), width=width, color_scheme=scheme
    )
    answer = "yes, 4 times faster than eager · eager 4.00 ms, torch.compile failed, desugar.compile 1.00 ms"
    sync_api.expect(page.locator(".program .others")).to_have_text([answer], use_inner_text=True)
    cards = [page.locator(selector).bounding_box() for selector in ("#programs", "#programs + .card")]
    assert cards[1]["y"] - cards[0]["y"] - cards[0]["height"] > 4, "cards do not touch"
    for text in page.locator(".share small").all():
        assert text.evaluate("node => node.scrollWidth <= node.clientWidth"), "no figure is cut"
    keep(page, f"worth-{width}-{scheme}")
    page.locator(".program").first.click()
    assert page.locator(".worth .answer").inner_text() == "yes, 4 times faster than eager"
    for part in ("4.00 ms — 4.0 \u00d7 desugar's, 1.00 MiB at the peak", "Loss: slow: why."):
        assert part in page.locator(".worth").inner_text()
    page.evaluate("location.hash = '#program-2'")
    page.wait_for_selector("h1:has-text('any')")
    assert "Not timed in other ways: its arguments share memory." in page.locator(".worth").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_notebook_shows_explanations_in_frames_of_their_own(browser, deep, tmp_path):
    errors, page = [], browser.new_page(viewport={"width": 900, "height": 900})
    page.on("pageerror", lambda error: errors.append(str(error)))
    style = "<style>h1 { color: rgb(1, 2, 3); }</style>"
    path = tmp_path / "notebook.html"
    path.write_text(f"{style}<h1>mine</h1>{deep._repr_html_() * 2}<pre class='card'>mine</pre>")
    page.goto(path.as_uri())
    assert page.locator("iframe").count() == 2
    frame = page.frame_locator("iframe").first
    assert frame.locator("h1").inner_text() == "Stack"
    assert frame.locator("h1").evaluate("node => getComputedStyle(node).color") != "rgb(1, 2, 3)"
    assert frame.locator("nav").count() == 0, "there is one program"
    frame.locator("[data-line]", has_text="self.down").click()
    assert frame.locator("[data-op].on").count() == 4 * 9
    frame.locator("#theme").click()
    read = "selector => [getComputedStyle(document.querySelector(selector))].map(s => s.color + s.borderRadius)[0]"
    assert page.evaluate(read, "h1") == "rgb(1, 2, 3)0px" and page.evaluate(read, ".card").endswith(")0px")
    assert errors == []
    keep(page, "notebook")
    page.close()


def test_the_docs_picture_shows_a_selected_line(browser, report, tmp_path):
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(render_page(report), encoding="utf-8")
    take_picture(browser, page, picture, "F.linear")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_200_programs_stay_smooth(opened, report):
    page = opened(replace(report, programs=report.programs * 100))
    assert page.locator(".program").count() == 200
    script = """() => {
        const times = [], box = document.getElementById("search"), start = () => performance.now();
        for (const query of ["l", "la", "layer", ""]) {
            const at = start(); box.value = query; box.dispatchEvent(new Event("input"));
            document.body.offsetHeight; times.push(start() - at);
        }
        for (const n of [7, 77, 177]) {
            const at = start(); location.hash = `#program-${n}`; route();
            document.body.offsetHeight; times.push(start() - at);
        }
        const at = start(); location.hash = ""; route(); document.body.offsetHeight; times.push(start() - at);
        return times;
    }"""
    assert max(page.evaluate(script)) < 500  # milliseconds; a tenth of it on an idle machine
