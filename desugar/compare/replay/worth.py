"""Sums up a call in several ways for a report: was it worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from desugar.compare.records import Verdict
from desugar.explain.records import Worth

_EQUAL = 1.05  # times that differ by less are equal

Time = tuple[str, float | None]


def sum_up(calls: int, times: Sequence[Time], verdicts: Mapping[str, Verdict], *more: str) -> Worth:
    """Sums up a comparison.

    Args:
        calls: How many calls were compared with eager mode.
        times: For each way the seconds of a warm call, None if it failed: eager mode first, ours last.
        verdicts: For each way whether it does what eager mode does.
        *more: What else is to be said.
    """
    told = [f"{way}: {_text(verdicts[way])}" for way, _ in times[1:]]
    return Worth(tuple(times), "; ".join([f"{calls} calls compared", *told, *more]), _answer(times, verdicts))


def _text(verdict: Verdict) -> str:
    return f"{verdict.state} ({verdict.detail})" if verdict.detail else verdict.state


def _answer(times: Sequence[Time], verdicts: Mapping[str, Verdict]) -> str:
    (_, eager), (ours, seconds) = times[0], times[-1]
    if seconds is None:
        return f"no, {ours} failed"
    if verdicts[ours].state == "wrong":
        return f"no, {ours} does not do what eager mode does"
    if eager is None:
        return ""
    word = {-1: "no", 0: "hardly", 1: "yes"}[_side(eager / seconds)]
    return f"{word}, " + ", ".join(_faster(name, t / seconds) for name, t in times[:-1] if t is not None)


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
