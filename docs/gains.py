"""``python -m docs.gains``: writes the tables of README and of ``docs/performance.md``, and the picture of README.

Every figure is read from the files that the benchmarks wrote into ``bench/results/``, or from a page. A test compares
the tables with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path

from bench import cases, lines
from bench.report import load_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "gains.svg"
TABLE = re.compile(r"(<!-- written by python -m docs.gains -->\n)(.*?)(\n?<!-- end -->)", re.DOTALL)
DIRECT, STOCK = "desugar.compile", "torch.compile"
CLASS, ROWS, CALLS = "short classes", "Hugging Face without padding", "cheaper calls and starts"

# ---- figures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """A row: a measurement, its unit, our figure, the figures of others, the command and the machine.

    ``shows`` is the gain of the first page that the row has a figure of; other rows are in the long table alone.
    ``details`` has a remark for the figure of a way, by its name; ours is ``DIRECT``.
    """

    what: str
    unit: str
    command: str
    ours: float
    rivals: Mapping[str, float]
    machine: str = ""
    shows: str = ""
    drawn: bool = False
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def leads(self) -> bool:
        """Whether our count is the best one, or our time is less than 0.95 of each rival's."""
        if not self.unit:  # a count of right results: more is better
            return self.ours > max(self.rivals.values())
        return self.ours < (1 if isinstance(self.ours, int) else 0.95) * min(self.rivals.values())

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of a row of the table."""
        what = f"{self.what}, {self.unit}" if self.unit else self.what
        figures = {DIRECT: self.ours, **self.rivals}
        ours, *rivals = (
            f"{shown(value)} ({self.details[name]})" if name in self.details else shown(value)
            for name, value in figures.items()
        )
        others = "; ".join(f"{name} {text}" for name, text in zip(self.rivals, rivals, strict=True))
        measured = "; ".join(filter(None, (f"`{self.command}`", self.machine)))
        return (what, f"**{ours}**" if self.leads else ours, others, measured)


def shown(value: float) -> str:
    """Returns a count as it is, and a time in three digits."""
    return f"{value}" if isinstance(value, int) else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def find_gains() -> list[Gain]:
    """Returns all rows, in the order of the long table."""
    return [*_written(), *_right(), *_models(), *_calls(), *_layers(), *_starts()]


def _measured(file: str, group: str, *names: str) -> list[float]:
    """Returns the medians of some rows of a saved run, in its unit."""
    medians = {(row.group, row.name): row.timing.median for row in load_rows(RESULTS / f"{file}.json")[0]}
    return [medians[group, name] for name in names]


def _machine(file: str, instructions: str = "AVX2") -> str:
    machine = load_rows(RESULTS / f"{file}.json")[1]
    release = machine["torch"].partition("+")[0]
    return f"{machine['cpu']}, {machine.get('instructions', instructions)}; torch {release}"


def _written() -> Iterator[Gain]:
    count = next(count for count in lines.count_gallery() if count.name == "low_rank")
    what = "code of a matrix stored as two factors, with two rules"
    assert count.by_hand is not None
    by_hand = {"by hand": count.by_hand}
    yield Gain(what, "lines", "python -m bench.lines", count.declared, by_hand, shows=CLASS, drawn=True)


def _right() -> Iterator[Gain]:
    saved = json.loads((RESULTS / "cases.json").read_text())
    outcomes = saved["cases"]
    ours, stock = (cases.count(outcomes, way) for way in (cases.DIRECT, cases.STOCK))
    programs = len({name.partition(", ")[0] for name in outcomes})
    what = (
        f"{programs} hard programs with {len(outcomes) // programs} classes each: right results when compiled"
    )
    release = f"no kernels: `aot_eager`; torch {saved['machine']['torch'].partition('+')[0]}"
    details = {
        way: f"{n['wrong']} wrong, {n['refused']} refused" for way, n in ((DIRECT, ours), ("stock", stock))
    }
    right = {"stock": stock["right"]}
    yield Gain(what, "", "python -m bench.cases", ours["right"], right, release, CLASS, details=details)
    total, right = count_ranks((ROOT / "docs" / "distributed.md").read_text())
    what = f"the same on two processes, of {total}"
    yield Gain(what, "", "python -m tests.distributed.table", right[DIRECT], {"stock": right["stock"]})


def count_ranks(page: str) -> tuple[int, dict[str, int]]:
    """Returns the number of cases of the tables for two processes, and how many are right in each way."""
    rows, columns, total, right = re.findall(r"^\| (.+) \|$", page, re.MULTILINE), [], 0, {}
    for _, *cells in (row.split(" | ") for row in rows):
        if cells[0] == "eager":
            columns = cells
        elif len(cells) == len(columns):
            total += 1
            for way, cell in zip(columns, cells, strict=True):
                right[way] = right.get(way, 0) + (cell.split()[0] == "right")
    return total, right


def _models() -> Iterator[Gain]:
    page = (ROOT / "docs" / "hugging-face.md").read_text()
    together, _, grouped = page.partition("| way, grouped |")
    ours, flat, padded = _steps(together, "ragged, compiled", "flattened, compiled", "padded, compiled")
    pattern = r"with (AVX\S+), with\s(PyTorch \S+ and transformers \d+\.\d+)"
    ((instructions, releases),) = re.findall(pattern, page)
    (sizes,) = re.findall(r"model has (\d+ layers of width \d+)", page)
    rivals, details = {"flattened": flat, "padded": padded}, {"flattened": "dense mask"}
    command, where = "python examples/finetune_hf.py --compile", f"one thread, {instructions}; {releases}"
    what = f"a training step of a Llama, {sizes}"
    yield Gain(what, "ms", command, ours, rivals, where, ROWS, drawn=True, details=details)
    ours, flat, padded = _steps(grouped, "ragged, compiled", "flattened, compiled", "padded")
    rivals = {"padded, eager": padded, "flattened": flat}
    what, grouping = "the same on batches grouped by length", f"{command} --grouped"
    yield Gain(what, "ms", grouping, ours, rivals, where, ROWS, details={"flattened": "dense mask"})
    names = {
        "jagged under stock": f"JaggedTensor, {STOCK}",
        "jagged, eager": "JaggedTensor, eager",
        "padded by length": f"PaddedTensor, by length, {DIRECT}",
        "padded under stock": f"dense table, {STOCK}",
    }
    group = load_rows(RESULTS / "long-rows.json")[0][0].group
    ours, *others = _measured("long-rows", group, f"JaggedTensor, {DIRECT}", *names.values())
    rivals = dict(zip(names, others, strict=True))
    what = "a training step of a language model on uneven rows"
    yield Gain(what, "ms", "python -m bench.long_rows", ours, rivals, _machine("long-rows"))


def _steps(table: str, *ways: str) -> list[float]:
    """Returns the milliseconds of a step of some ways, from a table of the page."""
    return [float(re.findall(rf"^\| {way} \| (\d+) ms", table, re.MULTILINE)[0]) for way in ways]


def _calls() -> Iterator[Gain]:
    group = "inference, N = 5"
    names = {
        "`TwoTensor` under stock": f"TwoTensor, {STOCK}",
        "the declared class under stock": f"declared, {STOCK}",
        "plain tensors under stock": f"plain, {STOCK}",
    }
    ours, plain, *others = _measured(
        "wrappers", group, f"declared, {DIRECT}", f"plain, {DIRECT}", *names.values()
    )
    what, rivals = "a compiled call on five subclass tensors", dict(zip(names, others, strict=True))
    details = {DIRECT: f"plain tensors {shown(plain)}"}
    command, machine = "python -m bench.compare --only wrappers", _machine("wrappers")
    yield Gain(what, "µs", command, ours, rivals, machine, CALLS, drawn=True, details=details)
    names = (f"Int8Tensor, {DIRECT}", f"by hand, {STOCK}", f"torchao, {STOCK}")
    ours, stock, torchao = _measured("kinds", f"Int8, {group}", *names)
    rivals, machine = {"by hand under stock": stock, "torchao": torchao}, _machine("kinds")
    yield Gain("a call with five small int8 weights", "µs", "make bench", ours, rivals, machine)
    ours, nested = _measured("kinds", f"Jagged, {group}", f"JaggedTensor, {DIRECT}", f"torch.nested, {STOCK}")
    rivals = {"`torch.nested`": nested}
    yield Gain("a call with five batches of uneven rows", "µs", "make bench", ours, rivals, machine)


def _layers() -> Iterator[Gain]:
    names = (f"weight-only, {DIRECT}", f"floats, {STOCK}", "weight-only, torchao")
    group = "bfloat16, 4096 by 4096, batch 1, inference, weight-only"
    what = "one row through 4096 by 4096 int8 weights"
    for file in ("int8-sizes", "int8-sizes-avx512"):
        ours, stock, torchao = _measured(file, group, *names)
        rivals = {"bfloat16 under stock": stock, "torchao": torchao}
        yield Gain(what, "µs", "python -m bench.int8_sizes", ours, rivals, _machine(file, "AVX-512"))
    names = (f"JaggedTensor, {DIRECT}", f"dense table, {STOCK}", f"torch.nested, {STOCK}")
    ours, stock, nested = _measured("layouts", "64 rows, training", *names)
    rivals = {"padded under stock": stock, "`torch.nested`": nested}
    what = "a training step of a layer on uneven rows"
    yield Gain(what, "µs", "make bench", ours, rivals, _machine("layouts"))


def _starts() -> Iterator[Gain]:
    ours, stock = _measured("compiling", "cold start, x * 2, N = 5, inference", DIRECT, STOCK)
    what, rivals = "a first call in a process that has compiled before", {"stock": stock}
    yield Gain(what, "ms", "make bench", ours, rivals, _machine("compiling"))
    if not (RESULTS / "starts.json").exists():  # takes an hour to measure
        return
    command = 'python -m bench.starts --turns 3 --store on --cases "int8 MLP of 12 layers, inference"'
    machine, what = _machine("starts"), "a first call in the next process"
    group = "{} start, int8 MLP of 12 layers, inference, {}"
    ours, stock = _measured("starts", group.format("cold", "wall"), DIRECT, STOCK)
    empty = "a first call with empty caches, 12 layers"
    yield Gain(empty, "ms", command, ours, {"stock": stock}, machine)
    ours, stock = _measured("starts", group.format("warm", "wall"), DIRECT, STOCK)
    yield Gain(f"{what}, 12 layers", "ms", command, ours, {"stock": stock}, machine, CALLS, drawn=True)
    more = _measured("starts", group.format("warm", "imports"), DIRECT, STOCK)
    ours, rivals = ours + more[0], {"stock": stock + more[1]}
    yield Gain(f"{what}, imports included", "ms", command, ours, rivals, machine, CALLS)


# ---- the tables ----------------------------------------------------------------------------------------------


def emit_table(gains: list[Gain]) -> str:
    """Returns the long table in Markdown."""
    out = ["|  | desugar | others | measured by |", "|---|---:|---|---|"]
    return "\n".join([*out, *(f"| {' | '.join(gain.cells())} |" for gain in gains)])


def emit_first(gains: list[Gain]) -> str:
    """Returns the table of the first page: the rows that show one of its gains, after its name; without machines."""
    firsts = {gain.shows: gain for gain in reversed(gains) if gain.shows}
    rows = [
        replace(
            gain,
            what=f"**{gain.shows}:** {gain.what}" if firsts[gain.shows] is gain else gain.what,
            machine="",
        )
        for gain in gains
        if gain.shows
    ]
    return emit_table(rows)


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
    """Returns a pair of bars for each drawn gain: ours over the strongest rival's; the longer one fills the width."""
    drawn = [gain for gain in gains if gain.drawn]
    height = TOP + ROW * len(drawn) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}" rx="6"/>',
        '<title id="t">Figures of the table below: desugar in blue, the fastest measured rival in grey</title>',
        f'<text class="title" x="{LEFT}" y="24">Beside the fastest rival that was measured (shorter is better)</text>',
        f'<text class="figure" x="{LEFT}" y="44">blue: desugar; grey: the rival that is named</text>',
    ]
    for index, gain in enumerate(drawn):
        out += _pair(gain, TOP + ROW * index)
    return "\n".join([*out, "</svg>"]) + "\n"


