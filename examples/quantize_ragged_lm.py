"""Quantize a trained language model to int8: bytes of its weights, milliseconds per token, loss beside float.

`quantize_` replaces the weights of the linear layers (and, here, of the embedding) by `Int8Tensor`s of a quarter
their size. `Int8WeightOnlyConfig` multiplies activations as they are by integers;
`Int8DynamicActivationInt8WeightConfig` quantizes the activations too, row by row, and multiplies integers. A model
whose activations are a `PaddedTensor` or a `JaggedTensor` needs nothing else.

    python examples/quantize_ragged_lm.py --steps 60
"""

import copy
import time
from statistics import median
from typing import Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import desugar
from _language_model import LanguageModel, jagged, train_briefly
from _options import Quick, Seed, Steps, fail
from subclasses.int8 import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
    weight_bytes,
)

WORST_LOSS = 0.02  # how much worse the loss of an int8 model may be, relative to the float one's
ROUNDS, BATCH, WIDTH = 20, 16, 32

Model = TypeVar("Model", bound=nn.Module)

CONFIGS = {
    "float32": None,
    "int8 weights": Int8WeightOnlyConfig(),
    "int8 weights, activations": Int8DynamicActivationInt8WeightConfig(),
}


def quantized(model: Model, config: Any) -> Model:
    """A copy of the model, with the weights of its linear layers and of the table of bytes as int8."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    if config is not None:
        quantize_(model, config, lambda m, name: isinstance(m, nn.Linear) or name == "embedding")
    return model


def time_in_turns(steps: dict[str, Any], tokens: Tensor) -> dict[str, float]:
    """Milliseconds for each token that a step gives, the median over rounds in which all take turns."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(-2, ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            step(tokens)
            if round_ >= 0:
                samples[name].append(1e3 * (time.perf_counter() - start) / len(tokens))
    return {name: median(times) for name, times in samples.items()}


@torch.no_grad()
def compare_quantized(model: LanguageModel, rows: list[Tensor], backend: Any) -> None:
    """Prints bytes, speed and loss of the model and of its two int8 forms.

    Raises:
        typer.Exit: an int8 model predicts worse than it may.
    """
    models = {name: quantized(model, config) for name, config in CONFIGS.items()}

    def next_byte(m: LanguageModel) -> Any:
        return desugar.compile(lambda tokens: m.logits(tokens)[:, -1].argmax(-1), backend=backend)

    steps = {name: next_byte(m) for name, m in models.items()}
    tokens = torch.stack([torch.cat([row] * WIDTH)[:WIDTH] for row in rows[:BATCH]])
    milliseconds = time_in_turns(steps, tokens)
    losses = {name: float(m(*jagged(rows))) for name, m in models.items()}
    table = Table(title=f"The trained model in int8 ({BATCH} prompts of {WIDTH} bytes, one more byte each)")
    for heading in ("weights", "weight bytes", "ms per token", "loss on new lines"):
        table.add_column(heading, justify="right" if heading != "weights" else "left")
    for name, m in models.items():
        table.add_row(name, f"{weight_bytes(m):,}", f"{milliseconds[name]:.3f}", f"{losses[name]:.4f}")
    Console().print(table)
    if max(losses.values()) > losses["float32"] * (1 + WORST_LOSS):
        fail("An int8 model predicts worse than it may; see the table.")


def main(steps: Steps = 60, quick: Quick = False, seed: Seed = 0) -> None:
    """Train a small model on lines without padding, then quantize it."""
    model, rows = train_briefly(steps, seed, quick)
    compare_quantized(model, rows, "eager" if quick else "inductor")


if __name__ == "__main__":
    typer.run(main)
