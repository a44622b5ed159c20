"""The checks that a wrapper skips, from what the compilation recorded when it generated the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from desugar.explain.records import LeftOut
from desugar.recording.listeners import SkippedCheck


def describe_left_out(text: str, skipped: Mapping[str, SkippedCheck]) -> Iterator[LeftOut]:
    """The skipped checks that a generated text names, by line.

    Args:
        text: The generated text.
        skipped: The comments that its compilation wrote, with what they say.
    """
    for number, line in enumerate(text.splitlines()):
        found = skipped.get(line.strip())
        if found is not None:
            yield LeftOut(number, found.check, found.proof)
