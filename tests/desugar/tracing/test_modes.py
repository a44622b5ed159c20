"""What a trace runs under."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from desugar import DesugarError
from desugar.tracing.modes import tracing_modes

# ---- a trace -------------------------------------------------------------------------------------------------


UNKNOWN = {
    "a branch": (lambda x: bool(x.sum() > 0), "depends on the data of a tensor"),
    "a list": (lambda x: x.tolist(), "depends on the data|numbers in a tensor are read"),
    "memory": (lambda x: x.data_ptr(), "the memory of a tensor is read"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_a_trace_cannot_know_is_named(name):
    """Dynamo sees it in the user's code; what it does not look at, and the code of a class, may do it in a trace."""
    read, match = UNKNOWN[name]
    with pytest.raises(DesugarError, match=match) as caught, tracing_modes(FakeTensorMode()):
        read(torch.ones(3))
    assert caught.value.instead and caught.value.where is not None
