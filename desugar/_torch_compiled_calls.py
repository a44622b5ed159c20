"""Private names of PyTorch for the callables that `torch.compile` returns: finds the call in progress."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any, NamedTuple

from torch import nn


class CompiledCall(NamedTuple):
    """A call in progress of a callable that `torch.compile` returned.

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

    PyTorch does not pass the call to a backend. So this function searches the stack for PyTorch's frame that calls the
    compiled function.
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
    """Returns the module if PyTorch compiles the call of a module, else the function itself."""
    wrapped, owner = getattr(fn, "__wrapped__", None), getattr(fn, "__self__", None)
    if isinstance(wrapped, nn.Module):
        return wrapped
    is_call = isinstance(owner, nn.Module) and getattr(fn, "__func__", None) is type(owner).__call__
    return owner if is_call else fn
