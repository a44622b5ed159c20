"""Custom ops, custom `autograd.Function`s, and subclasses that the function itself builds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from desugar import DesugarError
from subclasses.ragged import JaggedTensor
from tests.desugar.classes import Int8Like, Pair, TwoTensor, autograd_function, make, saving
from tests.desugar.judge import as_cotangents, assert_same_values, by_dynamo, by_pass, judge

WAYS = pytest.mark.parametrize("way", [by_pass, by_dynamo])


@torch.library.custom_op("desugar_tests::cubed", mutates_args=())
def cubed(x: Tensor) -> Tensor:
    return x * x * x


cubed.register_fake(lambda x: torch.empty_like(x))


# Not the true derivative, so that a test sees whose formula ran.
cubed.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0] * 7,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


double = autograd_function(lambda ctx, x: x * 2, lambda ctx, g: g * 5)  # nor this
cube = autograd_function(
    lambda ctx, x: saving(ctx, x, x**3), lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2
)


PROGRAMS = {
    "a custom op on an inner tensor": lambda x, y: cubed(x.unwrap("a")).sum() + cubed(y),
    "a custom op beside one": lambda x, y: x * cubed(y),
    "a function on one": lambda x, y: double(x) * y,
    "a function beside one": lambda x, y: x * double(y),
}


@pytest.mark.sweep(2)
@WAYS
@pytest.mark.parametrize("name", PROGRAMS)
def test_their_own_formulas_are_used(name, way):
    judge(PROGRAMS[name], lambda: (make(Pair, 3, 4, grad=True), make(Tensor, 4, grad=True)), way=way, calls=2)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cls", [Tensor, TwoTensor, Pair])
@WAYS
def test_the_gradient_of_a_functions_gradient(way, cls):
    """Dynamo turns gradients off in the backward it records, so that this term of a loss would be a constant."""
    x = make(cls, 3, 4, grad=True)
    out = way(lambda x: cube(x) * 1)(x)
    with pytest.raises(DesugarError, match=r"custom autograd.Function is to be differentiated"):
        torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    (first,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert_same_values([as_cotangents(first.detach())], [as_cotangents(3 * x.detach() ** 2)])


# ------------------------------------------------------------------------------------------------ writes

library = torch.library.Library("desugar_tests", "FRAGMENT")
library.define("raise_by(Tensor(a!) x, float by) -> ()")
library.impl("raise_by", lambda x, by: (x.add_(by), None)[1], "CPU")
torch.library.register_fake("desugar_tests::raise_by", lambda x, by: None, lib=library)


@torch.library.custom_op("desugar_tests::add_and_sum", mutates_args={"x"})
def add_and_sum(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x.sum()


add_and_sum.register_fake(lambda x, y: x.new_empty(()))


WRITES = {
    "an op of a library": lambda x, y: torch.ops.desugar_tests.raise_by(x, 2.0),
    "through a view": lambda x, y: torch.ops.desugar_tests.raise_by(x[:1], 2.0),
    "a custom op": add_and_sum,
    "foreach": lambda x, y: torch._foreach_mul_([x, y], 2.0),
    "foreach copy": lambda x, y: torch._foreach_copy_([x], [y]),
}


@pytest.mark.sweep(2)
@WAYS
@pytest.mark.parametrize("name", WRITES)
def test_a_saved_tensor_that_an_op_writes_is_noticed(name, way):
    w, x, y = torch.ones(3, requires_grad=True), torch.ones(3), torch.ones(3)
    product = w * x
    way(lambda x, y: (WRITES[name](x, y), y + 1)[1])(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_what_nobody_counts_in_eager_mode_is_not_counted():
    judge(
        lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
        lambda: (torch.randn(4, 2, requires_grad=True), torch.zeros(2), torch.ones(2)),
        calls=2,
    )


# ---- subclasses that the function itself builds --------------------------------------------------------------


values, offsets, outside = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 2, 5]), torch.randn(3)

BUILT = {
    "declared": lambda x: F.linear(x, Int8Like(torch.ones(3, 3, dtype=torch.int8), x[:, :1])),
    "ragged, values given": lambda x: JaggedTensor(x, offsets, max_length=3).sum(1),
    "ragged, all from outside": lambda x: (JaggedTensor(values, offsets, max_length=3) * x[0]).sum(1),
    "by hand": lambda x: (TwoTensor(outside, outside) * x).a,
    "by hand, one part given": lambda x: (TwoTensor(x, x * 2) * outside).b,
    "given back": lambda x: TwoTensor(outside, outside),
    "given back, plain": lambda x: (outside, x * 2),
}


@pytest.mark.sweep(18)
@WAYS
@pytest.mark.parametrize("name", BUILT)
def test_built_inside(way, name):
    compiled = way(BUILT[name])
    for scale in (1.0, 2.0):
        x = torch.full((5 if "ragged" in name else 3, 3), scale, requires_grad=True)
        results = [BUILT[name](x), compiled(x)]
        torch.testing.assert_close(*results)
        first = [y[0] if isinstance(y, tuple) else y for y in results]
        assert first[0].requires_grad == first[1].requires_grad
        if first[0].requires_grad:
            wanted = [x] if "outside" not in name else [x, values]
            torch.testing.assert_close(
                *[torch.autograd.grad(y.sum(), wanted, allow_unused=True) for y in first]
            )


def test_what_is_from_outside_is_the_same_object():
    assert by_pass(BUILT["given back, plain"])(torch.ones(3))[0] is outside
    found = by_pass(lambda x: TwoTensor(x, outside) * 2)(torch.ones(3))
    assert found.b.equal(outside * 2) and found.a.tolist() == [2, 2, 2]
