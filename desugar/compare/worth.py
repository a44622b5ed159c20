"""What a report says of a call in several ways."""

from __future__ import annotations

from collections.abc import Sequence

from desugar.compare.records import Verdict


def describe_verdicts(calls: int, verdicts: Sequence[tuple[str, Verdict]]) -> str:
    """Returns how many calls were compared with eager mode, and which ways did as it does."""
    return "; ".join([f"{calls} calls compared", *(f"{way}: {_text(found)}" for way, found in verdicts)])


def _text(verdict: Verdict) -> str:
    return f"{verdict.state} ({verdict.detail})" if verdict.detail else verdict.state
