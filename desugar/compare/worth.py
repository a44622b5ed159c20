"""Answers whether compiling was worth it, with the cause and the remedy of each loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from desugar.compare.records import Way
from desugar.compare.ways import EAGER, TUNED, tuned_settings
from desugar.explain.records import Worth
from desugar.explain.text import bytes_text, count, duration

_EQUAL = 1.05  # times and bytes that differ by a smaller factor are equal
_LITTLE = 2**20  # bytes; a smaller difference is not a loss


def sum_up(
    calls: int,
    ways: Sequence[Way],
    *more: str,
    train: bool = False,
    backend: Any = "inductor",
    options: Mapping[str, Any] | None = None,
) -> Worth:
    """Sums up a comparison.

    Args:
        calls: The number of calls that were compared with eager mode.
        ways: Eager mode first, ours last.
        *more: Further facts about the comparison.
        train: Whether a call is a training step.
        backend: The compiler of our graphs.
        options: The options of our compilation.
    """
    compared = "results and gradients of {} compared" if train else "results of {} compared"
    told = compared.format(count(calls, "training step" if train else "call"))
    return Worth(
        tuple((way.name, way.call.median if way.call else None) for way in ways),
        "; ".join([told, *map(_text, ways[1:]), *more]),
        _answer(ways),
        tuple((way.name, way.memory) for way in ways),
        tuple(find_losses(ways, train, backend, options or {})),
    )


def _text(way: Way) -> str:
    return f"{way.name}: {way.verdict.state}" + (f" ({way.verdict.detail})" if way.verdict.detail else "")


def _answer(ways: Sequence[Way]) -> str:
    (eager, *_), ours = ways, ways[-1]
    if ours.call is None:
        return f"no, {ours.name} failed"
    if ours.verdict.state == "wrong":
        return f"no, {ours.name} does not do what eager mode does"
    if eager.call is None:
        return ""
    ratios = {way.name: way.call.median / ours.call.median for way in ways[:-1] if way.call is not None}
    word = {-1: "no", 0: "hardly", 1: "yes"}[_side(ratios[eager.name])]
    return f"{word}, " + ", ".join(_faster(name, ratio) for name, ratio in ratios.items())


def _side(ratio: float) -> int:
    """Returns 1 for a time that is clearly longer than ours, -1 for one that is clearly shorter."""
    return (ratio > _EQUAL) - (ratio * _EQUAL < 1)


def _faster(name: str, ratio: float) -> str:
    side = _side(ratio)
    if side == 0:
        return f"as fast as {name}"
    times = ratio if side > 0 else 1 / ratio
    many = f"{times:.2g}" if times < 99.5 else f"{times:,.0f}"
    return f"{many} times {'faster' if side > 0 else 'slower'} than {name}"


# ---------------------------------------------------------------------------------------------------- losses


def find_losses(ways: Sequence[Way], train: bool, backend: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """Yields each loss to a way that is faster than ours or takes less memory, with the cause and the remedy.

    A way that does not agree with eager mode is skipped.
    """
    *others, ours = ways
    for way in others:
        if way.verdict.agrees and way.call and ours.call:
            ratio = way.call.median / ours.call.median
            if _side(ratio) < 0:
                cause = _cause_of_time(way, ours, ours.call.median * (1 - ratio), backend, options)
                yield f"{_faster(way.name, ratio)}: {cause}"
            more = (ours.memory or 0) - (way.memory or 0)
            if more > _LITTLE and more > (way.memory or 0) * (_EQUAL - 1):
                yield f"{bytes_text(more)} more memory than {way.name}: {_CAUSES_OF_MEMORY[train]}"


# Whether a call is a training step -> the cause, and the remedy.
_CAUSES_OF_MEMORY = {
    True: "more tensors are kept for the backward; wrap layers in torch.utils.checkpoint",
    False: "its graph holds more tensors at once; compile smaller parts of the function",
}


def _cause_of_time(way: Way, ours: Way, lost: float, backend: Any, options: Mapping[str, Any]) -> str:
    """Returns the first cause that applies, with its remedy; `lost` is the difference in seconds."""
    slower = (
        "its graph or its wrapper takes longer"
        if ours.graph is None
        else "the kernels of its graph are slower"
    )
    broken = ours.programs.breaks if len(ours.programs.breaks) > len(way.programs.breaks) else ()
    settings = {name: value for name, value in tuned_settings(backend).items() if options.get(name) != value}
    outside = 0.0 if ours.graph is None or ours.call is None else ours.call.median - ours.graph
    causes = (
        *((note, True) for note in ours.programs.notes if note not in way.programs.notes),
        *((f"a graph ends at {line}; keep that line out of the function", True) for line in broken),
        (
            "it compiles for constant sizes, with tuned kernels if there are any; pass "
            + ", ".join(f"{name}={value!r}" for name, value in settings.items()),
            way.name == TUNED and bool(settings),
        ),
        (
            f"{duration(outside)} of a call are guards, the wrapper and autograd, whatever the sizes are. Compile more "
            "of the program as one function, or leave this one uncompiled",
            outside * 2 > lost,
        ),
        ('its graph runs op by op; pass backend="inductor"', backend == "eager"),
        (f"{slower}; leave this function uncompiled", way.name == EAGER),
        (f"{slower}; call it by torch.compile", True),
    )
    return next(text for text, applies in causes if applies)
