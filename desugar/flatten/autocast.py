"""Reads and restores the state of autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from desugar.ir.stages import AutocastState


def autocast_state() -> AutocastState:
    """Returns (device type, whether autocast is enabled, autocast dtype) for the CPU and CUDA."""
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )


@contextlib.contextmanager
def restore_autocast(state: AutocastState) -> Iterator[None]:
    """Restores an autocast state inside the context.

    A device type that is off both in `state` and now is skipped.
    """
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in state:
            if enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield
