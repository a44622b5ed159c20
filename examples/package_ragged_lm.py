"""Save a trained language model as packages, and use them in a process that has neither the model nor a compiler.

Two files: the int8 model that continues prompts of any lengths, and the float model's training step. A second process
gets the files and text alone. It imports no module of this folder, so it does not have the class of the model, and it
does not call `torch.compile`. The script fails if its text, or one of its losses, differs from the result of this
process.

    python examples/package_ragged_lm.py --steps 60
"""

import copy
import json
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
import typer
from rich.console import Console
from torch import Tensor

import desugar
from _language_model import LanguageModel, draw_batches, jagged, make_optimizer, read_lines, train_briefly
from _options import Quick, Seed, Steps, fail
from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from subclasses.ragged import JaggedTensor

PROMPTS = [b"\nimport ", b"\ndef ", b"\n    return self.", b"\nfor name, value in sorted(items):"]
NEW_BYTES = 12

# The program of the second process: it has the library, two files, and text.
CLIENT = """
import json, sys, time
import torch
import desugar
from subclasses.ragged import JaggedTensor

folder, request = sys.argv[1], json.load(sys.stdin)

start = time.perf_counter()
next_byte = desugar.load(f"{folder}/next_byte.pt2")
seconds = time.perf_counter() - start
rows = [torch.tensor(row) for row in request["prompts"]]
for _ in range(request["new_bytes"]):
    new = next_byte(JaggedTensor.from_tensors(rows))
    rows = [torch.cat([row, byte[None]]) for row, byte in zip(rows, new)]

step = desugar.load(f"{folder}/training.pt2")
optimizer = torch.optim.SGD(step.parameters(), lr=0.05, momentum=0.9, nesterov=True)
losses = []
for values, offsets, targets, longest in request["batches"]:
    tokens = JaggedTensor(torch.tensor(values), torch.tensor(offsets), max_length=longest)
    targets = JaggedTensor(torch.tensor(targets), tokens.offsets, max_length=longest)
    loss = step(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
compilers = [name for name in ("_language_model", "torch._inductor.compile_fx") if name in sys.modules]
print(json.dumps({"rows": [row.tolist() for row in rows], "losses": losses, "seconds": seconds, "has": compilers}))
"""


def continue_rows(next_byte, rows: list[Tensor]) -> list[Tensor]:
    """Lets every row grow by `NEW_BYTES`."""
    for _ in range(NEW_BYTES):
        new = next_byte(JaggedTensor.from_tensors(rows))
        rows = [torch.cat([row, byte[None]]) for row, byte in zip(rows, new, strict=True)]
    return rows


def save_packages(folder: Path, model: LanguageModel, small: LanguageModel, batch: list[Tensor]) -> None:
    """Writes both packages; `small` has int8 weights."""

    def next_byte(tokens: Tensor) -> Tensor:
        return small.logits(tokens)[:, -1].argmax(-1)

    prompts = JaggedTensor.from_tensors([torch.tensor(list(prompt)) for prompt in PROMPTS])
    desugar.save(folder / "next_byte.pt2", next_byte, desugar.call(prompts))
    desugar.save(folder / "training.pt2", model, desugar.call(*jagged(batch)), training=True)


def describe_batch(rows: list[Tensor]) -> tuple[list[int], list[int], list[int], int]:
    """A batch as lists, for another process."""
    tokens, targets = jagged(rows)
    return tokens.values.tolist(), tokens.offsets.tolist(), targets.values.tolist(), tokens.shape[1]


def run_client(folder: Path, batches: list[list[Tensor]]) -> dict:
    """Runs the second process, which does not see this folder (`-I`)."""
    request = {
        "prompts": [list(prompt) for prompt in PROMPTS],
        "new_bytes": NEW_BYTES,
        "batches": [describe_batch(rows) for rows in batches],
    }
    made = subprocess.run(
        [sys.executable, "-I", "-c", CLIENT, str(folder)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        fail(f"the second process failed:\n{made.stderr}")
    return json.loads(made.stdout)


def train(model: LanguageModel, batches: list[list[Tensor]]) -> list[float]:
    """The losses of some steps in eager mode."""
    optimizer, losses = make_optimizer(model), []
    for rows in batches:
        loss = model(*jagged(rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(steps: Steps = 60, quick: Quick = False, seed: Seed = 0) -> None:
    """Train a small model, save it as two packages, and use them in a second process."""
    model, _ = train_briefly(steps, seed, quick)
    small = copy.deepcopy(model)
    quantize_(small, Int8WeightOnlyConfig())
    batches = list(islice(draw_batches(read_lines(48 if quick else 256), 16, seed + 1), 4))
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.perf_counter()
        save_packages(folder, model, small, batches[0])
        saved = time.perf_counter() - start
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        got = run_client(folder, batches)
    with torch.no_grad():
        rows = continue_rows(
            lambda tokens: small.logits(tokens)[:, -1].argmax(-1),
            [torch.tensor(list(prompt)) for prompt in PROMPTS],
        )
    losses = train(model, batches)
    console = Console(highlight=False)
    console.print(
        f"saved in {saved:.1f} s: " + ", ".join(f"{n} {size / 2**20:.1f} MiB" for n, size in sizes.items())
    )
    console.print(f"loaded in {got['seconds'] * 1e3:.1f} ms by a process without the model's source")
    for row in got["rows"]:
        console.print(f"  {bytes(row)!r}")
    console.print(
        "losses here and there: "
        + ", ".join(f"{a:.6f} {b:.6f}" for a, b in zip(losses, got["losses"], strict=True))
    )
    same = [row.tolist() for row in rows] == got["rows"]
    close = all(abs(a - b) <= 1e-5 * a for a, b in zip(losses, got["losses"], strict=True))
    if not same or not close or got["has"]:
        fail(f"The packages went wrong: same text {same}, same losses {close}, imported {got['has']}.")


if __name__ == "__main__":
    typer.run(main)
