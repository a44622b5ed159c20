"""Writes the report of a run from its lines: one page a stage, `bench/results/gpu-STAGE.md` and `.json`.

    python -m bench.gpu.report build/bench-gpu/lines.jsonl

The pages of a rehearsal lie beside its lines, never among the results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.gpu.lines import HOST, MICROSECONDS, PEAK, TIME, Line, of_machine, read_lines
from bench.gpu.table import BY_NAME, STAGES
from bench.report import Row, save_rows
from bench.timing import Timing

RESULTS = Path(__file__).parents[1] / "results"
FIRST, LAST = f"{TIME}, first", f"{TIME}, last"
# Columns beside a time, by the figure that they show.
COLUMNS = {HOST: "host µs", PEAK: "peak GiB", FIRST: "alone, first µs", LAST: "alone, last µs"}
OF_FLOOR, OF_TOKENS, OF_FILL = "floor / this", "million tokens/s", "/ (dense * fill)"
OF_LAUNCHES, OF_BUCKETS = "host µs less launches", "/ buckets"
Figures = dict[str, Line]  # of one subject, by name


def group_lines(lines: Iterable[Line]) -> dict[str, dict[str, Figures]]:
    """Returns the figures by group, subject and name; a later line replaces an earlier one."""
    groups: dict[str, dict[str, Figures]] = {}
    for line in lines:
        if line.value is not None:
            groups.setdefault(line.group, {}).setdefault(line.subject, {})[line.figure] = line
    return groups


# ---------------------------------------------------------------------------------------------------------
# rows
# ---------------------------------------------------------------------------------------------------------


def make_rows(lines: Iterable[Line]) -> list[Row]:
    """Returns the rows of a stage: the times of each group, then its other figures in tables of their own."""
    rows = []
    for group, subjects in group_lines(lines).items():
        rows += _time_rows(group, subjects)
        shown = {TIME, *COLUMNS}
        others = dict.fromkeys(name for figures in subjects.values() for name in figures if name not in shown)
        for name in others:
            for subject, figures in subjects.items():
                if name in figures:
                    rows.append(_count_row(group, subject, figures[name], figures))
    return rows


def _value(line: Line) -> float:
    assert line.value is not None
    return line.value


def _timing(line: Line) -> Timing:
    value = _value(line)
    return Timing(value, value if line.low is None else line.low, value if line.high is None else line.high)


def _time_rows(group: str, subjects: dict[str, Figures]) -> list[Row]:
    timed = {name: figures for name, figures in subjects.items() if TIME in figures}
    baseline = next((name for name, figures in timed.items() if FIRST in figures), "")
    rows = []
    for name, figures in timed.items():
        line = figures[TIME]
        ratios = {} if line.ratio is None else {f"/ {baseline}": line.ratio}
        ratios |= _derived(name, subjects)
        ratios |= {column: _value(figures[figure]) for figure, column in COLUMNS.items() if figure in figures}
        rows.append(Row(group, name, _timing(line), ratios, MICROSECONDS, ours=_is_ours(name)))
    return rows


def _count_row(group: str, subject: str, line: Line, figures: Figures) -> Row:
    buckets = figures.get("buckets")
    ratios = (
        {OF_BUCKETS: _value(line) / _value(buckets)} if buckets and line.figure == "graphs recorded" else {}
    )
    return Row(
        f"{group}: {line.figure}",
        subject,
        _timing(line),
        ratios,
        line.unit or "value",
        ours=_is_ours(subject),
    )


def _is_ours(subject: str) -> bool:
    return "desugar" in subject


def _derived(name: str, subjects: dict[str, Figures]) -> dict[str, float]:
    """Returns the figures that follow from others of the same group; none of them was measured by itself."""
    time, derived = _value(subjects[name][TIME]), {}
    for other, figures in subjects.items():
        if other.startswith("floor") and TIME in figures:
            derived[OF_FLOOR] = _value(figures[TIME]) / time
        if "tokens" in figures:
            derived[OF_TOKENS] = _value(figures["tokens"]) / time
        if "fill" in figures and TIME in figures:
            derived[OF_FILL] = time / (_value(figures[TIME]) * _value(figures["fill"]))
        if other.startswith("the compiled kernels") and HOST in figures and HOST in subjects[name]:
            derived[OF_LAUNCHES] = _value(subjects[name][HOST]) - _value(figures[HOST])
    return derived


# ---------------------------------------------------------------------------------------------------------
# pages
# ---------------------------------------------------------------------------------------------------------


def write_report(path: Path, out: Path | None = None) -> list[Path]:
    """Writes a page for each stage that has lines on the machine of the last line; returns the pages."""
    lines = read_lines(path)
    named = [line for line in lines if line.machine]
    if not named:
        return []
    lines = of_machine(lines, named[-1].machine)
    is_rehearsal = any(line.rehearsal for line in lines)
    out = out or (path.parent / "rehearsal" if is_rehearsal else RESULTS)
    device, _, versions = named[-1].machine.partition("; ")
    machine = {"device": device, "versions": versions}
    how = "Measured side by side, with CUDA events,"
    if is_rehearsal:
        how = "*A rehearsal on a CPU, with small sizes: no figure comes from a GPU.* Written"
    pages = []
    for stage in STAGES:
        mine = [line for line in lines if line.stage == stage.name]
        if not mine:
            continue
        page = out / f"gpu-{stage.name}.md"
        save_rows(make_rows(mine), machine, page.with_suffix(".json"), command="bench.gpu", how=how)
        page.write_text(page.read_text() + _words(mine))
        pages.append(page)
    return pages


def _words(lines: Sequence[Line]) -> str:
    """Returns the facts of a stage, and the reason for each figure that is missing, as Markdown."""
    facts: dict[str, dict[str, None]] = {}  # as ordered sets: a second run says some again
    for line in lines:
        if line.text:
            facts.setdefault(line.group, {})[f"- {line.subject}: {line.text}"] = None
    missing = dict.fromkeys(
        f"- {': '.join(filter(None, [line.group, line.subject])) or 'the stage'}: {line.error}"
        for line in lines
        if line.error
    )
    question = BY_NAME[lines[0].stage].question
    text = f"\nThe question: {question}\n"
    for group, entries in facts.items():
        text += f"\n## {group}\n\n" + "\n".join(entries) + "\n"
    return text + ("\n## No figure\n\n" + "\n".join(missing) + "\n" if missing else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for a file without lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    pages = write_report(options.lines, options.out)
    if not pages:
        print(f"expected lines that `make bench-gpu` wrote, found none in {options.lines}", file=sys.stderr)
        return 2
    print(f"wrote {len(pages)} pages to {pages[0].parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
