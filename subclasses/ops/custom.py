"""Custom ops whose first call on the CPU imports nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from subclasses._torch import skip_frames

_library = torch.library.Library("subclasses", "FRAGMENT")


def custom_op(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator: ``torch.library.custom_op`` without mutated arguments, in this package's namespace.

    PyTorch wraps each kernel of a custom op, and the first call of the wrapper imports Dynamo. In a process that serves
    a package, that takes seconds. Here the CPU's kernel is the function itself. It must not return an argument.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(f"subclasses::{name}", function, mutates_args=(), schema=schema)
        skip_frames(function)
        _library.impl(name, function, "CPU")
        return op

    return decorate
