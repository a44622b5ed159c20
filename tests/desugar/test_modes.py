"""What a trace runs under, and what of the caller's modes a program depends on."""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from desugar.modes import function_modes, is_traced_by_others, without_saved_tensor_hooks
from tests.desugar.classes import Pair, make
from tests.desugar.judge import by_pass, judge

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


# ---- those that look at every op -----------------------------------------------------------------------------


class Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **kwargs or {})


def test_a_dispatch_mode_sees_the_functions_own_ops():
    compiled, x = by_pass(lambda x: (x * 2).sin()), torch.ones(2)
    assert not is_traced_by_others()
    with Count() as mode:
        assert is_traced_by_others()
        compiled(x)
    assert mode.calls == 2 and compiled.programs == []


# ---- torch function modes ------------------------------------------------------------------------------------


class Double(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        return out * 2 if func is torch.sin else out


def test_a_function_mode_has_a_program_of_its_own():
    compiled = by_pass(torch.sin)
    for _ in range(2):
        judge(torch.sin, lambda: (torch.ones(2),), compiled)
        with (mode := Double()):
            assert function_modes() == (mode,)
            judge(torch.sin, lambda: (torch.ones(2, requires_grad=True),), compiled)
    assert len(compiled.programs) == 3, "each mode object is another one"


def test_equal_default_devices_are_one():
    def fn(x):
        return x + torch.ones(2)

    compiled = by_pass(fn)
    for _ in range(2):
        with torch.device("cpu"):
            assert function_modes() == (torch.device("cpu"),)
            judge(fn, lambda: (make(Pair, 2),), compiled)
    assert len(compiled.programs) == 1
