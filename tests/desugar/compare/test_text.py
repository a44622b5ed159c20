"""The table and its details, for records made by hand."""

from __future__ import annotations

import pytest

from desugar.compare.records import Comparison, Programs, Request, Spread, Verdict, Way
from desugar.compare.run import with_times
from desugar.compare.text import render, spread_text, table_of
from desugar.compare.ways import BACKEND, DIRECT, EAGER, STOCK


def comparison(**changes):
    eager = Way(EAGER, Verdict("judge"), Programs(), 0.001, None, 2**20, Spread(1e-4, 1e-6), Spread(1, 0))
    stock = Way(STOCK, Verdict("error", "ValueError: odd"))
    wrong = Verdict("wrong", "call 1 of 3: result: 2, expected 1")
    ours = Way(BACKEND, wrong, Programs(3, ("f: a", "f: b"), ("a.py:1: why",), ("handed on",)), 1.5)
    direct = Way(
        DIRECT, Verdict("right"), Programs(1), 1.25, None, 40 * 2**20, Spread(5e-5, 2e-6), Spread(0.5, 0.01)
    )
    given = {
        "request": Request("a.py:f"),
        "calls": 3,
        "rounds": 50,
        "ways": (eager, stock, ours, direct),
        "machine": (("torch", "2.13.0"), ("CPU", "a CPU"), ("threads", "1")),
    }
    return Comparison(**given | changes)


def test_the_table_has_a_row_for_each_way():
    assert render(comparison()).splitlines()[:5] == [
        "                   result  1st call  a call      / eager  memory  graphs  breaks",
        "eager               judge      1 ms  100 µs            1   1 MiB",
        "torch.compile       error                                              0       0",
        'backend="desugar"   wrong     1.5 s                                    3       1',
        "desugar.compile     right    1.25 s   50 µs  0.50 ± 0.01  40 MiB       1       0",
    ]


def test_no_line_is_wider_than_a_terminal_of_80_columns():
    assert max(map(len, render(comparison()).splitlines())) <= 80


def test_what_is_behind_the_cells_is_listed_by_way():
    text = render(comparison())
    assert "torch.compile:\n  error: ValueError: odd\n" in text
    assert 'backend="desugar":\n  wrong: call 1 of 3: result: 2, expected 1\n  recompiled: f: a\n' in text
    assert "  graph break: a.py:1: why\n  not compiled as asked: handed on\n" in text
    many = Way(DIRECT, Verdict("right"), Programs(9, tuple(f"f: {n}" for n in range(9))))
    assert "recompiled: 4 more, which --json has" in render(comparison(ways=(many,)))


def test_a_second_start_has_a_column():
    way = Way(DIRECT, Verdict("right"), first_call=2.0, second_start=0.5)
    assert table_of(comparison(ways=(way,)))[0][3] == "2nd start"
    assert table_of(comparison(ways=(way,)))[1][3] == "500 ms"
    assert "caches that the first one left behind" in render(comparison(ways=(way,)))


@pytest.mark.parametrize(
    ("spread", "text"),
    [
        (Spread(1.0, 0.0), "1 ± 0 s"),
        (Spread(0.0123, 0.001), "12.3 ± 1 ms"),
        (Spread(3e-7, 2e-8), "0.3 ± 0.02 µs"),
    ],
)
def test_a_spread_has_the_unit_of_its_median(spread, text):
    assert spread_text(spread) == text


def test_a_ratio_is_that_of_rounds():
    way = with_times(Way(DIRECT, Verdict("right")), [2.0, 4.0, 6.0], [4.0, 8.0, 12.0])
    assert way.call == Spread(4.0, 2.0) and way.ratio == Spread(0.5, 0.0)


def test_records_are_data():
    found = comparison()
    assert found.to_dict()["ways"][3]["ratio"] == {"median": 0.5, "spread": 0.01}
    assert found.way(STOCK).verdict.state == "error"
    with pytest.raises(KeyError, match="expected one of eager"):
        found.way("fast")
