"""The page as a document: one file, its data whole, nothing fetched."""

from __future__ import annotations

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


def test_it_is_well_formed_and_holds_the_data(page, explanation):
    parsed = Page(page)
    data = json.loads(parsed.parts["data"])
    assert data["title"] == "a title"
    assert data["programs"][0] == json.loads(explanation.to_json())
    assert parsed.parts["title"] == "a title - desugar"


def test_nothing_is_fetched(page):
    parsed = Page(page)
    names = {name for _, name, _ in parsed.attributes}
    assert not names & {"src", "srcset", "action"}
    assert {value for _, name, value in parsed.attributes if name == "href"} <= {"#", "data:,"}
    for part in ("style", "script"):
        assert not re.search(r"https?:|@import|url\(|import\(|fetch\(|XMLHttpRequest", parsed.parts[part])
    assert ("meta", "content", "width=device-width, initial-scale=1") in parsed.attributes  # of a phone


@pytest.mark.parametrize("hostile", ["</script><b>", "<!-- <script>", "a & b", "$title ${x}", "\u2028"])
def test_hostile_text_stays_text(hostile):
    text = render_page(Report(hostile, (Program(hostile, hostile, "eager", 0.0),)))
    data = json.loads(Page(text).parts["data"])
    assert data["title"] == data["programs"][0]["name"] == hostile


def test_the_folds_of_each_program_are_beside_its_data(page):
    (folds,) = json.loads(Page(page).parts["folds"])
    assert {"ops", "graphs", "captured", "guards"} <= set(folds)
    assert sum(len(group["guards"]) for group in folds["guards"]) > 5


def test_a_frame_holds_the_page_and_is_of_another_origin(explanation):
    frame = Page(explanation._repr_html_())
    assert {tag for tag, _, _ in frame.attributes} == {"iframe"}
    attributes = {name: value for _, name, value in frame.attributes}
    assert attributes["sandbox"] == "allow-scripts" and "src" not in attributes
    assert attributes["title"] == "Explanation of layer"
    inside = Page(attributes["srcdoc"])
    assert json.loads(inside.parts["data"])["programs"][0] == json.loads(explanation.to_json())


def test_it_is_written_to_a_path(explanation, tmp_path):
    path = explanation.to_html(tmp_path / "page.html")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_it_stays_small_enough_for_200_programs(explanation):
    one = len(render_page(Report("t", (explanation.program,))))
    many = len(render_page(Report("t", (explanation.program,) * 200)))
    assert many < 200 * one and many < 20e6


def test_no_name_of_the_script_is_declared_twice(explanation):
    """A browser refuses such a script whole, and the page stays empty."""
    script = Page(explanation._page()).parts["script"]
    names = re.findall(r"^(?:async )?(?:const|let|var|function|class) (\w+)", script, re.MULTILINE)
    assert len(names) > 40
    assert sorted(names) == sorted(set(names))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which reads JavaScript")
def test_the_script_can_be_read(explanation, tmp_path):
    path = tmp_path / "page.js"
    path.write_text(Page(explanation._page()).parts["script"])
    done = subprocess.run(["node", "--check", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
