"""docs/distributed.md shows what two ranks get."""

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


def test_the_page_has_a_row_for_each_case():
    assert list(table.TABLE.cells()) == list(CASES)


def test_what_is_right_otherwise_is_right_compiled_here():
    found = {
        name: {column: cell.split()[0] for column, cell in cells.items()}
        for name, cells in table.TABLE.cells().items()
    }
    worse = {
        name: cells
        for name, cells in found.items()
        if "right" in (cells["eager"], cells["stock"])
        and not all(cells[door] in ("right", "stock", "eager") for door in DOORS)
    }
    assert not worse
