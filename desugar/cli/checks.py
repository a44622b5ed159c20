"""Checks that run before a command does its work: files that it will write, and names of backends."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from desugar.backends.choose import choose_backend


def check_writable(*paths: Path | None) -> None:
    """Raises `typer.BadParameter` if a file cannot be written."""
    for path in filter(None, paths):
        if not path.resolve().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.resolve().parent} to write {path.name} into")
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; expected a file to write")
        if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
            raise typer.BadParameter(f"{path} may not be written here")


def check_outputs(*outputs: tuple[str, Path | None, str]) -> None:
    """Raises `typer.BadParameter` for a file that cannot be written, a file given twice, and a file of another kind.

    Args:
        *outputs: Option, file, and the suffix of its kind. An existing file with another suffix may be the user's
            script.
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
    """Raises `typer.BadParameter` for a name that is not a backend's."""
    try:
        choose_backend(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
