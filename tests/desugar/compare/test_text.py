"""The table and its details, for records made by hand."""

import pytest

from desugar.compare.records import Comparison, Programs, Request, Spread, Verdict, Way, with_times
from desugar.compare.text import render
from desugar.compare.ways import BACKEND, DIRECT, EAGER, STOCK
from tests.tables import giving


def comparison(**changes):
    eager = Way(EAGER, Verdict("judge"), Programs(), 0.001, Spread(1e-4, 1e-6), Spread(1, 0), 40 * 2**20)
    stock = Way(STOCK, Verdict("error", "ValueError: odd"))
    wrong = Verdict("wrong", "call 1 of 3: result: 2, expected 1")
    ours = Way(BACKEND, wrong, Programs(3, ("f: a", "f: b"), ("a.py:1: why",), ("handed on",)), 1.5)
    direct = Way(DIRECT, Verdict("right"), Programs(1), 1.25, Spread(5e-5, 2e-6), Spread(0.5, 0.01), 2**20)
    given = {
        "request": Request("a.py:f"),
        "calls": 3,
        "rounds": 50,
        "ways": (eager, stock, ours, direct),
        "machine": (("torch", "2.13.0"), ("CPU", "a CPU"), ("threads", "1")),
    }
    return Comparison(**given | changes)


MANY = Way(DIRECT, Verdict("right"), Programs(9, tuple(f"f: {n}" for n in range(9))))
FAST, SLOW = (
    Way(name, Verdict("right"), call=Spread(seconds, 0.0)) for name, seconds in ((EAGER, 1.0), (DIRECT, 9.0))
)
TIMED = with_times(Way(DIRECT, Verdict("right")), [2.0, 4.0, 6.0], [4.0, 8.0, 12.0])


def shown(part, **changes):
    return lambda: part in render(comparison(**changes))


test_what_is_shown = giving(
    {
        "a row for each way": (
            lambda: render(comparison()).splitlines()[:5],
            [
                "                   result  1st call  a call      / eager  memory  graphs  breaks",
                "eager               judge      1 ms  100 µs            1  40 MiB",
                "torch.compile       error                                              0       0",
                'backend="desugar"   wrong     1.5 s                                    3       1',
                "desugar.compile     right    1.25 s   50 µs  0.50 ± 0.01   1 MiB       1       0",
            ],
        ),
        "no line is wider than a terminal": (
            lambda: max(map(len, render(comparison()).splitlines())) <= 80,
            True,
        ),
        "an error": (shown("torch.compile:\n  error: ValueError: odd\n"), True),
        "what is wrong": (
            shown('backend="desugar":\n  wrong: call 1 of 3: result: 2, expected 1\n  recompiled: f: a\n'),
            True,
        ),
        "losses": (shown("desugar.compile:\n  loss: 9 times slower than eager: ", ways=(FAST, SLOW)), True),
        "notes": (shown("  graph break: a.py:1: why\n  note: handed on\n"), True),
        "many recompilations": (shown("recompiled: 4 more, which --json has", ways=(MANY,)), True),
        "a ratio is that of rounds": (
            lambda: (TIMED.call, TIMED.ratio),
            (Spread(4.0, 2.0), Spread(0.5, 0.0)),
        ),
    }
)


def test_records_are_data():
    found = comparison()
    assert found.to_dict()["ways"][3]["ratio"] == {"median": 0.5, "spread": 0.01}
    assert found.way(STOCK).verdict.state == "error"
    with pytest.raises(KeyError, match="expected one of eager"):
        found.way("fast")
