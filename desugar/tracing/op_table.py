"""The torch functions of which the trace does something else than to call them, each with what it does.

A handler gets a call and the inputs of the program. It returns the function to call and its arguments; it raises
`DesugarError` for what a trace cannot follow, and notes in the inputs what the program depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from desugar.flatten.inputs import Inputs
from desugar.flatten.storage_offsets import OFFSET_POSITIONS, note_offset_given, note_offset_read
from desugar.tracing.decompositions import (
    RECURRENT,
    drop_between_layers,
    ignore_later_targets,
    keep_undropped,
)
from desugar.tracing.scalar_indexing import index_by_scalars
from desugar.tracing.unsupported import SPARSE, check_retain_grad, check_sparse, refuse_data, refuse_grad

Handler = Callable[[Any, Any, Any, Inputs], tuple[Any, Any]]

_data: Any = Tensor.data
_grad: Any = Tensor.grad

HANDLERS: dict[Any, Handler] = {
    _data.__set__: refuse_data,
    _grad.__get__: refuse_grad,
    _grad.__set__: refuse_grad,
    _grad.__delete__: refuse_grad,
    Tensor.retain_grad: check_retain_grad,
    **dict.fromkeys(SPARSE, check_sparse),
    Tensor.__getitem__: index_by_scalars,
    Tensor.__setitem__: index_by_scalars,
    Tensor.storage_offset: note_offset_read,
    **dict.fromkeys(OFFSET_POSITIONS, note_offset_given),
    F.dropout: keep_undropped,
    torch.dropout: keep_undropped,
    F.multilabel_margin_loss: ignore_later_targets,
    **dict.fromkeys(RECURRENT, drop_between_layers),
}
