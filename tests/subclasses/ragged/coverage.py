"""Writes docs/ragged-coverage.md: how much of PyTorch's op database for `torch.nested` both ragged layouts get right.

python -m tests.subclasses.ragged.coverage
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from docs.wrap import wrap
from tests.subclasses.ragged.database import LAYOUTS, OPS, Count, count, run_compiled

PAGE = Path(__file__).parents[3] / "docs" / "ragged-coverage.md"
COMPILED_EACH = 3  # of the samples, each third is run compiled as well

HEAD = """# What ragged tensors cover

<!-- written by python -m tests.subclasses.ragged.coverage -->

PyTorch has a database of ops for its own `torch.nested`, with samples (rows with holes, other ragged dimensions, empty
rows, matrices and more), and a loop over the rows as reference. Here each sample is run on [jagged](jagged.md) and on
[padded](padded.md) tensors; the padding and the holes hold NaN, or an index out of range. A sample counts if the
reference itself works on it. Compiled is each third sample, by `desugar.compile`.
"""

# ---- counting --------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """An op's counts: forward, backward, compiled forward, compiled backward."""

    name: str
    counts: list[Count] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether all of its samples are right."""
        return all(c.right == c.of for c in self.counts)


def count_layout(layout: str) -> list[Row]:
    """All ops of the database on one layout."""
    rows = []
    for op in OPS:
        torch.manual_seed(0)
        eager = count(op, layout)
        torch.manual_seed(0)
        rows.append(Row(op.full_name, [*eager, *count(op, layout, run_compiled, COMPILED_EACH)]))
    return rows


# ---- writing ---------------------------------------------------------------------------------------------------


def total(rows: list[Row], place: int) -> str:
    """The share of right samples, and their number."""
    right, of = (sum(getattr(r.counts[place], name) for r in rows) for name in ("right", "of"))
    return f"{right / of:.1%} ({right} of {of})"


def line(*cells: object) -> str:
    """One line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def shown(counts: list[Count]) -> list[str]:
    """Counts as cells."""
    return [f"{c.right}/{c.of}" if c.of else "" for c in counts]


def emit_page(layouts: dict[str, list[Row]]) -> str:
    """The page's text."""
    out = [HEAD, line("", *layouts), line(*["---"] * (1 + len(layouts)))]
    for place, what in enumerate(("forward", "backward", "compiled, forward", "compiled, backward")):
        out.append(line(what, *(total(rows, place) for rows in layouts.values())))
    whole = (f"{sum(r.whole for r in rows)} of {len(rows)}" for rows in layouts.values())
    out += [line("ops whole", *whole), "", "## Not whole", ""]
    out += [
        "Some of these mean something else for rows of other lengths, and are refused; the message says what to do.",
        "",
        line("op", "layout", "forward", "backward", "compiled", "compiled, backward"),
        line(*["---"] * 6),
    ]
    for rows in zip(*layouts.values(), strict=True):
        for layout, row in zip(layouts, rows, strict=True):
            if not row.whole:
                out.append(line(f"`{row.name}`", layout, *shown(row.counts)))
    names = [rows[0].name for rows in zip(*layouts.values(), strict=True) if all(r.whole for r in rows)]
    out += ["", "## Whole in both", "", ", ".join(f"`{name}`" for name in sorted(names))]
    return wrap("\n".join(out))


def main() -> None:
    """Counts, and writes the page."""
    warnings.simplefilter("ignore")  # nested tensors are a prototype; the references reduce empty rows
    PAGE.write_text(emit_page({layout: count_layout(layout) for layout in LAYOUTS}))


if __name__ == "__main__":
    main()
