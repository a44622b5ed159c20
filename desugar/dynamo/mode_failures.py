"""Describes which mode of PyTorch differs from that of an earlier program, with both values where they are known.

Dynamo names the modes that changed, without values. The present value is that of the call; that of a switch was the
other one before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

_AUTOCAST = re.compile(r"autocast\((\w+)\)_(enabled|dtype)")

_READERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "grad_mode": ("gradients", torch.is_grad_enabled),
    "autocast_cache_enabled": ("cache of autocast", torch.is_autocast_cache_enabled),
    "deterministic_algorithms": ("deterministic algorithms", torch.are_deterministic_algorithms_enabled),
    "deterministic_algorithms_warn_only": (
        "deterministic algorithms only warn",
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    "num_threads": ("number of threads", torch.get_num_threads),
    "default_dtype": ("default dtype", torch.get_default_dtype),
}


def describe_modes(names: str) -> str:
    """Returns what differs.

    Args:
        names: Dynamo's names of the modes, separated by spaces.
    """
    return "; ".join(map(_describe, names.split()))


def _describe(name: str) -> str:
    found = _AUTOCAST.fullmatch(name)
    if found is not None and found[2] == "enabled":
        return _values(f"autocast on {found[1]}", torch.is_autocast_enabled(found[1]))
    if found is not None:
        return _values(f"dtype of autocast on {found[1]}", torch.get_autocast_dtype(found[1]))
    if name in _READERS:
        words, read = _READERS[name]
        return _values(words, read())
    return f"another mode: {name}"


def _values(words: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"{words}: expected {'off' if value else 'on'}, got {'on' if value else 'off'}"
    return f"{words}: expected another value, got {str(value).removeprefix('torch.')}"
