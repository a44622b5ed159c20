"""What long work says on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import typer


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that says on a terminal what is going on, each time in the place of what it said before."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    try:
        yield lambda text: typer.echo(f"\r\x1b[2K{text} ...", err=True, nl=False)
    finally:
        typer.echo("\r\x1b[2K", err=True, nl=False)
