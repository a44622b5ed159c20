"""Shows the progress of long work on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import typer


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows a text on a terminal, in the place of the text before."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    try:
        yield lambda text: typer.echo(f"\r\x1b[2K{text} ...", err=True, nl=False)
    finally:
        typer.echo("\r\x1b[2K", err=True, nl=False)
