"""docs/export.md shows how far torch.export goes."""

from __future__ import annotations

import pytest

from tests.export import table
from tests.export.cases import CASES, MISFIT


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it compiles each case ahead of time
def test_the_page_shows_what_torch_export_does():
    found = table.emit_section(table.outcomes(list(CASES)))
    assert table.read_section(table.PAGE.read_text()) == found, "python -m tests.export.table writes it"


def test_the_page_has_a_row_for_each_case():
    assert list(table.TABLE.cells()) == list(CASES)


def test_nothing_is_silently_wrong_but_what_aotinductor_does_not_check():
    wrong = {
        (name, column)
        for name, cells in table.TABLE.cells().items()
        for column, cell in cells.items()
        if "wrong" in cell
    }
    assert wrong == {(name, "AOTInductor") for name in CASES if name.startswith(MISFIT)}
