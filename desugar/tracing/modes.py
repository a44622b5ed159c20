"""What a trace runs under, and what of a caller's modes a program depends on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch

from desugar import _torch as private
from desugar.errors import DesugarError
from desugar.tracing.functionalize import functional_mode
from desugar.user_code import find_line_of

# ------------------------------------------------------------------------------------------------ for a trace


@contextlib.contextmanager
def tracing_modes(fake_mode: Any) -> Iterator[Any]:
    """What both runs hold under: fake mode, functionalization (given), no engine threads, no hooks of the caller's."""
    with (
        without_saved_tensor_hooks(),
        fake_mode,
        torch.autograd.set_multithreading_enabled(False),
        torch.autograd.set_detect_anomaly(False),  # it would look for NaN in fakes
        torch.random.fork_rng(devices=()),
        private.enable_python_dispatcher(),
        functional_mode() as functionalization,
        _explaining(),
        _without_reports(),
    ):
        yield functionalization


@contextlib.contextmanager
def _without_reports() -> Iterator[None]:
    """An op that fails on fake tensors raises the user's error; it need not be logged as torch's own, too."""
    thread, log = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def is_news(record: logging.LogRecord) -> bool:
        return record.thread != thread or "attempting to run meta" not in record.getMessage()

    log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """What a trace cannot know, because only the data of the call at hand says it, or keep; with the user's line."""
    unknown = (
        private.GuardOnDataDependentSymNode,
        private.DataDependentOutputException,
        private.DynamicOutputShapeException,
    )
    try:
        yield
    except unknown as error:
        raise DesugarError(
            "the function depends on the data of a tensor in a way that a trace cannot follow "
            f"({type(error).__name__}: {str(error).splitlines()[0]})",
            where=_place_of(error),
            instead="use torch.where instead of if, or run this part in eager mode",
        ) from error
    except (AssertionError, RuntimeError, TypeError) as error:
        known = next((text for text in _ASSERTED if text in str(error)), None)
        if known is None:
            raise
        what, instead = _ASSERTED[known]
        message = f"{what} ({str(error).splitlines()[0]})"
        raise DesugarError(message, where=_place_of(error), instead=instead) from error


def _place_of(error: BaseException) -> str | None:
    line = find_line_of(error)
    return None if line is None else str(line)


_PRINT_OUTSIDE = "return it, and print it outside the compiled function"

# What torch says in a trace -> what it means, and what to do.
_ASSERTED = {
    "When use_reentrant=True": (
        "torch.utils.checkpoint with use_reentrant=True inside the function runs a backward of its own",
        "pass use_reentrant=False, or call the compiled function inside the checkpointed one",
    ),
    "token for effect": (
        "a backward has an op with an effect besides its result, which is not kept in a graph",
        "use the op that tells of errors by value (torch.linalg.inv_ex, cholesky_ex, lu_factor_ex, solve_ex) in "
        "that backward, or run this part in eager mode",
    ),
    "unallocated storage": (
        "the numbers in a tensor are read (tolist)",
        "read them outside the compiled function",
    ),
    "data is not allocated yet": (
        "the numbers in a tensor are read by an op that no trace knows (to tell a size, for instance)",
        "give the op the size, or run it outside the compiled function",
    ),
    "Cannot access data pointer": (
        "the memory of a tensor is read (copy.deepcopy, a kernel outside of torch)",
        "use clone(), or make the kernel an op with torch.library.custom_op",
    ),
    "SymFloat.__format__": ("a number that depends on data is written into a text", _PRINT_OUTSIDE),
    "Tensor.__format__": ("a tensor is written into a text", _PRINT_OUTSIDE),
    "resize a view tensor": (
        "a tensor gets another size in place",
        "build a new tensor instead of resizing",
    ),
    "convert all Tensors to FakeTensors": (
        "a rule, __torch_dispatch__ or autograd.Function uses a tensor from outside below autograd, where a trace "
        "cannot make it an input",
        "keep that tensor as an inner tensor of the class, pass it as an argument, or make it inside with torch.tensor",
    ),
}


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """The caller's saved-tensor hooks (checkpointing, `save_on_cpu`) are for real tensors, not for fakes."""
    hooks = []
    while (top := private.top_saved_tensors_hooks(True)) is not None:
        hooks.append(top)
        private.pop_saved_tensors_hooks()
    resting = private.rest_saved_tensors_hooks(False)
    try:
        yield
    finally:
        private.rest_saved_tensors_hooks(resting)
        for pack, unpack in reversed(hooks):
            private.push_saved_tensors_hooks(pack, unpack)
