"""``python -m docs.gains``: the first page's table and picture, from the files that benchmarks wrote.

Every cell is read from a file in ``bench/results``, counted in the sources, or counted in a table of a page that a
command writes; the last column names that command. Nothing is measured here. The picture is an SVG, which is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bench import cases, lines
from bench.report import load_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "gains.svg"
TABLE = re.compile(r"(<!-- written by python -m docs.gains -->\n).*?(\n<!-- end -->)", re.DOTALL)
HEADINGS = ("", "desugar", "stock PyTorch", "torchao", "`torch.nested`", "measured by")
DIRECT, STOCK = "desugar.compile", "torch.compile"

# ---- figures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """A row: what was measured, in which unit, our figure, those of others, and the command that finds them."""

    what: str
    unit: str
    command: str
    ours: float
    stock: float | None = None
    torchao: float | None = None
    nested: float | None = None

    def cells(self) -> tuple[str, ...]:
        """The cells of a row of the table."""
        what = f"{self.what}, {self.unit}" if self.unit else self.what
        figures = (shown(value) for value in (self.stock, self.torchao, self.nested))
        return (what, f"**{shown(self.ours)}**", *figures, f"`{self.command}`")


def shown(value: float | None) -> str:
    """A count as it is, a time in three digits, nothing where there is no figure."""
    if value is None:
        return ""
    return f"{value}" if isinstance(value, int) else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def find_gains() -> list[Gain]:
    """All rows, in the order of the table."""
    return [*_written(), *_right(), *_calls(), *_steps(), *_starts()]


def _measured(file: str, group: str, *names: str) -> list[float]:
    """The medians of some rows of a saved run, in its unit."""
    found = {(row.group, row.name): row.timing.median for row in load_rows(RESULTS / f"{file}.json")[0]}
    return [found[group, name] for name in names]


def _written() -> Iterator[Gain]:
    count = next(count for count in lines.count_gallery() if count.name == "low_rank")
    yield Gain(
        "lines of code of a matrix stored as two factors",
        "",
        "python -m bench.lines",
        count.declared,
        count.by_hand,
    )


def _right() -> Iterator[Gain]:
    found = json.loads((RESULTS / "cases.json").read_text())["cases"]
    ours, stock = (cases.count(found, way)["right"] for way in (cases.DIRECT, cases.STOCK))
    what = f"compiled calls that do what eager mode does, of {len(found)} hard ones"
    yield Gain(what, "", "python -m bench.cases", ours, stock)
    total, right = count_ranks((ROOT / "docs" / "distributed.md").read_text())
    what = f"the same on two processes, of {total}"
    yield Gain(what, "", "python -m tests.distributed.table", right[DIRECT], right["stock"])


def count_ranks(page: str) -> tuple[int, dict[str, int]]:
    """The number of cases of the tables for two processes, and how many are right in each way."""
    rows, columns, total, right = re.findall(r"^\| (.+) \|$", page, re.MULTILINE), [], 0, {}
    for _, *cells in (row.split(" | ") for row in rows):
        if cells[0] == "eager":
            columns = cells
        elif len(cells) == len(columns):
            total += 1
            for way, cell in zip(columns, cells, strict=True):
                right[way] = right.get(way, 0) + (cell.split()[0] == "right")
    return total, right


def _calls() -> Iterator[Gain]:
    group = "inference, N = 5"
    ours, stock = _measured("wrappers", group, f"declared, {DIRECT}", f"TwoTensor, {STOCK}")
    yield Gain("a call with five arguments of two tensors each", "µs", "make bench", ours, stock)
    names = (f"Int8Tensor, {DIRECT}", f"by hand, {STOCK}", f"torchao, {STOCK}")
    ours, stock, torchao = _measured("kinds", f"Int8, {group}", *names)
    yield Gain("a call with five small int8 weights", "µs", "make bench", ours, stock, torchao)
    ours, nested = _measured("kinds", f"Jagged, {group}", f"JaggedTensor, {DIRECT}", f"torch.nested, {STOCK}")
    yield Gain("a call with five batches of uneven rows", "µs", "make bench", ours, nested=nested)


def _steps() -> Iterator[Gain]:
    names = (f"weight-only, {DIRECT}", f"floats, {STOCK}", "weight-only, torchao")
    group = "bfloat16, 4096 by 4096, batch 1, inference, weight-only"
    ours, stock, torchao = _measured("int8-sizes", group, *names)
    what = "one row through 4096 by 4096 int8 weights (stock: bfloat16)"
    yield Gain(what, "µs", "python -m bench.int8_sizes", ours, stock, torchao)
    names = (f"JaggedTensor, {DIRECT}", f"dense table, {STOCK}", f"torch.nested, {STOCK}")
    ours, stock, nested = _measured("layouts", "64 rows, training", *names)
    what = "a training step of a layer on uneven rows (stock: padded)"
    yield Gain(what, "µs", "make bench", ours, stock, nested=nested)
    rows = load_rows(RESULTS / "long-rows.json")[0]
    ours, stock = _measured("long-rows", rows[0].group, f"JaggedTensor, {DIRECT}", f"dense table, {STOCK}")
    what = "a training step of a language model on uneven rows (stock: padded)"
    yield Gain(what, "ms", "python -m bench.long_rows", ours, stock)
    page = (ROOT / "docs" / "hugging-face.md").read_text()
    ours, stock = (
        float(re.findall(rf"^\| {way}, compiled \| (\d+) ms", page, re.MULTILINE)[0])
        for way in ("ragged", "flattened")
    )
    what = "a training step of a Llama of Hugging Face without padding (stock: flattened by hand; AVX-512)"
    yield Gain(what, "ms", "python examples/finetune_hf.py --compile", ours, stock)


def _starts() -> Iterator[Gain]:
    ours, stock = _measured("compiling", "cold start, x * 2, N = 5, inference", DIRECT, STOCK)
    yield Gain("a first call in a process that has compiled before", "ms", "make bench", ours, stock)
    if (RESULTS / "starts.json").exists():  # takes an hour to measure
        ours, stock = _measured("starts", "cold start, int8 MLP of 12 layers, inference, wall", DIRECT, STOCK)
        yield Gain("a first call with empty caches, 12 layers", "ms", "python -m bench.starts", ours, stock)
        ours, stock = _measured("starts", "warm start, int8 MLP of 12 layers, inference, wall", DIRECT, STOCK)
        yield Gain("a first call in the next process, 12 layers", "ms", "python -m bench.starts", ours, stock)


# ---- the table -----------------------------------------------------------------------------------------------


def emit_table(gains: list[Gain]) -> str:
    """The table in Markdown, and what it was measured on."""
    out = [f"| {' | '.join(HEADINGS)} |", "|---" + "|---:" * 4 + "|---|"]
    out += [f"| {' | '.join(gain.cells())} |" for gain in gains]
    machine = load_rows(RESULTS / "wrappers.json")[1]
    out += [
        "",
        f"Measured on a CPU ({machine['cpu']}, {machine['instructions']}, {machine['cores']} cores) with PyTorch "
        f"{machine['torch']}.",
    ]
    return "\n".join(out)


# ---- the picture ---------------------------------------------------------------------------------------------

WIDTH, ROW, TOP, LEFT, BAR = 680, 48, 60, 10, 16
STYLE = """
text { font: 17px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 19px }
.figure { font-size: 15px }
.ground { fill: #ffffff } .ours { fill: #2f6fde } .other { fill: #b9c0c9 }
@media (prefers-color-scheme: dark) {
  text { fill: #d8dee6 } .ground { fill: #131416 } .ours { fill: #6ea2ff } .other { fill: #565f6b }
}
"""


def emit_picture(gains: list[Gain]) -> str:
    """One pair of bars for each time: ours over that of the others, the longest of which fills the width."""
    timed = [gain for gain in gains if gain.unit]
    height = TOP + ROW * len(timed) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}" rx="6"/>',
        '<title id="t">Times of the table below: desugar in blue, the slowest of the others in grey</title>',
        f'<text class="title" x="{LEFT}" y="24">Time, beside the slowest of the others (shorter is better)</text>',
        f'<text class="figure" x="{LEFT}" y="44">blue: desugar; grey: stock PyTorch, torchao or torch.nested</text>',
    ]
    for place, gain in enumerate(timed):
        out += _pair(gain, TOP + ROW * place)
    return "\n".join([*out, "</svg>"]) + "\n"


def _pair(gain: Gain, y: int) -> Iterator[str]:
    others = {"stock": gain.stock, "torchao": gain.torchao, "torch.nested": gain.nested}
    slowest, most = max(((k, v) for k, v in others.items() if v is not None), key=lambda item: item[1])
    scale = (WIDTH - 2 * LEFT) / max(most, gain.ours)
    what = gain.what.split(" (stock")[0]
    yield f'<text x="{LEFT}" y="{y + 14}">{escape(what)}</text>'
    figures = f"{shown(gain.ours)} {gain.unit}, {slowest} {shown(most)} {gain.unit}"
    yield f'<text class="figure" x="{WIDTH - LEFT}" y="{y + 14}" text-anchor="end">{escape(figures)}</text>'
    for name, value in (("other", most), ("ours", gain.ours)):
        thick = BAR if name == "other" else BAR // 2
        top = y + 20 + (BAR - thick) // 2
        yield f'<rect class="{name}" x="{LEFT}" y="{top}" width="{value * scale:.1f}" height="{thick}" rx="2"/>'


def write() -> None:
    """Writes the table into the first page, and the picture beside the docs."""
    gains = find_gains()
    text = README.read_text()
    README.write_text(TABLE.sub(lambda match: match[1] + emit_table(gains) + match[2], text))
    PICTURE.write_text(emit_picture(gains))


if __name__ == "__main__":
    write()
