"""docs/export.md shows how far torch.export goes."""

from __future__ import annotations

import re

import pytest

from tests.export import table
from tests.export.cases import CASES, MISFIT


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it compiles each case ahead of time
def test_the_page_shows_what_torch_export_does():
    found = table.emit_section({name: table.outcomes(name) for name in CASES})
    assert table.read_section(table.PAGE.read_text()) == found, "python -m tests.export.table writes it"


def cells_of_the_page() -> dict[str, list[str]]:
    """Per row what each column shows."""
    rows = re.findall(r"^\| (.+) \|$", table.read_section(table.PAGE.read_text()), re.MULTILINE)
    found, section = {}, ""
    for name, *cells in (row.split(" | ") for row in rows):
        if cells == list(table.COLUMNS):
            section = name
        else:
            found[f"{section}: {name}"] = cells
    return found


def test_the_page_has_a_row_for_each_case():
    assert list(cells_of_the_page()) == list(CASES)


def test_nothing_is_silently_wrong_but_what_aotinductor_does_not_check():
    wrong = {
        (name, column)
        for name, cells in cells_of_the_page().items()
        for column, cell in zip(table.COLUMNS, cells, strict=True)
        if "wrong" in cell
    }
    assert wrong == {(name, "AOTInductor") for name in CASES if name.startswith(MISFIT)}
