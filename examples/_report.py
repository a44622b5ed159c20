"""The report of the ragged language model's example: a progress bar, a table, a picture, and its verdict."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from _options import fail

RELATIVE_TOLERANCE = 2e-6
"""How far two ways' losses may differ at any step, relative to the loss.

The ways add the same float32 numbers in different orders. One step's loss then differs by a few units in the
last place (1.2e-7 each), and training carries the differences on. Over 100 steps, the ways differ by up to
3e-7 in float32 and by up to 4e-15 in float64. Dense eager differs from itself by 3e-7, too, with its rows in
reverse order. (At twice the learning rate the same training grows a rounding error a hundredfold.) A wrong
count of tokens, or padding that reaches a gradient, makes a difference of 1e-3 and more.
"""

tick_progress = partial(track, console=Console(stderr=True))  # leaves standard output to the table


@dataclass(frozen=True)
class Result:
    """The loss and the time of each step of one way of training, over `tokens` real tokens in all."""

    name: str
    losses: list[float]
    seconds: list[float]
    tokens: int
    programs: int

    @property
    def step_time(self) -> float:
        """The median step, in milliseconds."""
        return 1e3 * median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / len(self.seconds) / median(self.seconds)


def print_table(results: list[Result], lengths: list[list[int]]) -> None:
    """One row per way; below, how uneven the `lengths` of each step's rows were."""
    table = Table(title="One model, one seed, five ways (median step after warm-up)")
    table.add_column("way")
    for heading in ("step, ms", "real tokens / s", "final loss", "programs"):
        table.add_column(heading, justify="right")
    for r in results:
        speed = f"{r.tokens_per_second:,.0f}"
        table.add_row(r.name, f"{r.step_time:.1f}", speed, f"{r.losses[-1]:.5f}", str(r.programs))
    tokens, rectangle = sum(map(sum, lengths)), sum(len(rows) * max(rows) for rows in lengths)
    sizes = len({(len(rows), max(rows), sum(rows)) for rows in lengths})
    table.caption = (
        f"{len(lengths)} batches of {sizes} sizes; {tokens / rectangle:.0%} of a padded batch is real"
    )
    Console().print(table)


def save_picture(results: list[Result], path: Path) -> None:
    """Loss curves on the left, step times on the right."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    curves, times = figure.subplots(1, 2)
    for width, r in zip(range(2 * len(results), 0, -2), results, strict=True):
        curves.plot(r.losses, label=r.name, linewidth=width / 2)  # thinner on top: all stay visible
    curves.set(xlabel="step", ylabel="cross entropy, nats per byte")
    curves.legend()
    names = [r.name for r in results]
    bars = times.barh(names, [r.step_time for r in results], color=[f"C{i}" for i in range(len(names))])
    times.bar_label(bars, fmt="%.1f", padding=3)
    times.invert_yaxis()
    times.margins(x=0.12)  # room for the labels
    times.set(xlabel="median training step, ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def check_agreement(results: list[Result]) -> None:
    """Ends the program with status 1 if a way's loss departs from the first way's at any step.

    Raises:
        typer.Exit: naming the way and the step on standard error.
    """
    reference = results[0]
    for r in results[1:]:
        for step, (expected, got) in enumerate(zip(reference.losses, r.losses, strict=True)):
            if not abs(got - expected) <= RELATIVE_TOLERANCE * abs(expected):  # a NaN fails too
                message = (
                    f"at step {step} the loss is {got:.7f} ({r.name}) but {expected:.7f} ({reference.name})"
                )
                fail(f"The ways disagree: {message}.")
