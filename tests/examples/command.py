"""Runs an example as its command."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner


def run_command(main: Callable[..., Any], *options: str) -> Result:
    """Runs the command in this process, on a wide screen."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, options, env={"COLUMNS": "120"})


def check_exits(capsys: pytest.CaptureFixture[str], words: str, call: Callable[..., Any], *args: Any) -> None:
    """Checks that a call ends the command with a failure, and that its message contains `words`."""
    with pytest.raises(typer.Exit) as stopped:
        call(*args)
    assert stopped.value.exit_code == 1 and words in capsys.readouterr().err


def report_of(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: Any
) -> str:
    """The output of an example that runs the test kit on a class, here without compiling."""
    monkeypatch.setattr(example, "examine", partial(example.examine, paths={}))
    example.main(*args)
    return capsys.readouterr().out
