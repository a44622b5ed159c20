"""Pictures of the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

COLOURS = {"plain": "C7", "TwoTensor": "C1", "declared": "C0"}
STYLES = {
    "eager": ":",
    "torch.compile": "--",
    'torch.compile(backend="desugar")': "-.",
    "desugar.compile": "-",
}


class Point(NamedTuple):
    """A timing of one kind of argument, run in one way; in microseconds."""

    mode: str
    count: int
    kind: str
    way: str
    median: float


def save_scaling(points: Iterable[Point], path: Path) -> None:
    """The time of a call against the number of wrapped arguments, one panel per mode."""
    lines: dict[str, dict[tuple[str, str], list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        lines[point.mode][point.kind, point.way].append(point)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, len(lines), squeeze=False)[0]
    for panel, (mode, curves) in zip(panels, lines.items(), strict=True):
        for (kind, way), curve in curves.items():
            panel.plot(
                [point.count for point in curve],
                [point.median for point in curve],
                label=f"{kind}, {way}",
                color=COLOURS[kind],
                linestyle=STYLES[way],
                marker=".",
            )
        panel.set(xscale="log", yscale="log", xlabel="wrapped arguments", ylabel="µs a call", title=mode)
        panel.set_xticks(counts := sorted({p.count for curve in curves.values() for p in curve}), counts)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=110)
