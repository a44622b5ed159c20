"""What a trace runs under, and what of the caller's modes a program depends on."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from desugar import DesugarError
from desugar.modes import function_modes, is_traced_by_others, without_saved_tensor_hooks
from tests.desugar.classes import Pair, TwoTensor, make, plain_parts
from tests.desugar.judge import by_dynamo, by_pass, judge

# ---- differentiation from outside ----------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [torch.Tensor, Pair])
def test_forward_mode_derivatives(cls):
    def fn(x):
        return (x * x).sin()

    compiled, tangents = by_pass(fn), []
    compiled(torch.ones(3))
    for function in (fn, compiled):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.arange(3.0), torch.ones(3))
            tangents.append(forward_ad.unpack_dual(function(x)).tangent)
    assert tangents[0] is not None and torch.equal(*tangents)
    assert len(compiled.programs) == 1
    assert not is_traced_by_others()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    "functional_call": lambda f, x: torch.func.functional_call(
        torch.nn.Linear(2, 2), {"weight": f(x), "bias": x[0]}, x
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_functorch_over_a_compiled_function(transform):
    fn = lambda x: (x * x).sin()  # noqa: E731
    x, compiled = torch.randn(2, 2), by_pass(lambda x: (x * x).sin())
    compiled(x)
    got, want = transform(compiled, x), transform(fn, x)
    torch.testing.assert_close(got, want)


# ---- logs ----------------------------------------------------------------------------------------------------


def test_a_users_error_is_not_logged_as_torchs_own(caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    try:
        with pytest.raises(RuntimeError, match="same reduction dim"):
            by_pass(lambda x: x @ torch.ones(7, 7))(torch.ones(2, 3))
    finally:
        log.removeHandler(caplog.handler)
    assert [record for record in caplog.records if record.name == log.name] == []
    assert log.filters == []


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


# ---- grad mode -----------------------------------------------------------------------------------------------


def off_inside(x):
    y = x * 3
    torch.set_grad_enabled(False)
    z = y * 2
    torch.set_grad_enabled(True)
    return y, z


def left_off(x):
    y = x * 3
    torch.set_grad_enabled(False)
    return y


@pytest.mark.parametrize("way", [by_pass, by_dynamo])
@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
def test_gradients_left_off(cls, way):
    judge(off_inside, lambda: (make(cls, 2, 3, grad=True),), way=way, calls=2)
    compiled, x = way(left_off), make(cls, 2, 3, grad=True)
    for _ in range(2):
        try:
            if way is by_dynamo:  # AOTAutograd takes such a graph, and leaves them off too
                assert compiled(x).requires_grad and not torch.is_grad_enabled()
            else:
                with pytest.raises(DesugarError, match="leaves gradients turned off"):
                    compiled(x)
                assert torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(True)


@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
def test_writes_to_what_inference_mode_has_made(cls):
    """Refused outside of that mode, as in eager mode; a program for ordinary tensors is no program for these."""
    with torch.inference_mode():
        x = make(cls, 2, 3)
    fn = lambda x: x.add_(1)  # noqa: E731
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        fn(x)
    before = [part.clone() for part in plain_parts(x)]
    compiled = judge(fn, lambda: (make(cls, 2, 3),))
    with pytest.raises(RuntimeError, match="made in inference mode, and is written to outside"):
        compiled(x)
    assert all(map(torch.equal, plain_parts(x), before))
    with torch.inference_mode():
        compiled(x)
    assert all(torch.equal(part, old + 1) for part, old in zip(plain_parts(x), before, strict=True))
