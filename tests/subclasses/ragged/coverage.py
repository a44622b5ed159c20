"""Writes docs/ragged-coverage.md: how much of PyTorch's op database for `torch.nested` both ragged layouts get right.

python -m tests.subclasses.ragged.coverage
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from docs.wrap import wrap
from tests.subclasses.ragged.database import OPS, count, run_compiled

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


# For each op the errors of its samples: forward, backward, compiled forward, compiled backward.
Counts = dict[str, list[list[str]]]


def count_layout(layout: str) -> Counts:
    """All ops of the database on one layout."""
    counts: Counts = {}
    for op in OPS:
        counts[op.full_name] = []
        for options in ({}, {"run": run_compiled, "stride": COMPILED_EACH}):
            torch.manual_seed(0)
            counts[op.full_name] += count(op, layout, **options)
    return counts


# ---- writing ---------------------------------------------------------------------------------------------------


def total(counts: Counts, place: int) -> str:
    """The share of right samples, and their number."""
    errors = [error for each in counts.values() for error in each[place]]
    return f"{errors.count('') / len(errors):.1%} ({errors.count('')} of {len(errors)})"


def line(*cells: object) -> str:
    """One line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def emit_page(layouts: dict[str, Counts]) -> str:
    """The page's text."""
    names = list(next(iter(layouts.values())))
    wrong = {
        layout: [name for name in names if any(map(any, counts[name]))] for layout, counts in layouts.items()
    }
    out = [HEAD, line("", *layouts), line(*["---"] * (1 + len(layouts)))]
    for place, what in enumerate(("forward", "backward", "compiled, forward", "compiled, backward")):
        out.append(line(what, *(total(counts, place) for counts in layouts.values())))
    out += [
        line("ops whole", *(f"{len(names) - len(each)} of {len(names)}" for each in wrong.values())),
        *("", "## Not whole", ""),
        "Some of these mean something else for rows of other lengths, and are refused; the message says what to do.",
        "",
        line("op", "layout", "forward", "backward", "compiled", "compiled, backward"),
        line(*["---"] * 6),
    ]
    out += [
        line(f"`{name}`", layout, *(f"{c.count('')}/{len(c)}" if c else "" for c in counts[name]))
        for name in names
        for layout, counts in layouts.items()
        if name in wrong[layout]
    ]
    whole = sorted(name for name in names if not any(name in each for each in wrong.values()))
    return wrap("\n".join([*out, "", "## Whole in both", "", ", ".join(f"`{name}`" for name in whole)]))


def main() -> None:
    """Counts, and writes the page."""
    warnings.simplefilter("ignore")  # nested tensors are a prototype; the references reduce empty rows
    PAGE.write_text(emit_page({layout: count_layout(layout) for layout in ("jagged", "padded")}))


if __name__ == "__main__":
    main()
