"""Idioms of modes, transforms, breaks and gradients, and of the compiled function itself."""

import functools
import gc
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Pair, make
from tests.desugar.idioms.running import (
    again,
    between,
    calling,
    idiom,
    idioms_of_calls,
    idioms_of_changes,
    put,
    raised,
    trained,
    within,
    wrapper,
)
from tests.desugar.judge import backward, switched

# ------------------------------------------------------------------------------------------------------ modes


class Negated(TorchFunctionMode):
    """Negates sines."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return -out if func is torch.sin else out


def grad_modes(x, flag):
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * 3
    with torch.set_grad_enabled(flag):
        u = x * 4
    return y, z, u, torch.is_grad_enabled()


def inferring(x):
    with torch.inference_mode():
        y = x * 2
    return y, x + 1


@torch.no_grad()
def without_grad(x):
    return x * 2


def leaf_of(cls=TwoTensor):
    return make(cls, 2, 3, grad=True)


idioms_of_calls(
    {
        "grad_modes_inside": (
            grad_modes,
            lambda fn, x: (trained(fn, x.requires_grad_(), flag) for flag in (True, False, True)),
        ),
        "grad_modes_around": (
            lambda x: (x * 2, torch.is_grad_enabled()),
            lambda fn, x: within(
                lambda: (fn(x.requires_grad_()), torch.enable_grad()(fn)(x)),
                None,
                torch.no_grad(),
            ),
        ),
        "decorated_with_no_grad": (
            lambda x: without_grad(x) + x,
            lambda fn, x: (trained(fn, x.requires_grad_()) for _ in range(2)),
        ),
        "decorated_with_no_grad_compiled": (without_grad, lambda fn, x: fn(x.requires_grad_())),
        "inference_mode_inside": (inferring, lambda fn, x: (fn(make(TwoTensor, 2, 3)) for _ in range(2))),
        "default_dtype_changed": (
            lambda x: (x * torch.ones(3), torch.tensor(1.5), torch.arange(3) / 2),
            lambda fn, x: within(
                lambda: fn(x), None, switched(torch.set_default_dtype, torch.float64, torch.float32), None
            ),
        ),
        "default_device_changed": (
            lambda x: (x * 2, torch.zeros(3)),
            lambda fn, x: within(
                lambda: [tuple(out.shape) if out.is_meta else out for out in fn(x)],
                *(None, torch.device("meta"), switched(torch.set_default_device, "meta", None), None),
            ),
        ),
        "deterministic_algorithms": (
            lambda x: x * (2 if torch.are_deterministic_algorithms_enabled() else 3),
            lambda fn, x: within(
                lambda: fn(x), None, switched(torch.use_deterministic_algorithms, True, False), None
            ),
            Pair,
        ),
        "function_mode_around": (
            lambda x: torch.sin(x) * 2,
            lambda fn, x: within(lambda: fn(x), None, Negated(), None),
        ),
    }
)


# -------------------------------------------------------------------------------------------------- transforms


MATRIX = Tensor, 4, 3
idioms_of_calls(
    {
        "vmap_around": (
            lambda x, n: (x * n).sin(),
            lambda fn, x: ((fn(x, n), torch.vmap(fn, in_dims=(0, None))(x, n), fn(x, n)) for n in (2, 3)),
            *MATRIX,
        ),
        "varying_int_below_grad": (
            lambda x, n: torch.func.grad(lambda x: x.sum() * n)(x),
            lambda fn, x: (fn(make(*MATRIX), n) for n in (2, 3)),
        ),
        "cond_inside": (
            lambda x, flag: torch.cond(flag, lambda x: x.sin(), lambda x: x.cos(), (x,)),
            lambda fn, x: (fn(x, torch.tensor(True)), fn(x, torch.tensor(False))),
            Tensor,
        ),
    }
)


# ------------------------------------------------------------------------------------------------------ breaks


@torch.compiler.disable
def name_of_the_type(x):
    return x, type(x).__name__


def breaking(x, state):
    y = x * 2
    state["before"] = y
    torch._dynamo.graph_break()
    state["n"] = state.get("n", 0) + 1
    return y + state["n"]


def breaking_between_writes(x, y):
    x.add_(1)
    view = y[0]
    torch._dynamo.graph_break()
    view.mul_(2)
    return x + y


def breaking_in_a_context(x):
    with torch.no_grad():
        y = x * 2
        torch._dynamo.graph_break()
        z = y * x
    return z + x


idioms_of_calls(
    {
        "disabled_helper_last": (
            lambda x: name_of_the_type(x * 2),
            lambda fn, x: (fn(make(cls, 2, 3)) for cls in (TwoTensor, Pair, Tensor)),
        ),
        "explicit_break": (
            breaking,
            lambda fn, x: ((*trained(fn, leaf_of(), state), state) for state in [{}] for _ in range(3)),
        ),
        "break_with_writes": (
            breaking_between_writes,
            lambda fn, x: ((fn(x, y), x, y) for y in [make(TwoTensor, 2, 3)] for _ in range(2)),
        ),
        "break_in_a_context": (
            breaking_in_a_context,
            lambda fn, x: (trained(fn, leaf_of()) for _ in range(2)),
        ),
    }
)


idioms_of_changes(
    {
        "functional_call": (
            lambda: nn.Linear(3, 2),
            lambda linear: lambda params, x: torch.func.functional_call(linear, params, (x,)),
            lambda fn, linear: (
                (
                    fn({name: p.detach() * n for name, p in linear.named_parameters()}, make(Tensor, 4, 3)),
                    dict(linear.named_parameters()),
                )
                for n in (1.0, 2.0)
            ),
        ),
        "disabled_helper": (
            list,
            lambda calls: (lambda helper: lambda x: helper(x * 2) + 1)(
                torch.compiler.disable(lambda x: (calls.append(len(calls)), x * len(calls))[1])
            ),
            *(lambda fn, calls: (fn(wrapper()), calls), again, again),
        ),
        "gradient_read_inside": (
            leaf_of,
            lambda _: lambda x: x * 2 if x.grad is None else x * 2 - x.grad,
            *(trained, again, again, put(grad=None)),
        ),
        "detached_state": (
            lambda: {"h": torch.zeros(2, 3)},
            lambda state: lambda x: (lambda h: (state.update(h=h.detach()), h)[1])((state["h"] + x).tanh()),
            *(lambda fn, state: (*trained(fn, leaf_of()), state), again, again),
        ),
    }
)


@idiom
def thread_locals(compile_):
    local = threading.local()
    local.scale = 2.0
    fn, x = compile_(lambda x: x * getattr(local, "scale", 1.0)), make(TwoTensor, 2, 3)
    yield from between(lambda: fn(x), lambda: setattr(local, "scale", 3.0))
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(fn, x).result()


# ---- gradients -----------------------------------------------------------------------------------------------


def toggling(x):
    y = (x * 2).detach().requires_grad_()
    return y, y * 3


def grad_inside(x):
    y = (x * x).sum()
    (grad,) = torch.autograd.grad(y, x)
    return grad * 2


def detaching(x):
    hidden, cell = (x * 2).chunk(2)
    return hidden * cell, hidden.detach(), cell.detach()


idioms_of_calls(
    {
        "requires_grad_toggled": (
            lambda x: (x * x, x.requires_grad),
            lambda fn, x: (trained(fn, x.requires_grad_(flag)) for flag in (False, True, False, True)),
        ),
        "requires_grad_toggled_inside": (toggling, lambda fn, x: (trained(fn, x) for _ in range(2))),
        "gradient_computed_inside": (grad_inside, lambda fn, x: (fn(leaf_of(Tensor)) for _ in range(2))),
        "detached_parts": (detaching, lambda fn, x: (fn(make(cls, 2, 3)) for cls in (Tensor, TwoTensor))),
    }
)


@idiom
def tensor_hook_of_an_argument(compile_):
    fn, x, seen, handles = compile_(lambda x: x.sin()), leaf_of(), [], []
    return between(
        lambda: (trained(fn, x), seen),
        lambda: handles.append(x.register_hook(lambda grad: (seen.append(1), grad * 3)[1])),
        lambda: handles[0].remove(),
    )


# ---- the compiled function itself -----------------------------------------------------------------------------------

OFFSET = 1.0


class Base(nn.Module):
    def __init__(self, scale=2.0):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


class Derived(Base):
    def forward(self, x, shift=0.0):
        return super().forward(x) + shift


# --------------------------------------------------------------------------------------------- compiled objects


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def generating(x, n):
    for step in range(n):
        yield x * step


idioms_of_calls(
    {
        "torch_function_compiled": (torch.sin, lambda fn, x: (fn(x), fn(make(Pair, 2, 3)))),
        "functional_compiled": (torch.nn.functional.relu, lambda fn, x: fn(x)),
        "method_of_tensors_compiled": (Tensor.cos, lambda fn, x: fn(x)),
        "operator_compiled": (operator.add, lambda fn, x: fn(x, 1)),
        "generator_function_compiled": (generating, lambda fn, x: (list(fn(x, n)) for n in (2, 3))),
        "objects_made_for_each_call": (
            lambda x, module: module(x) + module.scale,
            lambda fn, x: (fn(x, Base(scale)) for scale in (1.0, 2.0, 2.0, 3.0)),
        ),
        "more_variants_than_the_limit": (
            lambda x, name: (x * len(name), name),
            lambda fn, x: (fn(x, "a" * n) for n in (*range(12), 0, 11)),
        ),
        "exception_then_again": (
            lambda x, w: x.sin() @ w,
            lambda fn, x: (fails(fn, x, torch.ones(rows, 2)) for rows in (3, 5, 3)),
        ),
    }
)


def fails(fn, *args):
    """The result of a call, or whether it raises an error of PyTorch."""
    try:
        return fn(*args)
    except RuntimeError:
        return True


def scaling(scale):
    return lambda x: x * scale


def each(fns, held):
    return [fn(wrapper()) for fn in fns]


def shadowing_len(fn, held):
    shadowed = mock.patch(f"{__name__}.len", return_value=10, create=True)
    return within(lambda: fn(wrapper()), None, shadowed, None)


def of_a_dying_module(scale):
    return lambda held: (held.__setitem__(0, Base(scale)), gc.collect())


idioms_of_changes(
    {
        "partial_compiled": (
            lambda: functools.partial(lambda x, scale, shift=0: x * scale + shift, scale=2.0),
            *(None, lambda fn, part: (fn(wrapper()), fn(wrapper(), shift=1), fn(wrapper(), scale=3.0))),
            lambda part: part.keywords.update(scale=5.0),
        ),
        "callable_object_compiled": (
            lambda: Scale(2.0),
            *(lambda scale: [scale.__call__, Scale(7.0).__call__], each, put(factor=3.0)),
        ),
        "closures_of_one_code": (lambda: [scaling(float(n)) for n in (1, 2, 3)], None, each, again),
        "methods_of_many_objects": (
            lambda: [Base(float(n)) for n in range(4)],
            *(lambda models: [model.forward for model in models], each),
            lambda models: setattr(models[1], "scale", 11.0),
        ),
        "many_modules_of_one_class": (lambda: [Base(float(n)) for n in range(10)], None, each, again),
        "inherited_forward": (
            Derived,
            lambda module: [module, module.forward],
            lambda fns, module: [(fn(wrapper()), fn(wrapper(), shift=1.0), fn(wrapper(), 2.0)) for fn in fns],
            put(scale=3.0),
        ),
        "class_of_a_module_changed": (Derived, None, calling, put(__class__=Base)),
        "defaults_of_the_function_replaced": (
            lambda: lambda x, scale=2.0, *, shift=1.0: x * scale + shift,
            *(None, lambda fn, _: (raised(fn, wrapper()), fn(wrapper(), 4.0))),
            *(put(__defaults__=(3.0,)), put(__kwdefaults__={"shift": 5.0}), put(__defaults__=None)),
        ),
        "code_of_the_function_replaced": (
            lambda: lambda x: x * 2,
            *(None, calling, put(__code__=(lambda x: x + 5).__code__)),
        ),
        "global_deleted": (
            lambda: globals().update(OFFSET=1.0),
            *(lambda _: lambda x: x + OFFSET, lambda fn, _: raised(fn, wrapper())),
            *(lambda _: globals().pop("OFFSET"), lambda _: globals().update(OFFSET=2.0)),
        ),
        "builtin_shadowed": (lambda: None, lambda _: lambda x: x * len(x), shadowing_len),
        "guarded_module_dies": (
            lambda: [Base(2.0)],
            *(lambda holder: lambda x: holder[0](x), calling),
            *(of_a_dying_module(3.0), of_a_dying_module(2.0)),
        ),
    }
)


@idiom
def compiled_twice(compile_):
    scale = 2.0
    fn, x = lambda x: x * scale, make(TwoTensor, 2, 3)
    one, two = compile_(fn), compile_(fn)
    yield one(x), two(x), fn(x)
    scale = 3.0
    yield two(x), one(x), fn(x), compile_(one)(x)


@idiom
def compiled_function_calls_itself(compile_):
    def power(x, n):
        return x if n == 0 else fn(x, n - 1) * x

    fn = compile_(power)
    return (fn(make(TwoTensor, 2, 3), n) for n in (0, 1, 3, 2))


# ----------------------------------------------------------------------------------------- changes between calls


@idiom
def reset_between_calls(compile_):
    fn = compile_(lambda x, n: x * n)
    for n in (2, 3, 4):
        x = make(TwoTensor, 2, 3, grad=True)
        out = fn(x, n)
        torch._dynamo.reset()
        backward(out)
        yield out, x
