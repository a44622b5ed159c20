"""Runs a user's script as `python SCRIPT.py` would, while everything that is compiled in it is collected."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from desugar.explain.collector import Collector
from desugar.explain.records import Report


def run_script(path: Path, arguments: Sequence[str]) -> tuple[Report, int]:
    """Runs a script to its end, or to its error; returns what was compiled and its exit code."""
    collector = Collector()
    saved = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.resolve().parent)
    try:
        with collector.collecting():
            code = _run(path)
    finally:
        sys.argv, sys.path[:] = saved[0], saved[1]
    return collector.report(path.name), code


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
        _show(error, path)
        return 1
    return 0


def _show(error: BaseException, path: Path) -> None:
    """The traceback from the script's own first line on, as `python SCRIPT.py` shows it."""
    found = error.__traceback__
    while found is not None and Path(found.tb_frame.f_code.co_filename).resolve() != path.resolve():
        found = found.tb_next
    traceback.print_exception(type(error), error, found or error.__traceback__)