def _pair(gain: Gain, y: int) -> Iterator[str]:
    rival, least = min(gain.rivals.items(), key=lambda item: item[1])
    scale = (WIDTH - 2 * LEFT) / max(least, gain.ours)
    yield f'<text x="{LEFT}" y="{y + 14}">{escape(gain.what)}</text>'
    figures = f"{shown(gain.ours)} {gain.unit}, {rival} {shown(least)} {gain.unit}"
    yield f'<text class="figure" x="{WIDTH - LEFT}" y="{y + 14}" text-anchor="end">{escape(figures)}</text>'
    for name, value in (("other", least), ("ours", gain.ours)):
        thick = BAR if name == "other" else BAR // 2
        top = y + 20 + (BAR - thick) // 2
        yield f'<rect class="{name}" x="{LEFT}" y="{top}" width="{value * scale:.1f}" height="{thick}" rx="2"/>'


def write() -> None:
    """Writes the tables into their pages, and the picture beside the docs."""
    gains = find_gains()
    for page, table in ((README, emit_first(gains)), (PERFORMANCE, emit_table(gains))):
        text = page.read_text()
        page.write_text(TABLE.sub(lambda match, table=table: match[1] + table + "\n<!-- end -->", text))
    PICTURE.write_text(emit_picture(gains))


if __name__ == "__main__":
    write()
