"""Custom ops whose first call on the CPU imports nothing, and which take no time of their own in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import (
    any_requires_grad,
    apply_function,
    autograd_excluded,
    is_legacy_batchedtensor,
    skip_frames,
)
from subclasses._torch_tracing import is_transient_here

_library = torch.library.Library("subclasses", "FRAGMENT")


def custom_op(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator: ``torch.library.custom_op`` without mutated arguments, in this package's namespace.

    PyTorch wraps each kernel of a custom op, and the first call of the wrapper imports Dynamo. In a process that serves
    a package, that takes seconds. Here the CPU's kernel is the function itself. It must not return an argument.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        op: Any = torch.library.custom_op(f"subclasses::{name}", function, mutates_args=(), schema=schema)
        skip_frames(function)
        _library.impl(name, function, "CPU")
        op.kernel, op.function = function, None
        return op

    return decorate


def add_derivative(op: Any, save: Callable[..., None], differentiate: Callable[..., Any]) -> None:
    """Registers the derivative of an op of `custom_op`."""
    op.register_autograd(differentiate, setup_context=save)
    skip_frames(differentiate)
    methods = {"forward": partial(run, op), "setup_context": save, "backward": differentiate}
    name = f"GeneratedBackwardFor_subclasses_{op.kernel.__name__}_default"  # PyTorch's, which its errors show
    bases = (torch.autograd.Function,)
    op.function = type(name, bases, {n: staticmethod(f) for n, f in methods.items()})


def run(op: Any, *args: Any) -> Any:
    """Runs an op of `custom_op`; in eager mode its kernel itself, in an autograd function where autograd records.

    The dispatcher takes as long for such an op as for fifty ops of PyTorch.
    """
    if not _is_hidden(args):
        return op(*args)
    if torch.is_grad_enabled() and any_requires_grad(*args):
        return op(*args) if op.function is None else apply_function(op.function, *args)
    with autograd_excluded():
        return op.kernel(*args)


def _is_hidden(args: tuple[Any, ...]) -> bool:
    """Whether nothing but autograd sees an op: its tensors have data, and no mode, trace or transform is active."""
    return not is_transient_here() and all(
        a.__class__ is Tensor and not is_legacy_batchedtensor(a) for a in args if isinstance(a, Tensor)
    )
