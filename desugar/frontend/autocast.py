"""The state of autocast around a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

AutocastState = tuple[tuple[str, bool, torch.dtype], ...]


def autocast_state() -> AutocastState:
    """Per device type, whether autocast is on and its dtype."""
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )


def is_autocast(state: AutocastState) -> bool:
    """Whether autocast is on for some device."""
    return any(enabled for _, enabled, _ in state)


@contextlib.contextmanager
def entering(state: AutocastState) -> Iterator[None]:
    """Autocast as it was."""
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in state:
            if enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield
