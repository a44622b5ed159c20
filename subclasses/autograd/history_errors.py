"""Errors of values whose derivative by way of their inner tensors is not known."""

from __future__ import annotations

from typing import Any

from subclasses.errors import DispatchError, one_of


def written_error(cls: Any) -> DispatchError:
    """Returns the error for reading inner tensors of a value after a write to it, or to what it was computed from."""
    return DispatchError(
        f"{one_of(cls)} that a rule made: its inner tensors are read where autograd records, and it, or what it "
        f"was computed from, was written to in place since; read them before the write, or {_instead(cls)}"
    )


def unknown_gradient_error(cls: Any) -> DispatchError:
    """Returns the error for a gradient by inner tensors at a value that a rule wrote to in an unknown way."""
    return DispatchError(
        f"{one_of(cls)} to which a rule wrote in place, itself or through a view: a gradient by its inner tensors "
        f"arrived, and how the write depends on them is not known. They were read, or torch.compile ended a graph "
        f"there, and asks for the gradient of each result by its inner tensors; desugar.compile does not. "
        f"Otherwise, {_instead(cls)}"
    )


def _instead(cls: Any) -> str:
    return (
        f"compute the value by ops that write nothing, such as torch.where and torch.cat. If a rule of "
        f"{cls.__name__} wrote, let it write to inner tensors where autograd records, not under torch.no_grad() or "
        f"to .data"
    )


def watched_view_error(cls: Any) -> DispatchError:
    """Returns the error for a view that a rule made, whose node does not see what reads its inner tensors."""
    return DispatchError(
        f"{one_of(cls)} that a rule made as a view: its inner tensors are read, and a hook (register_hook, "
        f"retain_grad) on the view would not see their gradients; register it on view.clone(), and use that"
    )
