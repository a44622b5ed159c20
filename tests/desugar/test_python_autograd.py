"""Autograd used inside of a compiled function, tensors that change in place, and modes around and left behind."""

import contextlib
import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

import desugar
from desugar import DesugarError
from tests.desugar.classes import Pair, TwoTensor, autograd_function, make, plain_parts
from tests.desugar.judge import (
    BOTH_DOORS,
    DOORS,
    EVERY_DOOR,
    assert_same_gradients,
    backward,
    judge,
    strictly,
)
from tests.doors import by_stock

CLASSES = pytest.mark.parametrize("cls", [Tensor, TwoTensor, Pair])
REFUSED = (DesugarError, torch._dynamo.exc.BackendCompilerFailed)

# ---- tensors that change -------------------------------------------------------------------------------------

CHANGES = {
    "resize_": lambda x, y: (y.resize_(5), x * 2)[1],
    "set_": lambda x, y: (y.set_(torch.zeros(3)), x * 2)[1],
    "grad": lambda x, y: (setattr(y, "grad", None), x * 2)[1],
    "grad, given": lambda x, y: (setattr(y, "grad", y.detach() * 2), x * 2)[1],
    "requires_grad_": lambda x, y: (y.requires_grad_(), x * y)[1],
    "requires_grad_ of a wrapper": lambda x, y: (x.requires_grad_(), x * y)[1],
}


@pytest.mark.sweep(12)
@BOTH_DOORS
@CLASSES
@pytest.mark.parametrize("name", CHANGES)
def test_arguments_that_are_changed_as_tensors(name, cls, door):
    judge(CHANGES[name], lambda: (make(cls, 2, 3), torch.ones(2, 3)), way=door, calls=3)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@BOTH_DOORS
@pytest.mark.parametrize("size", [(0,), (7,), (3, 2)])
def test_an_out_that_gets_another_size(size, door):
    judge(
        lambda x, out: torch.mul(x, 2, out=out),
        lambda: (torch.ones(2, 3), torch.zeros(size)),
        way=door,
        calls=3,
    )


@EVERY_DOOR
def test_a_module_that_is_converted_to_the_type_it_has(door):
    """Dynamo writes `set_` for the assignment of `.data`; here of a tensor to itself."""
    linear = nn.Linear(3, 3)
    fn, version = lambda x: (linear.to(x.dtype)(x), linear.weight, linear.bias), linear.weight._version
    compiled = judge(fn, lambda: (torch.randn(2, 3),), way=door, calls=2)
    x = torch.randn(2, 3)
    grads = [torch.autograd.grad(f(x)[0].sum(), [*linear.parameters()]) for f in (fn, compiled)]
    assert all(map(torch.equal, *grads)) and linear.weight._version == version


SET = {
    "to itself": lambda x: (x.set_(x), x * 2)[1],
    "to itself, then written": lambda x: (x.set_(x), x.add_(1), x * 2)[2],
    "to its detached self": lambda x: (x.set_(x.detach()), x.mul_(3), x * 2)[2],
    "to a part of itself": lambda x: (x.set_(x[1:]), x * 2)[1],
    "to what lies behind it": lambda x: (x.set_(torch.as_strided(x, (2,), (1,), 1)), x * 2)[1],
    "to another": lambda x: (x.set_(torch.zeros(4)), x * 2)[1],
}


@pytest.mark.sweep(24)
@BOTH_DOORS
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", SET)
def test_a_tensor_that_is_set(name, whole, door):
    judge(SET[name], lambda: (torch.arange(6.0) if whole else torch.arange(6.0)[1:3],), way=door, calls=2)


# ---- autograd inside -----------------------------------------------------------------------------------------


def retain_grad_inside(x):
    y = x * 2
    y.retain_grad()
    return (y * y).sum(), y


table, weight = torch.randn(3), torch.ones(3, requires_grad=True)


looks = autograd_function(lambda ctx, x: x.clone(), lambda ctx, g: g * table)  # at a tensor from outside
bypass = autograd_function(
    lambda ctx, x, w: x.clone(), lambda ctx, g: (g, g * 2)
)  # a tensor that it does not read

INSIDE = {
    "backward": lambda x: ((x * 2).sum().backward(), x * 3)[1],
    "retain_grad": retain_grad_inside,
    "a parameter": lambda x: nn.Parameter(torch.ones(3)) * x,
    "a buffer": lambda x: torch.frombuffer(bytearray(12), dtype=torch.float32) * x,
    "a wrapper around a buffer": lambda x: (
        TwoTensor(x.detach(), torch.frombuffer(bytearray(12), dtype=torch.float32)) * x
    ),
    "a function that looks outside": lambda x: looks(x),
    "a function with a parameter": lambda x: bypass(x, weight),
}


if torch.__version__ >= "2.15":  # whose Dynamo fails at a bytearray
    INSIDE = {name: fn for name, fn in INSIDE.items() if "buffer" not in name}


@pytest.mark.sweep(3)
@BOTH_DOORS
@pytest.mark.parametrize("name", INSIDE)
def test_autograd_inside(name, door):
    weight.grad = None
    judge(INSIDE[name], lambda: (torch.ones(3, requires_grad=True),), way=door, calls=3)


halve = autograd_function(lambda ctx, x: x, lambda ctx, g: g / 2)  # returns its input as it is


halve_flat = autograd_function(
    lambda ctx, x: x.view(-1), lambda ctx, g: (g / 2).view(3)
)  # a view of its input


