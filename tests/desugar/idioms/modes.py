"""Idioms of modes, transforms and breaks: what is switched around or inside a call, and where a graph ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.desugar.classes import Pair, Tagged, make
from tests.desugar.idioms.running import idiom
from tests.desugar.judge import backward

# ------------------------------------------------------------------------------------------------------ modes


@idiom
def grad_modes_inside(compile_):
    def fn(x, flag):
        with torch.no_grad():
            y = x * 2
            with torch.enable_grad():
                z = x * 3
        with torch.set_grad_enabled(flag):
            u = x * 4
        return y, z, u, torch.is_grad_enabled()

    fn, x = compile_(fn), make(TwoTensor, 2, 3, grad=True)
    for flag in (True, False, True):
        out = fn(x, flag)
        backward(out)
        yield out, x


@idiom
def grad_modes_around(compile_):
    fn, x = compile_(lambda x: (x * 2, torch.is_grad_enabled())), make(TwoTensor, 2, 3, grad=True)
    yield fn(x)
    with torch.no_grad():
        out = fn(x)
    yield out
    with torch.no_grad(), torch.enable_grad():
        out = fn(x)
    yield out


@idiom
def grad_mode_left_switched(compile_):
    def fn(x, flag):
        torch.set_grad_enabled(flag)
        return x * 2

    fn, x, found = compile_(fn), make(TwoTensor, 2, 3, grad=True), []
    try:
        for flag in (False, True, False):
            found.append((fn(x, flag), torch.is_grad_enabled()))
    finally:
        torch.set_grad_enabled(True)
    yield found


@idiom
def decorated_with_no_grad(compile_):
    @torch.no_grad()
    def helper(x):
        return x * 2

    fn, x = compile_(lambda x: helper(x) + x), make(TwoTensor, 2, 3, grad=True)
    for _ in range(2):
        out = fn(x)
        backward(out)
        yield out, x
    yield compile_(helper)(x)


@idiom
def inference_mode_around_some_calls(compile_):
    fn, x = compile_(lambda x: (x * 2, torch.is_inference_mode_enabled())), make(TwoTensor, 2, 3)
    yield fn(x)
    with torch.inference_mode():
        out, y = fn(x), make(TwoTensor, 2, 3)
        more = fn(y)
    yield out, more
    yield fn(x), fn(y)


@idiom
def inference_mode_inside(compile_):
    def fn(x):
        with torch.inference_mode():
            y = x * 2
        return y, x + 1

    fn = compile_(fn)
    for _ in range(2):
        yield fn(make(TwoTensor, 2, 3))


@idiom
def autocast_around_and_inside(compile_):
    def fn(x, w, inside):
        y = x @ w
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return y, x @ w, torch.is_autocast_enabled("cpu")

    fn, x, w = compile_(fn), make(TwoTensor, 2, 3), torch.ones(3, 4)
    for around in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
            out = fn(x, w, True), fn(x, w, False)
        yield out


@idiom
def default_dtype_changed(compile_):
    fn, x = (
        compile_(lambda x: (x * torch.ones(3), torch.tensor(1.5), torch.arange(3) / 2)),
        make(TwoTensor, 2, 3),
    )
    yield fn(x)
    torch.set_default_dtype(torch.float64)
    try:
        out = fn(x)
    finally:
        torch.set_default_dtype(torch.float32)
    yield out
    yield fn(x)


@idiom
def default_device_changed(compile_):
    fn, x = compile_(lambda x: (x * 2, torch.zeros(3))), make(TwoTensor, 2, 3)
    yield fn(x)
    with torch.device("meta"):
        out = fn(x)[1]
    yield out.device.type, tuple(out.shape)
    torch.set_default_device("meta")
    try:
        out = fn(x)[1]
    finally:
        torch.set_default_device(None)
    yield out.device.type, tuple(out.shape)
    yield fn(x)


@idiom
def deterministic_algorithms(compile_):
    fn, x = (
        compile_(lambda x: x * (2 if torch.are_deterministic_algorithms_enabled() else 3)),
        make(Pair, 2, 3),
    )
    yield fn(x)
    torch.use_deterministic_algorithms(True)
    try:
        out = fn(x)
    finally:
        torch.use_deterministic_algorithms(False)
    yield out
    yield fn(x)


@idiom
def function_mode_around(compile_):
    class Negated(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return -out if func is torch.sin else out

    fn, x = compile_(lambda x: torch.sin(x) * 2), make(TwoTensor, 2, 3)
    yield fn(x)
    with Negated():
        out = fn(x)
    yield out
    yield fn(x)


@idiom
def dispatch_mode_around(compile_):
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counting.count += func is torch.ops.aten.sin.default
            return func(*args, **(kwargs or {}))

    fn, x = compile_(lambda x: torch.sin(x) * 2), make(Tensor, 2, 3)
    yield fn(x)
    with Counting():
        out = fn(x)
    yield out, Counting.count
    yield fn(x)


# -------------------------------------------------------------------------------------------------- transforms


@idiom
def vmap_around(compile_):
    fn, x = compile_(lambda x, n: (x * n).sin()), make(Tensor, 4, 3)
    for n in (2, 3):
        yield fn(x, n), torch.vmap(fn, in_dims=(0, None))(x, n), fn(x, n)


@idiom
def vmap_and_grad_inside(compile_):
    def fn(x, squared):
        return torch.vmap(torch.func.grad(lambda row: (row * row if squared else row.sin()).sum()))(x)

    fn = compile_(fn)
    for squared in (True, False, True):
        yield fn(make(Tensor, 4, 3), squared)


@idiom
def varying_int_below_grad(compile_):
    fn = compile_(lambda x, n: torch.func.grad(lambda x: x.sum() * n)(x))
    for n in (2, 3):
        yield fn(make(Tensor, 4, 3), n)


@idiom
def grad_around(compile_):
    fn = compile_(lambda x: (x * x).sum())
    for _ in range(2):
        x = make(Tensor, 4, 3)
        yield fn(x), torch.func.grad(fn)(x), torch.func.grad_and_value(fn)(x), fn(x)


@idiom
def jvp_around(compile_):
    fn, x = compile_(lambda x: x.sin() * x), make(Tensor, 4, 3)
    yield fn(x)
    yield torch.func.jvp(fn, (x,), (torch.ones(4, 3),))
    yield fn(x)


@idiom
def dual_tensors(compile_):
    fn, x = compile_(lambda x: x.sin() * x), make(Tensor, 4, 3)
    yield fn(x)
    with fwad.dual_level():
        out = tuple(fwad.unpack_dual(fn(fwad.make_dual(x, torch.ones(4, 3)))))
    yield out
    yield fn(x)


@idiom
def functional_call(compile_):
    linear = nn.Linear(3, 2)
    fn, x = compile_(lambda params, x: torch.func.functional_call(linear, params, (x,))), make(Tensor, 4, 3)
    for scale in (1.0, 2.0):
        params = {name: p.detach() * scale for name, p in linear.named_parameters()}
        yield fn(params, x), dict(linear.named_parameters())


@idiom
def cond_inside(compile_):
    def fn(x, flag):
        return torch.cond(flag, lambda x: x.sin(), lambda x: x.cos(), (x,))

    fn, x = compile_(fn), make(Tensor, 2, 3)
    yield fn(x, torch.tensor(True)), fn(x, torch.tensor(False))


# ------------------------------------------------------------------------------------------------------ breaks


@idiom
def disabled_helper(compile_):
    calls = []

    @torch.compiler.disable
    def helper(x):
        calls.append(len(calls))
        return x * len(calls)

    fn, x = compile_(lambda x: helper(x * 2) + 1), make(TwoTensor, 2, 3)
    for _ in range(3):
        yield fn(x), calls


@idiom
def disabled_helper_last(compile_):
    @torch.compiler.disable
    def helper(x):
        return x, type(x).__name__

    fn = compile_(lambda x: helper(x * 2))
    for cls in (TwoTensor, Pair, Tensor):
        yield fn(make(cls, 2, 3))


@idiom
def explicit_break(compile_):
    def fn(x, state):
        y = x * 2
        state["before"] = y
        torch._dynamo.graph_break()
        state["n"] = state.get("n", 0) + 1
        return y + state["n"]

    fn, state = compile_(fn), {}
    for _ in range(3):
        x = make(TwoTensor, 2, 3, grad=True)
        out = fn(x, state)
        backward(out)
        yield out, state, x


@idiom
def break_with_writes(compile_):
    def fn(x, y):
        x.add_(1)
        view = y[0]
        torch._dynamo.graph_break()
        view.mul_(2)
        return x + y

    fn, x, y = compile_(fn), make(TwoTensor, 2, 3), make(TwoTensor, 2, 3)
    for _ in range(2):
        yield fn(x, y), x, y


@idiom
def break_in_a_loop(compile_):
    def fn(xs):
        out = []
        for n, x in enumerate(xs):
            out.append(x * n)
            torch._dynamo.graph_break()
        return sum(out)

    fn = compile_(fn)
    for n in (2, 3):
        yield fn([make(Tagged, 2, 3) for _ in range(n)])


@idiom
def break_in_a_nested_function(compile_):
    def helper(x, n):
        y = x.sin()
        torch._dynamo.graph_break()
        return y * n

    fn = compile_(lambda x, n: helper(helper(x, n) + 1, n) - 1)
    for n in (2, 3):
        yield fn(make(TwoTensor, 2, 3), n)


@idiom
def break_in_a_context(compile_):
    def fn(x):
        with torch.no_grad():
            y = x * 2
            torch._dynamo.graph_break()
            z = y * x
        return z + x

    fn = compile_(fn)
    for _ in range(2):
        x = make(TwoTensor, 2, 3, grad=True)
        out = fn(x)
        backward(out)
        yield out, x


@idiom
def threads(compile_):
    fn, found = compile_(lambda x, n: (x * n).sin()), {}

    def work(n, x):
        out = fn(x, n)
        backward(out)
        found[n] = out

    for _ in range(2):
        xs = [make(TwoTensor, 2, 3, grad=True) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4), xs))
        yield [found[n] for n in range(4)], xs


@idiom
def thread_locals(compile_):
    local = threading.local()
    local.scale = 2.0
    fn, x = compile_(lambda x: x * getattr(local, "scale", 1.0)), make(TwoTensor, 2, 3)
    yield fn(x)
    local.scale = 3.0
    yield fn(x)
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(fn, x).result()
