"""A comparison as a picture: bars for the warm call, the first call and the memory of each way."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from desugar.compare.records import Comparison, Way
from desugar.compare.text import memory_text, spread_text
from desugar.compare.ways import EAGER, OURS
from desugar.explain.text import duration

_COLOURS = {"eager": "#8a8f98", "torch.compile": "#d08a2e"}
_OURS_COLOUR, _INK, _WRONG = "#2f6fb5", "#22262b", "#b3261e"

Panel = tuple[str, Callable[[Way], float | None], Callable[[Way], str]]
_CALL: Panel = ("a warm call", lambda way: way.call and way.call.median, lambda way: _call_text(way))
_PANELS: tuple[Panel, ...] = (
    _CALL,
    (
        "the first call, with empty caches",
        lambda way: way.first_call,
        lambda way: duration(way.first_call or 0),
    ),
    ("memory that it adds", lambda way: way.memory, lambda way: memory_text(way.memory or 0)),
)


def check_available() -> None:
    """Raises a ValueError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a picture needs matplotlib, which is not installed: pip install matplotlib")


def save_picture(comparison: Comparison, path: Path) -> None:
    """Writes the picture as a PNG file."""
    figure_class = importlib.import_module("matplotlib.figure").Figure
    figure = figure_class(figsize=(11, 1.6 + 0.36 * len(comparison.ways)), layout="constrained")
    figure.suptitle(_title(comparison), fontsize=11, color=_INK, x=0.01, ha="left")
    axes = figure.subplots(1, len(_PANELS), sharey=True)
    for axis, panel in zip(axes, _PANELS, strict=True):
        _draw(axis, comparison, panel)
    axes[0].set_yticks(range(len(comparison.ways)), [_label(way) for way in comparison.ways])
    for label, way in zip(axes[0].get_yticklabels(), comparison.ways, strict=True):
        label.set_color(_INK if way.verdict.agrees else _WRONG)
    figure.savefig(path, dpi=130, format="png")


def _title(comparison: Comparison) -> str:
    machine = dict(comparison.machine)
    target = comparison.request.target.rpartition("/")[2]  # a script by its name, not by where it lies
    what = "a training step" if comparison.request.train else "a call"
    return (
        f"{target}, {what}, {comparison.request.backend}    "
        f"torch {machine.get('torch')}, {machine.get('CPU')}, threads {machine.get('threads')}"
    )


def _label(way: Way) -> str:
    shown = {"judge": "", "right": ": right", "rounding": ": right to rounding"}
    return way.name + shown.get(way.verdict.state, f": {way.verdict.state}")


def _call_text(way: Way) -> str:
    if way.call is None:
        return ""
    ratio = "" if way.ratio is None or way.name == EAGER else f"  ({way.ratio.median:.2f} x eager)"
    return spread_text(way.call) + ratio


def _draw(axis: Any, comparison: Comparison, panel: Panel) -> None:
    title, value, text = panel
    values = [value(way) or 0.0 for way in comparison.ways]
    for number, way in enumerate(comparison.ways):
        colour = _OURS_COLOUR if way.name in OURS else _COLOURS.get(way.name, _INK)
        axis.barh(number, values[number], color=colour, height=0.62)
        shown = text(way) if value(way) is not None else "not measured"
        axis.annotate(
            shown, (values[number], number), (4, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    axis.set_title(title, fontsize=9.5, loc="left", color=_INK)
    axis.set_xlim(0, max(values, default=0) * 1.9 or 1)  # room for the text beside the longest bar
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    if not axis.yaxis_inverted():
        axis.invert_yaxis()
