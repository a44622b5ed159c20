"""Rules that draw random numbers: a rule that runs again for its derivative would draw others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from subclasses._torch import TorchDispatchMode, in_dispatch_mode
from subclasses.errors import DispatchError, one_of


def run_without_random_numbers(cls: type, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a call.

    Raises:
        DispatchError: A rule of the class draws random numbers in it, with torch's own generators.
    """
    if not in_dispatch_mode():  # a trace draws none, but its graph will
        before = _states()
        out = run(*args, **kwargs)
        if _states() == before:
            return out
        # Another thread may have drawn: generators are those of the process, and a mode is that of this thread.
    with _RefuseRandomOps(cls):
        return run(*args, **kwargs)


def _states() -> list[Any]:
    """The states of the generators, of the CPU as bytes, of other devices as the number of what was drawn."""
    state = torch.default_generator.get_state()
    states: list[Any] = [ctypes.string_at(state.data_ptr(), state.numel())]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states += [generator.get_offset() for generator in torch.cuda.default_generators]
    return states


class _RefuseRandomOps(TorchDispatchMode):
    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls = cls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _error(self.cls)
        return func(*args, **(kwargs or {}))


def _error(cls: type) -> DispatchError:
    return DispatchError(
        f"a rule of {cls.__name__} that draws random numbers ran again, for the derivative of {one_of(cls)} by its "
        f"inner tensors, and drew others; register the rule for the function, such as torch.mul, where it runs once "
        f"and reads inner tensors with x.unwrap(), or draw the numbers outside and pass them as a tensor"
    )
