"""Trains a Parameter of a class, and beside it its innermost tensors as separate parameters; saves values."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subclasses import TensorSubclass
from tests.doors import DOORS

OPTIMIZERS = {
    "SGD": lambda ps, **how: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, **how),
    "AdamW": lambda ps, **how: torch.optim.AdamW(ps, lr=0.1, **how),
    "Adadelta": lambda ps, **how: torch.optim.Adadelta(ps, lr=0.1, **how),
    "RAdam": lambda ps, **how: torch.optim.RAdam(ps, lr=0.1, **how),
    "Adam": lambda ps, **how: torch.optim.Adam(ps, lr=0.1, **how),
    "Adagrad": lambda ps, **how: torch.optim.Adagrad(ps, lr=0.1, **how),
}


def innermost(x: Any) -> list[Tensor]:
    """Returns copies of the plain tensors inside of a value, or of a plain tensor."""
    if not isinstance(x, TensorSubclass):
        return [x.detach().clone()]
    return [t for name in x._layout.present for t in innermost(x.__dict__[name])]


def saved(x: Any, **how: Any) -> Any:
    """Saves an object to a file, and returns the object that `torch.load` reads with the options."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **how)


def check_trained(
    p: Any,
    loss: Callable[..., Any],
    plain: Callable[..., Any],
    optimizer: str = "AdamW",
    *,
    door: str = "eager",
    clip: bool = True,
    **how: Any,
) -> None:
    """Compares three steps on a Parameter with those on its innermost tensors.

    Args:
        p: The Parameter.
        loss: Takes the Parameter.
        plain: Takes the innermost tensors.
        optimizer: A name of `OPTIMIZERS`.
        door: The way in which the step runs.
        clip: Whether the norm of the gradients is clipped.
        how: Options of the optimizer.
    """
    separate = [nn.Parameter(t) for t in innermost(p)]

    def train(leaves: Sequence[Any], fn: Callable[..., Any], door: str) -> None:
        made = OPTIMIZERS[optimizer](leaves, **how)
        step = DOORS[door](lambda: made.step())
        for _ in range(3):
            fn(*leaves).backward()
            if clip:
                nn.utils.clip_grad_norm_(leaves, 1.0)
            step()
            made.zero_grad()

    train([p], loss, door)
    train(separate, plain, "eager")
    torch.testing.assert_close(innermost(p), [t.detach() for t in separate], atol=1e-5, rtol=1e-4)
