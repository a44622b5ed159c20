"""docs/distributed.md shows what two ranks get."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

from tests.distributed import table
from tests.distributed.cases import CASES

DOORS = [name for name in table.DOORS if name not in ("eager", "stock")]

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


@pytest.mark.slow
def test_the_page_shows_what_two_ranks_get():
    found = table.emit_section(table.outcomes(list(CASES)))
    assert table.read_section(table.PAGE.read_text()) == found, "python -m tests.distributed.table writes it"


def cells_of_the_page() -> dict[str, dict[str, str]]:
    """Per row what each column shows, without the number of its note."""
    rows = re.findall(r"^\| (.+) \|$", table.read_section(table.PAGE.read_text()), re.MULTILINE)
    found, section, columns = {}, "", [""]
    for name, *cells in (row.split(" | ") for row in rows):
        if cells[0] in table.DOORS:
            section, columns = name, cells
        else:
            found[f"{section}: {name}"] = {c: cell.split()[0] for c, cell in zip(columns, cells, strict=True)}
    return found


def test_the_page_has_a_row_for_each_case():
    assert list(cells_of_the_page()) == list(CASES)


def test_what_is_right_otherwise_is_right_compiled_here():
    worse = {
        name: cells
        for name, cells in cells_of_the_page().items()
        if "right" in (cells["eager"], cells["stock"])
        and not all(cells[door] in ("right", "stock", "eager") for door in DOORS)
    }
    assert not worse
