"""The hard cases that were counted: the files agree with each other and with what happens."""

from __future__ import annotations

import json
import warnings

import pytest

from bench import cases
from tests.tables import giving

FOUND = json.loads((cases.RESULTS / "cases.json").read_text())


test_the_record = giving(
    {
        "all cases": (lambda: len(FOUND["cases"]), len(cases.hard.CASES) * len(cases.hard.KINDS)),
        "all ways": (
            lambda: {tuple(sorted(ways)) for ways in FOUND["cases"].values()},
            {tuple(sorted(cases.WAYS))},
        ),
        "its page": (
            (cases.RESULTS / "cases.md").read_text,
            cases.format_markdown(FOUND["cases"], FOUND["machine"]["torch"]),
        ),
    }
)


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way", "expected"),
    [
        ("c01_shared_inner_mutated", cases.STOCK, "wrong"),
        ("c01_shared_inner_mutated", cases.DIRECT, "right"),
        ("c03_some_outputs_in_the_backward", cases.STOCK, "refused"),
        ("c03_some_outputs_in_the_backward", cases.BACKEND, "right"),
        ("c06_t_of_a_plain_tensor", cases.STOCK, "right"),
    ],
)
def test_a_case(name, way, expected):
    assert cases.outcome(name, "pair", cases.WAYS[way]) == expected
    assert FOUND["cases"][f"{name.removeprefix('c')}, pair"][way] == expected


@pytest.mark.slow
def test_all_cases_come_out_as_counted():
    if FOUND["machine"]["torch"] != cases.torch.__version__:
        pytest.skip(f"counted with {FOUND['machine']['torch']}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cases.find_outcomes() == FOUND["cases"]
