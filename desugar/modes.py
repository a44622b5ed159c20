"""What a trace runs under, and what of a caller's modes a program depends on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from desugar import _torch as private

# ------------------------------------------------------------------------------------------------ for a trace


@contextlib.contextmanager
def tracing_modes(fake_mode: Any) -> Iterator[None]:
    """What both runs hold under: fake mode, functionalization, no engine threads, no hooks of the caller's."""
    with (
        without_saved_tensor_hooks(),
        fake_mode,
        torch.autograd.set_multithreading_enabled(False),
        torch.autograd.set_detect_anomaly(False),  # it would look for NaN in fakes
        torch.random.fork_rng(devices=()),
        private.enable_python_dispatcher(),
        private.FunctionalTensorMode(),
    ):
        yield


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """The caller's saved-tensor hooks (checkpointing, `save_on_cpu`) are for real tensors, not for fakes."""
    hooks = []
    while (top := private.top_saved_tensors_hooks(True)) is not None:
        hooks.append(top)
        private.pop_saved_tensors_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            private.push_saved_tensors_hooks(pack, unpack)


# ------------------------------------------------------------------------------------------------ for a call


def is_traced_by_others() -> bool:
    """Whether Dynamo, a functorch transform or a dispatch mode looks at every op: the function itself has to run."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return private.num_dispatch_modes() > 0 or private.peek_interpreter_stack() is not None


def function_modes() -> tuple[Any, ...]:
    """The torch function modes in force; two default devices are the same if they are equal."""
    modes = (private.function_mode_at(n) for n in range(private.num_function_modes()))
    return tuple(mode.device if isinstance(mode, private.DeviceContext) else mode for mode in modes)
