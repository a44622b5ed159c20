"""The notebook runs, prints what it shows, and is one."""

import copy
import html
import json

import pytest

from docs import notebook

TOUR = json.loads(notebook.TOUR.read_text())


@pytest.mark.slow
def test_the_tour_prints_what_it_shows(tmp_path):
    printed = notebook.run_cells(TOUR, tmp_path)
    assert len(printed) == 10
    for cell, text in zip(notebook.code_cells(TOUR), printed, strict=True):
        assert notebook.shown(cell) == text, "python -m docs.notebook writes it"
    assert "Int8Weight" in (tmp_path / "report.html").read_text()


def test_the_file_is_a_notebook():
    assert (TOUR["nbformat"], TOUR["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in TOUR["cells"]}) == len(TOUR["cells"])
    for cell in TOUR["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and isinstance(cell["source"], list)
        assert ("outputs" in cell and "execution_count" in cell) == (cell["cell_type"] == "code")
    assert [cell["execution_count"] for cell in notebook.code_cells(TOUR)] == [*range(1, 11)]
    assert notebook.TOUR.read_text() == json.dumps(TOUR, indent=1, ensure_ascii=False) + "\n"


def test_other_outputs_are_noticed_and_written(tmp_path):
    found = copy.deepcopy(TOUR)
    found["cells"] = [notebook.code_cells(found)[0]]
    found["cells"][0]["source"] = ["x = 2\n", "print(x)\n", "print(x + 1)"]
    printed = notebook.run_cells(found, tmp_path)
    assert printed == ["2\n3\n"] != [notebook.shown(found["cells"][0])]
    assert notebook.shown(notebook.with_outputs(found, printed)["cells"][0]) == "2\n3\n"


def test_an_error_in_a_cell_is_raised(tmp_path):
    found = copy.deepcopy(TOUR)
    found["cells"] = found["cells"][:2]
    found["cells"][1]["source"] = ["raise ValueError('here')"]
    with pytest.raises(ValueError, match="here"):
        notebook.run_cells(found, tmp_path)


@pytest.mark.slow
def test_an_explanation_is_an_output_that_leaves_the_notebooks_page_alone(tmp_path):
    found = copy.deepcopy(TOUR)
    cells = notebook.code_cells(found)
    made = next(n for n, cell in enumerate(cells) if "desugar.explain" in "".join(cell["source"]))
    found["cells"] = cells[: made + 1]
    cells[made]["source"] += ["\nprint(explanation._repr_html_())"]
    shown = notebook.run_cells(found, tmp_path)[-1]
    frame = shown[shown.index("<iframe") :].strip()
    assert frame.count("<iframe") == 1 and frame.endswith("</iframe>")
    before, _, rest = frame.partition('srcdoc="')
    inside, _, after = rest.partition('"')
    assert after == "></iframe>" and "<" not in inside and "<style" not in before
    assert html.unescape(inside).startswith("<!doctype html>")
