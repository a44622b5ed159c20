"""Torch functions that the trace intercepts, each with its handler.

A handler gets a call and the inputs of the program. It returns the function to call and its arguments. It raises
`DesugarError` for a call that a trace cannot record, and notes in the inputs the facts that the program depends on.

A trace uses PyTorch's decompositions. They differ from the eager kernels in three places:

- Dropout that drops nothing returns a copy; eager mode returns the argument.
- Recurrent layers apply no dropout between layers in training. Such a call raises.
- `multilabel_margin_loss` counts the targets after a -1. The call raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from desugar.errors import DesugarError, user_line
from desugar.flatten.inputs import Inputs
from desugar.tracing.unsupported import SPARSE, check_retain_grad, check_sparse, refuse_data, refuse_grad

Handler = Callable[[Any, Any, Any, Inputs], tuple[Any, Any]]

_data: Any = Tensor.data
_grad: Any = Tensor.grad

# ---- decompositions ----------------------------------------------------------------------------------------


def keep_undropped(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Replaces a dropout that drops nothing by its argument."""
    return (_return_input if _drops_nothing(*args, **kwargs) else func), args


def refuse_targets(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Raises for `multilabel_margin_loss`."""
    raise DesugarError(
        "multilabel_margin_loss is called inside the function, and PyTorch's decomposition counts the targets after "
        "a -1",
        where=user_line(),
        instead="run this part in eager mode, outside the compiled function",
        stock_is_wrong=True,
    )


def check_recurrent(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Raises for recurrent layers with dropout between them, where Dynamo does not break the graph at the layers."""
    # Dynamo breaks the graph at packed sequences, whose arguments differ.
    num_layers, dropout, train = args[-5:-2]
    if train and dropout and num_layers > 1:
        raise DesugarError(
            f"{func.__name__} has dropout between its layers, which PyTorch's decomposition leaves out",
            where=user_line(),
            instead="set torch._dynamo.config.allow_rnn = False, or call one layer at a time",
            stock_is_wrong=True,
        )
    return func, (_require_grad(args[0]), *args[1:]) if func is torch.lstm else args


def _drops_nothing(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool | None = None,  # the op's name for `training`
) -> bool:
    return p == 0 or (0 < p <= 1 and not (training if train is None else train))


def _return_input(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


def _require_grad(tensor: Tensor) -> Tensor:
    """Returns the tensor with `requires_grad` set: PyTorch's decomposition of lstm reads it of no other argument."""
    must_set = torch.is_grad_enabled() and not tensor.requires_grad
    return tensor.detach().requires_grad_() if must_set else tensor


# ---- sizes -------------------------------------------------------------------------------------------------

_ops = torch.ops.aten
SQUEEZES = (
    *(torch.squeeze, Tensor.squeeze, Tensor.squeeze_, _ops.squeeze, _ops.squeeze_),
    *(getattr(op, name) for op in (_ops.squeeze, _ops.squeeze_) for name in ("default", "dim", "dims")),
)


def guard_squeezed(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Guards, for each dimension that a call may remove, whether its size is 1.

    The symbols of a package may be 1, and PyTorch keeps such a dimension without a guard.
    """
    tensor = args[0] if args else kwargs["input"]
    dims = args[1] if len(args) > 1 else kwargs.get("dim", range(tensor.dim()))
    for dim in (dims,) if isinstance(dims, int) else dims:
        if isinstance(dim, int) and -tensor.dim() <= dim < tensor.dim():
            bool(tensor.size(dim) == 1)  # a guard, where the size is a symbol
    return func, args


# ---- storage offsets ---------------------------------------------------------------------------------------


def note_offset_read(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Notes that a function reads the storage offset of a tensor."""
    inputs.offsets_matter = True
    return func, args


# ---- the table ---------------------------------------------------------------------------------------------

HANDLERS: dict[Any, Handler] = {
    _data.__set__: refuse_data,
    _grad.__get__: refuse_grad,
    _grad.__set__: refuse_grad,
    _grad.__delete__: refuse_grad,
    Tensor.retain_grad: check_retain_grad,
    **dict.fromkeys(SPARSE, check_sparse),
    **dict.fromkeys(SQUEEZES, guard_squeezed),
    Tensor.storage_offset: note_offset_read,
    F.dropout: keep_undropped,
    torch.dropout: keep_undropped,
    F.multilabel_margin_loss: refuse_targets,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), check_recurrent),
}

# Handlers about PyTorch's decompositions. Where a class has a rule for the function, the rule runs instead.
REPLACING = frozenset({keep_undropped, refuse_targets, check_recurrent})
