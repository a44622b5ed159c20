"""The counted lines are lines of code, and the comparison names the counts; a call walks through few modules."""

import json
import warnings
from pathlib import Path

import pytest

from bench import cases, lines
from bench.walk import walk_calls
from tests.tables import giving

ROOT = Path(__file__).parents[2]

SOURCE = '''"""A module."""

import a  # a comment


class B:
    """Two lines
    of a docstring."""

    c = """two lines
    of a string"""  # noqa

    # a comment
    def d(self):
        return a.e(
            1,
        )


def main():
    print(B)


if __name__ == "__main__":
    main()
'''


GALLERY = lines.count_gallery()
BY_HAND = [count for count in GALLERY if count.by_hand]
PAIRS = ", ".join(f"{count.declared} and {count.by_hand}" for count in BY_HAND)

test_what_is_counted = giving(
    {
        "a module": (lambda: lines.count_code_lines(SOURCE), 1 + 1 + 2 + 4),
        "nothing": (lambda: lines.count_code_lines(""), 0),
        "the gallery": (lambda: len(GALLERY), 17),
        "what there is by hand": (
            lambda: [count.name for count in BY_HAND],
            ["log_probability", "low_rank", "quaternion"],
        ),
        "lines by hand are more": (
            lambda: [count.name for count in BY_HAND if count.by_hand <= 2 * count.declared],
            [],
        ),
        "declarations are short": (lambda: max(count.declared for count in GALLERY) <= 85, True),
        "the reference gives torchao's": (
            lambda: (
                {
                    str(count.by_hand)
                    for count in sorted(lines.count_torchao(), key=lambda count: count.by_hand)[::3]
                }
                - set((ROOT / "docs" / "authors-reference.md").read_text().split())
            ),
            set(),
        ),
        "the comparison gives the counts": (
            lambda: (
                f"({PAIRS} lines; `python -m bench.lines`)"
                in " ".join((ROOT / "docs" / "comparison.md").read_text().split())
            ),
            True,
        ),
    }
)


def test_the_table(capsys):
    lines.main()
    out = capsys.readouterr().out
    assert out.count("\n") == 1 + 3 + 17 + 1
    assert all(count.name in out for count in lines.count_gallery())


# ---- how far a call walks -------------------------------------------------------------------------------------------


def test_a_second_call_enters_three_modules():
    first, second = walk_calls()
    assert first.order[0] == "desugar.dynamo.entry"
    assert set(first.order) >= {"desugar.pipeline", "desugar.tracing.trace", "desugar.wrapper.run"}
    assert len(first.order) <= 79
    assert first.moves <= 1020
    # Graphs that run as they are, and the class's detach() when autograd keeps the gradient.
    assert len(second.order) <= 3
    assert second.moves <= 5
    assert not any(name.startswith(("desugar.tracing", "desugar.dynamo")) for name in second.order)


# ---- the hard cases that were counted -------------------------------------------------------------------------------

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
@pytest.mark.skipif(
    FOUND["machine"]["torch"] != cases.torch.__version__, reason="counted with another release"
)
def test_all_cases_come_out_as_counted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cases.find_outcomes() == FOUND["cases"]
