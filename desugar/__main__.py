"""The command line `python -m desugar`: explains a function, reports on a script or class, checks the installation."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Runs the command line; if typer is missing, exits with a message that names the package to install."""
    if importlib.util.find_spec("typer") is None:
        sys.exit("python -m desugar needs typer, which is not installed: pip install 'torch-desugar[cli]'")
    from desugar.cli.commands import app

    app(prog_name="python -m desugar")


if __name__ == "__main__":
    main()
