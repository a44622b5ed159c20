"""Plots the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

# The role of each kind; lines of one role look alike in all panels.
ROLES = {
    "plain": "plain",
    "TwoTensor": "by hand",
    "by hand": "by hand",
    "torch.nested": "peer",
    "torchao": "peer",
}
COLOURS = {"plain": "0.4", "by hand": "C1", "declared": "C0", "peer": "C2"}
STYLES = {
    "eager": ":",
    "torch.compile": "--",
    'torch.compile(backend="desugar")': "-.",
    "desugar.compile": "-",
}
LIMIT = ("plain", "torch.compile")


class Point(NamedTuple):
    """The median time in microseconds of one kind of argument, run in one way."""

    panel: str
    count: int
    kind: str
    way: str
    median: float


def save_scaling(points: Iterable[Point], path: Path) -> None:
    """Plots the time of a call over the number of wrapped arguments; stock PyTorch on plain tensors is the limit."""
    lines: dict[str, dict[tuple[str, str], list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        lines[point.panel][point.kind, point.way].append(point)
    height = (len(lines) + 1) // 2
    figure = Figure(figsize=(12, 4.5 * height), layout="constrained")
    panels = figure.subplots(height, 2, squeeze=False).flat
    legend = {}
    for panel, (title, curves) in zip(panels, lines.items(), strict=False):
        for key, curve in curves.items():
            counts, label = [point.count for point in curve], _label(*key)
            (legend[label],) = panel.plot(
                counts, [point.median for point in curve], label=label, **_look(*key)
            )
        panel.set(xscale="log", yscale="log", xlabel="wrapped arguments", ylabel="µs a call", title=title)
        panel.set_xticks(counts := sorted({p.count for curve in curves.values() for p in curve}), counts)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.legend(legend.values(), legend, loc="outside right center")
    figure.savefig(path, dpi=110)


def _label(kind: str, way: str) -> str:
    return f"{ROLES.get(kind, 'declared')}, {way}" + " (the limit)" * ((kind, way) == LIMIT)


def _look(kind: str, way: str) -> dict[str, Any]:
    """Returns the style of a line; a hand-written class gets a broad, pale line that stays visible below others."""
    role = ROLES.get(kind, "declared")
    look: dict[str, Any] = {"color": COLOURS[role], "linestyle": STYLES[way], "marker": "."}
    if (kind, way) == LIMIT:
        look |= {"color": "black", "linestyle": "-", "linewidth": 2.5, "alpha": 0.8, "marker": "s"}
    return {**look, "linewidth": 4, "alpha": 0.5} if role == "by hand" else look
