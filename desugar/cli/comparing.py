"""The command `compare`: checks its options, runs a comparison, and writes the output and the exit code."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from desugar.cli.checks import check_backend, check_outputs
from desugar.cli.progress import progress
from desugar.compare import text
from desugar.compare.processes import WayFailed
from desugar.compare.records import Comparison, Request
from desugar.compare.run import compare
from desugar.compare.text import Table
from desugar.compare.ways import DIRECT, EAGER, OURS, STOCK, TUNED
from desugar.compare.worth import sum_up
from desugar.explain.records import Worth


def run(request: Request, json_out: Path | None = None, **plan: Any) -> None:
    """Compares, prints the table, writes the files; exits with code 1 if one of our ways fails or is wrong."""
    check_backend(request.backend)
    check_outputs(("--json", json_out, ".json"))
    if request.train and request.no_grad:
        raise typer.BadParameter("--train needs gradients and --no-grad has none; expected one of them")
    comparison = _compare(request, **plan)
    show(comparison)
    if json_out is not None:
        _write(
            json_out,
            lambda path: path.write_text(json.dumps(comparison.to_dict(), indent=1) + "\n", encoding="utf-8"),
        )
    if not all(comparison.way(way).verdict.agrees for way in OURS):
        raise typer.Exit(1)


def worth_of(request: Request, **plan: Any) -> Worth:
    """Runs a function in eager mode, under `torch.compile` and here, and sums it up for an explanation."""
    comparison = _compare(request, **plan)
    ways = [comparison.way(name) for name in (EAGER, STOCK, TUNED, DIRECT)]
    return sum_up(comparison.calls, ways, train=request.train, backend=request.backend)


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    try:
        write(path)
    except OSError as error:  # a full disk, or a folder that refuses in spite of its permissions
        typer.echo(f"{path} could not be written: {error.strerror}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"wrote {path}", err=True)


def _compare(request: Request, **plan: Any) -> Comparison:
    try:
        with progress() as tell:
            return compare(request, tell=tell, **plan)
    except WayFailed as error:
        raise _ended(error) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted; the processes have been ended", err=True)
        raise typer.Exit(130) from error


def _ended(error: WayFailed) -> Exception:
    """Returns the exception that ends the command if eager mode fails: code 2 for a wrong target, else code 1."""
    if error.kind == "target":
        return typer.BadParameter(error.text)
    typer.echo(
        error.traceback or f"eager mode failed, so there is nothing to compare with: {error.text}", err=True
    )
    return typer.Exit(1)


# --------------------------------------------------------------------------------------------------- showing


def show(comparison: Comparison) -> None:
    """Prints a comparison: with a coloured table on a terminal, where rich is installed."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        typer.echo(text.render(comparison), nl=False)
        return
    console = importlib.import_module("rich.console").Console(highlight=False)
    console.print(_rich_table(text.table_of(comparison)))
    for line in text.details(comparison):
        console.print(line, markup=False)
    for line in ("", *text.conditions(comparison)):
        console.print(line, style="dim", markup=False)


_STYLES = {
    "right": "green",
    "rounding": "green",
    "wrong": "bold red",
    "unknown": "yellow",
    "error": "bold red",
}


def _rich_table(rows: Table) -> Any:
    look = importlib.import_module("rich.box").SIMPLE_HEAD
    table = importlib.import_module("rich.table").Table(box=look, show_edge=False, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for number, title in enumerate(rows[0]):
        table.add_column(title, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for name, state, *cells in rows[1:]:
        style = "bold" if name in OURS else ""
        table.add_row(
            name, f"[{_STYLES[state]}]{state}[/]" if state in _STYLES else state, *cells, style=style
        )
    return table
