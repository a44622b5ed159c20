"""The page as a document: one file, its data whole, nothing fetched."""

import html.parser
import json
import re
import shutil
import subprocess

import pytest

import desugar
from desugar.explain.records import Program, Report
from desugar.explain.render import render_page
from tests.desugar.explain.subjects import layer, make_weight, make_x
from tests.tables import giving

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Page(html.parser.HTMLParser):
    """Checks that elements close, and keeps the text of each script and style."""

    def __init__(self, text):
        super().__init__()
        self.open, self.parts, self.attributes = [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            tag, attrs = self.open[-1]
            name = attrs.get("id", tag)
            self.parts[name] = self.parts.get(name, "") + data


@pytest.fixture(scope="module")
def explanation():
    return desugar.explain(layer, make_x(), make_weight())


@pytest.fixture(scope="module")
def page(explanation):
    return render_page(Report("a title", (explanation.program,)))


def data_of(text):
    return json.loads(Page(text).parts["data"])


def values_of(text, wanted):
    return {value for _, name, value in Page(text).attributes if name == wanted}


def declared(text):
    """The names that the script declares; a browser refuses one that declares a name twice."""
    return re.findall(
        r"^(?:async )?(?:const|let|var|function|class) (\w+)", Page(text).parts["script"], re.MULTILINE
    )


FETCHES = r"https?:|@import|url\(|import\(|fetch\(|XMLHttpRequest"

# Each case: a function that reads the page, and the expected value.
OF_THE_PAGE = {
    "its title": (
        lambda page: (data_of(page)["title"], Page(page).parts["title"]),
        ("a title", "a title - desugar"),
    ),
    "nothing that is fetched": (
        lambda page: {name for _, name, _ in Page(page).attributes} & {"src", "srcset", "action"},
        set(),
    ),
    "links": (lambda page: values_of(page, "href") - {"#", "data:,"}, set()),
    "its style and its script fetch nothing": (
        lambda page: [re.findall(FETCHES, Page(page).parts[part]) for part in ("style", "script")],
        [[], []],
    ),
    "the width of a phone": (
        lambda page: ("meta", "content", "width=device-width, initial-scale=1") in Page(page).attributes,
        True,
    ),
    "folds of each program are beside its data": (
        lambda page: [
            {"ops", "graphs", "captured", "guards"} - set(folds)
            for folds in json.loads(Page(page).parts["folds"])
        ],
        [set()],
    ),
    "folds of guards": (
        lambda page: (
            sum(len(group["guards"]) for group in json.loads(Page(page).parts["folds"])[0]["guards"]) > 5
        ),
        True,
    ),
    "no name of the script is declared twice": (
        lambda page: (len(declared(page)) > 40, len(declared(page)) - len(set(declared(page)))),
        (True, 0),
    ),
}
test_what_the_page_holds = giving(OF_THE_PAGE, "page")


def test_it_holds_the_data(page, explanation):
    assert data_of(page)["programs"][0] == json.loads(explanation.to_json())


@pytest.mark.parametrize("hostile", ["</script><b>", "<!-- <script>", "a & b", "$title ${x}", "\u2028"])
def test_hostile_text_stays_text(hostile):
    data = data_of(render_page(Report(hostile, (Program(hostile, hostile, "eager", 0.0),))))
    assert data["title"] == data["programs"][0]["name"] == hostile


def test_a_frame_holds_the_page_and_is_of_another_origin(explanation):
    frame = Page(explanation._repr_html_())
    attributes = {name: value for tag, name, value in frame.attributes if tag == "iframe"}
    assert len(attributes) == len(frame.attributes)
    assert data_of(attributes.pop("srcdoc"))["programs"][0] == json.loads(explanation.to_json())
    assert (attributes["sandbox"], attributes["title"]) == ("allow-scripts", "Explanation of layer")
    assert "src" not in attributes


def test_it_is_written_to_a_path(explanation, tmp_path):
    assert (
        explanation.to_html(tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    )


@pytest.mark.slow
def test_it_stays_small_enough_for_200_programs(explanation):
    one = len(render_page(Report("t", (explanation.program,))))
    many = len(render_page(Report("t", (explanation.program,) * 200)))
    assert many < 200 * one and many < 20e6


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which reads JavaScript")
def test_the_script_can_be_read(explanation, tmp_path):
    path = tmp_path / "page.js"
    path.write_text(Page(explanation._page()).parts["script"])
    done = subprocess.run(["node", "--check", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
