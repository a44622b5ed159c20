"""Private names of PyTorch's callables that `torch.compile` returns: which of them is being called."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any, NamedTuple

from torch import nn


class CompiledCall(NamedTuple):
    """A call of what `torch.compile` returned, in progress.

    Attributes:
        what: The function or module that was compiled.
        args: Its arguments.
        kwargs: Its keyword arguments.
        backend: The backend, with the options of `torch.compile`.
        context: PyTorch's object for this use of `torch.compile`.
        code: The code of the Python frame that runs the function.
    """

    what: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backend: Any
    context: Any
    code: types.CodeType


def compiled_call() -> CompiledCall | None:
    """Returns the innermost call of a callable of `torch.compile` in this thread; None if there is none.

    PyTorch does not say for which call a backend compiles, so its frames are searched for the function that calls the
    compiled one.
    """
    of_torch: Any = importlib.import_module("torch._dynamo.eval_frame")
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == of_torch.__file__:
            found = frame.f_locals
            context, fn = found["self"], found["fn"]
            backend = of_torch.innermost_backend(context.callback)
            return CompiledCall(
                _module_or_function(fn), found["args"], found["kwargs"], backend, context, code
            )
        frame = frame.f_back
    return None


def _module_or_function(fn: Any) -> Any:
    """Returns the module whose call PyTorch compiles in its place, or the function itself."""
    wrapped, owner = getattr(fn, "__wrapped__", None), getattr(fn, "__self__", None)
    if isinstance(wrapped, nn.Module):
        return wrapped
    is_call = isinstance(owner, nn.Module) and getattr(fn, "__func__", None) is type(owner).__call__
    return owner if is_call else fn
