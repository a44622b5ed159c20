"""The counted lines are lines of code, and those that the comparison names are the counts."""

from __future__ import annotations

from pathlib import Path

from bench import lines

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


def test_what_is_counted():
    assert lines.count_code_lines(SOURCE) == 1 + 1 + 2 + 4
    assert lines.count_code_lines("") == 0


def test_the_gallery_is_counted():
    counts = lines.count_gallery()
    assert len(counts) == 12
    assert [count.name for count in counts if count.by_hand] == ["log_probability", "low_rank", "quaternion"]
    assert all(count.by_hand > 2 * count.declared for count in counts if count.by_hand)
    assert max(count.declared for count in counts) <= 85


def test_the_comparison_gives_the_counts():
    pairs = [f"{count.declared} and {count.by_hand}" for count in lines.count_gallery() if count.by_hand]
    page = " ".join((ROOT / "docs" / "comparison.md").read_text().split())
    assert f"({', '.join(pairs)} lines; `python -m bench.lines`)" in page


def test_the_table(capsys):
    lines.main()
    out = capsys.readouterr().out
    assert out.count("\n") == 1 + 3 + 12 + 1
    assert all(count.name in out for count in lines.count_gallery())
