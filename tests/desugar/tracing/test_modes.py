"""What a trace runs under."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from desugar import DesugarError
from desugar.flatten.autocast import autocast_state, is_autocast, restore_autocast
from desugar.tracing.modes import tracing_modes, without_saved_tensor_hooks

# ---- saved-tensor hooks --------------------------------------------------------------------------------------


def test_hooks_are_off_and_on_again_in_order():
    seen = []

    def hooks(name):
        return torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(name) or t, lambda t: t)

    x = torch.ones(2, requires_grad=True)
    with hooks("outer"), hooks("inner"):
        with contextlib.suppress(KeyError), without_saved_tensor_hooks():
            x.exp()
            raise KeyError
        assert seen == []
        x.exp()
        assert seen == ["inner"]
        torch._C._autograd._pop_saved_tensors_default_hooks()
        x.exp()
        assert seen == ["inner", "outer"]
        torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)


# ---- a trace -------------------------------------------------------------------------------------------------


def test_a_trace_leaves_no_mode_and_no_filter_behind():
    log, state = logging.getLogger("torch._subclasses.fake_tensor"), torch.get_rng_state()
    depth = torch._C._len_torch_dispatch_stack()
    for error in (KeyError, None):
        with contextlib.suppress(KeyError), tracing_modes(FakeTensorMode()):
            torch.rand(3)
            assert log.filters
            if error is not None:
                raise error
    assert log.filters == [] and torch._C._len_torch_dispatch_stack() == depth
    assert torch.equal(torch.get_rng_state(), state)


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


# ---- autocast ------------------------------------------------------------------------------------------------


def test_autocast_is_entered_as_it_was():
    off = autocast_state()
    assert not is_autocast(off)
    with torch.autocast("cpu", dtype=torch.float16):
        state = autocast_state()
    assert is_autocast(state) and autocast_state() == off
    with restore_autocast(state):
        assert autocast_state() == state
        with restore_autocast(off):
            assert not torch.is_autocast_enabled("cpu")
    assert autocast_state() == off