RETURNED = {
    "the input": lambda x: halve(x),
    "a view of the input": lambda x: halve_flat(x),
    "an intermediate": lambda x: halve(x * 2),
    "the input, beside another result": lambda x: (halve(x), x * 2),
    "the input twice": lambda x: halve(halve(x)),
    "two results": lambda x: (halve(x), halve(x)),
    "a view of the result": lambda x: halve(x).view(3, 1),
    "of a view": lambda x: halve(x.view(3)),
    "of a slice": lambda x: halve(x[1:]),
    "beside its intermediate": lambda x: (lambda y: (y, halve(y)))(x * 2),
}


@pytest.mark.sweep(72)
@pytest.mark.parametrize(
    "door", [strictly, DOORS["torch.compile"], pytest.param(desugar.compile, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("cls", [Tensor, Pair])
@pytest.mark.parametrize("name", RETURNED)
def test_an_autograd_function_that_returns_its_input(name, cls, door):
    if door is desugar.compile and name == "beside its intermediate":
        pytest.skip("Inductor makes one buffer of both results, and the second one is a copy")
    judge(RETURNED[name], lambda: (make(cls, 3).requires_grad_(),), way=door)


@BOTH_DOORS
def test_gradients_that_are_no_arguments(door):
    retained, parameter = (door(INSIDE[name]) for name in ("retain_grad", "a function with a parameter"))
    for call, function in (
        (INSIDE["retain_grad"], INSIDE["a function with a parameter"]),
        (retained, parameter),
    ):
        loss, y = call(torch.arange(3.0, requires_grad=True))
        loss.backward()
        weight.grad = None
        function(torch.ones(3, requires_grad=True)).sum().backward()
        assert (y.grad.tolist(), weight.grad.tolist()) == ([0.0, 4.0, 8.0], [2.0] * 3)


# ---- modes ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(24)
@EVERY_DOOR
@CLASSES
def test_writes_to_what_inference_mode_has_made(cls, door):
    """Refused outside of that mode, as in eager mode; a program for ordinary tensors does not serve these."""
    fn = lambda x: x.add_(1)  # noqa: E731
    inferred = torch.inference_mode()(lambda: (make(cls, 2, 3),))
    compiled = judge(fn, lambda: (make(cls, 2, 3),), way=door)
    for function in (fn, by_stock(fn), compiled):
        with pytest.raises(RuntimeError, match=r"inference mode|InferenceMode"):
            function(*inferred())
    judge(fn, inferred, compiled, around=torch.inference_mode)


# ---- differentiation from outside ----------------------------------------------------------------------------


def squared_sine(x):
    return (x * x).sin()


@EVERY_DOOR
@pytest.mark.parametrize("cls", [Tensor, Pair])
def test_forward_mode_derivatives(cls, door):
    compiled, (primal, tangent) = door(squared_sine), (make(cls, 3), make(cls, 3))
    compiled(make(cls, 3))
    with forward_ad.dual_level():
        x = forward_ad.make_dual(primal, tangent)
        tangents = [forward_ad.unpack_dual(function(x)).tangent for function in (squared_sine, compiled)]
        assert all(map(torch.equal, *map(plain_parts, tangents)))


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x)[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    "functional_call": lambda f, x: torch.func.functional_call(
        nn.Linear(2, 2), {"weight": f(x), "bias": x[0]}, x
    ),
}


@pytest.mark.sweep(3)
@BOTH_DOORS
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_functorch_over_a_compiled_function(transform, door):
    compiled, x = door(squared_sine), torch.randn(2, 2)
    for _ in range(2):
        torch.testing.assert_close(transform(compiled, x), transform(squared_sine, x))
        torch.testing.assert_close(compiled(x), squared_sine(x))


@EVERY_DOOR
def test_a_tensor_of_a_transform_that_has_ended(door):
    kept = []
    torch.func.grad(lambda x: (kept.append(x), (x * x).sum())[1])(torch.rand(3))
    compiled, want = door(lambda x: x.sin()), kept[0].sin()
    for x in (kept[0], kept[0].clone(), kept[0]):
        with contextlib.suppress(*REFUSED):
            got = compiled(x)
            torch.testing.assert_close(got, want)
            assert got.requires_grad is want.requires_grad


# ---- modes that look at every function or op -----------------------------------------------------------------


def test_equal_default_devices_are_one():
    compiled = judge(
        lambda x: x + torch.ones(2), lambda: (make(Pair, 2),), around=lambda: torch.device("cpu"), calls=2
    )
    assert len(compiled.programs) == 1


# ---- torch._dynamo.config.trace_autograd_ops: autograd's functions inside of one graph -------------------------


class Backward(nn.Linear):
    """Accumulates into the gradient of its own parameter."""

    def forward(self, x):
        super().forward(x).sum().backward()
        return x * 2


class Penalty(nn.Linear):
    """The gradient of a parameter is a part of the result."""

    def forward(self, x):
        loss = super().forward(x).square().sum()
        (grad,) = torch.autograd.grad(loss, self.weight, create_graph=True)
        return (grad * x).sum()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", DOORS)
@pytest.mark.parametrize("kind", [Backward, Penalty])
def test_gradients_of_parameters_inside(kind, way):
    module = kind(3, 1)
    same = copy.deepcopy(module)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = DOORS[way](same)
        for _ in range(3):
            x = torch.randn(2, 3)
            results = [module(x), compiled(x)]
            list(map(backward, results))
            torch.testing.assert_close(*results)
            assert_same_gradients([*same.parameters()], [*module.parameters()])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", DOORS)
@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
@pytest.mark.parametrize("copied", [False, True])
def test_gradients_inside(copied, cls, way):
    def fn(x):
        y = x.detach().requires_grad_() if copied else x
        return torch.autograd.grad((y * y).sum(), y)[0] * 2

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        judge(fn, lambda: (make(cls, 3, grad=not copied),), DOORS[way](fn))
