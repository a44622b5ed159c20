"""What is checked before a command runs anything: files that it will write, and names of backends."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from desugar.backends.choose import choose_backend


def check_writable(*paths: Path | None) -> None:
    """Says before anything is run that a file cannot be written."""
    for path in filter(None, paths):
        if not path.resolve().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.resolve().parent} to write {path.name} into")
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; expected a file to write")
        if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
            raise typer.BadParameter(f"{path} may not be written here")


def check_outputs(*outputs: tuple[str, Path | None, str]) -> None:
    """Refuses files that cannot be written, one file twice, and a file that is there and is of another kind.

    Args:
        *outputs: Option, file, and the suffix of its kind. The user's script may be such a file.
    """
    given = [(option, path, suffix) for option, path, suffix in outputs if path is not None]
    check_writable(*[path for _, path, _ in given])
    options: dict[Path, str] = {}
    for option, path, suffix in given:
        if path.suffix.lower() != suffix and path.exists():
            raise typer.BadParameter(
                f"{path} exists and is not a {suffix} file; expected another name, so that it is not overwritten"
            )
        if (other := options.setdefault(path.resolve(), option)) != option:
            raise typer.BadParameter(f"{other} and {option} both name {path}; expected two files")


def check_backend(name: str) -> None:
    """A name that is no backend's is a mistake on the command line."""
    try:
        choose_backend(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
