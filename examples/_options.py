"""The command-line options of the ragged language model's examples, and the way that they fail."""

from typing import Annotated, NoReturn

import typer

Steps = Annotated[int, typer.Option(help="Training steps before.")]
Quick = Annotated[bool, typer.Option(help="A tiny model, and graphs run without Inductor.")]
Seed = Annotated[int, typer.Option(help="Of the weights and of the batches.")]


def fail(message: str) -> NoReturn:
    """Ends the script with a message."""
    typer.secho(message, err=True, fg="red")
    raise typer.Exit(1)
