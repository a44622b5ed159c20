"""Runs a user's script as `python SCRIPT.py` would, while everything that is compiled in it is collected."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from desugar.cli.progress import progress
from desugar.compare.replay import ScriptCalls
from desugar.explain.collector import Collector
from desugar.explain.records import Report


def run_script(path: Path, arguments: Sequence[str], *, compare: bool = False) -> tuple[Report, int]:
    """Runs a script to its end, or to its error; returns what was compiled and its exit code.

    Args:
        path: The script.
        arguments: Its own arguments.
        compare: Whether each compiled call is made in other ways after the script has ended.
    """
    kept = ScriptCalls() if compare else None
    collector = Collector() if kept is None else Collector(kept.keep)
    saved = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.resolve().parent)
    try:
        with collector.collecting():
            code = _run(path)
        report = collector.report(path.name)
        if kept is not None:
            with progress() as tell:
                report = kept.compare(report, tell)
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
    except Exception as error:  # noqa: BLE001 - whatever the script raises ends the script, not the report
        show_error(error, lambda file: Path(file).resolve() == path.resolve())
        return 1
    return 0


def show_error(error: BaseException, is_users: Callable[[str], bool]) -> None:
    """Prints a traceback from the first line on that is the user's, by its file; all of it if none is."""
    found = error.__traceback__
    while found is not None and not is_users(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    if found is None and isinstance(error, SyntaxError):  # says itself where it is
        sys.stderr.writelines(traceback.format_exception_only(error))
        return
    traceback.print_exception(type(error), error, found or error.__traceback__)
