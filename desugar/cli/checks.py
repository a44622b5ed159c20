"""What is checked before a command runs anything: files that it will write, names of backends and devices."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from desugar.backends.choose import choose_backend
from desugar.device.devices import find_device
from desugar.device.fake import check_installation


def check_writable(*paths: Path | None) -> None:
    """Says before anything is run that a file cannot be written."""
    for path in filter(None, paths):
        if not path.resolve().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.resolve().parent} to write {path.name} into")
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; expected a file to write")
        if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
            raise typer.BadParameter(f"{path} may not be written here")


def check_backend(name: str) -> None:
    """A name that is no backend's is a mistake on the command line."""
    try:
        choose_backend(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def check_device(name: str | None) -> None:
    """Exits unless a device is in the table and this installation can compile for it."""
    try:
        if name is not None:
            check_installation(find_device(name))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except RuntimeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
