"""Runs a user's script as `python SCRIPT.py` would, and collects its compilations."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from desugar.cli.progress import progress
from desugar.compare.processes import format_error
from desugar.compare.replay import ScriptCalls
from desugar.explain.collector import Collector
from desugar.explain.records import Report


def run_script(path: Path, arguments: Sequence[str], *, compare: bool = False) -> tuple[Report, int]:
    """Runs a script to its end, or to its error; returns the report of its compilations and its exit code.

    Args:
        path: The script.
        arguments: Its own arguments.
        compare: Whether each compiled call is repeated in other ways after the script has ended.
    """
    script_calls = ScriptCalls() if compare else None
    collector = Collector() if script_calls is None else Collector(script_calls.keep)
    saved = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.resolve().parent)
    try:
        with collector.collecting():
            code = _run(path)
        report = collector.report(path.name)
        if script_calls is not None:
            with progress() as tell:
                report = script_calls.compare(report, tell)
    finally:
        sys.argv, sys.path[:] = saved[0], saved[1]
    return report, code


def _run(path: Path) -> int:
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - an error of the script ends the script, not the report
        sys.stderr.write(format_error(error, lambda file: Path(file).resolve() == path.resolve()))
        return 1
    return 0
