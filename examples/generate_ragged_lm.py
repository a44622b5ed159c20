"""Let a language model continue prompts of 32 different lengths, in tables of four widths: four programs.

A server meets prompts of any length. A program for each length would be compiled for ever, and recorded anew as a
CUDA graph. A `PaddedTensor` keeps the lengths on the device: they are data like the tokens, and a program is compiled
for the width of the table alone. With widths in buckets of eight, four programs serve all lengths up to 32, and no
step waits to read a length.

The padding reaches no result, so each prompt goes on as it would by itself, and the script fails if one does not. It
computes in float64, so that rounding does not choose the most likely byte.

    python examples/generate_ragged_lm.py --steps 60
"""

import copy
from collections.abc import Callable

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import desugar
from _language_model import LanguageModel, train_briefly
from _options import Quick, Seed, Steps, fail
from subclasses.ragged import PaddedTensor

BUCKET, LONGEST = 8, 32
PROMPT = b"\nfor name, value in sorted(items):"  # its first byte alone, its first two, ... are the prompts

NextByte = Callable[[Tensor], Tensor]


def continue_batch(next_byte: NextByte, prompts: list[Tensor]) -> list[Tensor]:
    """Lets every prompt grow at once, until the longest input of the model has `LONGEST` bytes."""
    tokens, longest = PaddedTensor.from_tensors(prompts, multiple=BUCKET), max(map(len, prompts))
    for length in range(longest, LONGEST + 1):  # the host counts by itself: no step reads the length of a row
        new = next_byte(tokens)
        tokens = tokens.to_padded(multiple=BUCKET, at_least=length + 1).append(new)
    return tokens.to_tensors()


def continue_row(next_byte: NextByte, prompt: Tensor, steps: int) -> Tensor:
    """The same for one prompt, as a plain tensor."""
    for _ in range(steps):
        prompt = torch.cat([prompt, next_byte(prompt[None])[0, None]])
    return prompt


@torch.no_grad()
def generate_by_bucket(model: LanguageModel, backend: str) -> None:
    """Continues the prompts of each bucket as one batch; prints its cost, fails if a row is wrong.

    Raises:
        typer.Exit: a batch's row differs from the prompt continued by itself, or programs are not four.
    """
    model = copy.deepcopy(model).double()

    def next_byte(tokens: Tensor) -> Tensor:
        return model.logits(tokens)[:, -1].argmax(-1)

    compiled = desugar.compile(next_byte, backend=backend, dynamic=False)  # a program for each width
    table = Table(title=f"Prompts of {LONGEST} lengths, continued in buckets of {BUCKET}")
    for heading in ("prompts of", "bytes generated", "programs so far", "as row by row"):
        table.add_column(heading, justify="right")
    agree = True
    for first in reversed(range(1, LONGEST + 1, BUCKET)):
        lengths = range(first, first + BUCKET)
        prompts = [torch.tensor(list(PROMPT[:n])) for n in lengths]
        together = continue_batch(compiled, prompts)
        steps = LONGEST + 1 - lengths[-1]
        alone = [continue_row(next_byte, prompt, steps) for prompt in prompts]
        same = all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
        agree &= same
        cells = (
            f"{first}-{lengths[-1]} bytes",
            steps * len(prompts),
            len(compiled.programs),
            "yes" if same else "NO",
        )
        table.add_row(*map(str, cells))
    programs = len(compiled.programs)
    table.caption = f"{LONGEST} prompt lengths are served by {programs} programs"
    Console().print(table)
    if not agree or programs != LONGEST // BUCKET:
        fail("Generating in batches went wrong; see the table.")


def main(steps: Steps = 60, quick: Quick = False, seed: Seed = 0) -> None:
    """Train a small model on lines without padding, then let it continue prompts of 32 lengths."""
    model, _ = train_briefly(steps, seed, quick)
    generate_by_bucket(model, "eager" if quick else "inductor")


if __name__ == "__main__":
    typer.run(main)
