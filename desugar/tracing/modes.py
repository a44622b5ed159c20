"""The modes of a trace, and torch's errors inside one, translated for the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from desugar import _torch as torch_private
from desugar.errors import DesugarError, user_line
from desugar.tracing.side_effects import functional_mode_class

# ----------------------------------------------------------------------------------------------------- modes


@contextlib.contextmanager
def tracing_modes(fake_mode: Any) -> Iterator[Any]:
    """Sets the modes of both runs; yields the functionalization mode.

    Enters the fake mode, functionalization and the Python dispatcher. Turns off the autograd engine's threads and the
    caller's saved-tensor hooks. Restores the CPU random number generator at the end. Raises torch's errors about
    tracing as `DesugarError`.
    """
    with (
        without_saved_tensor_hooks(),
        fake_mode,
        torch.autograd.set_multithreading_enabled(False),
        torch.autograd.set_detect_anomaly(False),  # anomaly mode would look for NaN in fake tensors
        torch.random.fork_rng(devices=()),
        torch_private.enable_python_dispatcher(),
        functional_mode_class()() as functionalization,
        _translate_torch_errors(),
    ):
        yield functionalization


@contextlib.contextmanager
def _translate_torch_errors() -> Iterator[None]:
    """Raises torch's errors about tracing as `DesugarError`, with the user's line.

    Raises:
        DesugarError: The function depends on the data of a tensor, or torch raised an error of `_TORCH_ERRORS`.
    """
    data_dependent = (
        torch_private.GuardOnDataDependentSymNode,
        torch_private.DataDependentOutputException,
        torch_private.DynamicOutputShapeException,
    )
    try:
        yield
    except data_dependent as error:
        raise DesugarError(
            "the function depends on the data of a tensor in a way that a trace cannot follow "
            f"({type(error).__name__}: {str(error).splitlines()[0]})",
            where=user_line(error),
            instead="use torch.where instead of if, or run this part in eager mode",
        ) from error
    except (AssertionError, RuntimeError, TypeError) as error:
        known = next((text for text in _TORCH_ERRORS if text in str(error)), None)
        if known is None:
            raise
        what, instead = _TORCH_ERRORS[known]
        message = f"{what} ({str(error).splitlines()[0]})"
        raise DesugarError(message, where=user_line(error), instead=instead) from error


_PRINT_OUTSIDE = "return it, and print it outside the compiled function"

# A substring of torch's message -> a description of the unsupported operation, and the remedy.
_TORCH_ERRORS = {
    "When use_reentrant=True": (
        "torch.utils.checkpoint with use_reentrant=True inside the function runs a backward of its own",
        "pass use_reentrant=False, or call the compiled function inside the checkpointed one",
    ),
    "token for effect": (
        "a backward calls an op with a side effect, which its graph cannot keep",
        "use the op that returns its errors (torch.linalg.inv_ex, cholesky_ex, lu_factor_ex, solve_ex) in "
        "that backward, or run this part in eager mode",
    ),
    "unallocated storage": (
        "the data of a tensor is read (tolist)",
        "read it outside the compiled function",
    ),
    "data is not allocated yet": (
        "the data of a tensor is read by an op that does not run on fake tensors (to compute a size, for instance)",
        "give the op the size, or run it outside the compiled function",
    ),
    "Cannot access data pointer": (
        "the memory of a tensor is read (copy.deepcopy, a kernel outside of torch)",
        "use clone(), or make the kernel an op with torch.library.custom_op",
    ),
    "SymFloat.__format__": ("a number that depends on data is formatted as a string", _PRINT_OUTSIDE),
    "Tensor.__format__": ("a tensor is formatted as a string", _PRINT_OUTSIDE),
    "resize a view tensor": (
        "a tensor is resized in place",
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
    """Disables the caller's saved-tensor hooks (checkpointing, `save_on_cpu`): they expect real tensors."""
    hooks = []
    while (top := torch_private.top_saved_tensors_hooks(True)) is not None:
        hooks.append(top)
        torch_private.pop_saved_tensors_hooks()
    were_resting = torch_private.rest_saved_tensors_hooks(False)
    try:
        yield
    finally:
        torch_private.rest_saved_tensors_hooks(were_resting)
        for pack, unpack in reversed(hooks):
            torch_private.push_saved_tensors_hooks(pack, unpack)
