"""The counted lines are lines of code, and the comparison names the counts; a call walks through few modules."""

from __future__ import annotations

from pathlib import Path

from bench import lines
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
        "the gallery": (lambda: len(GALLERY), 12),
        "what there is by hand": (
            lambda: [count.name for count in BY_HAND],
            ["log_probability", "low_rank", "quaternion"],
        ),
        "lines by hand are more": (
            lambda: [count.name for count in BY_HAND if count.by_hand <= 2 * count.declared],
            [],
        ),
        "declarations are short": (lambda: max(count.declared for count in GALLERY) <= 85, True),
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
    assert out.count("\n") == 1 + 3 + 12 + 1
    assert all(count.name in out for count in lines.count_gallery())


# ---- how far a call walks -------------------------------------------------------------------------------------------


def test_a_second_call_enters_three_modules():
    first, second = walk_calls()
    assert first.order[0] == "desugar.dynamo.entry"
    assert set(first.order) >= {"desugar.pipeline", "desugar.tracing.trace", "desugar.wrapper.run"}
    assert len(first.order) <= 79
    assert first.moves <= 1000
    # Graphs that run as they are, and the class's detach() when autograd keeps the gradient.
    assert len(second.order) <= 3
    assert second.moves <= 5
    assert not any(name.startswith(("desugar.tracing", "desugar.dynamo")) for name in second.order)
