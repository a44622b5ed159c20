"""What rules return: a value at the end of each way through them, as many tensors as the op has, of its size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import DispatchError, TensorSubclass, inner

aten = torch.ops.aten


class Sometimes(TensorSubclass, fallback="views"):
    """Each rule has an answer for double precision alone."""

    held: Tensor = inner()


@Sometimes.implements(torch.sin)
def of_a_function(func, x):
    if x.dtype == torch.float64:
        return Sometimes(func(x.unwrap("held")))


@Sometimes.implements(aten.cos.default)
def of_an_op(func, x):
    if x.dtype == torch.float64:
        return Sometimes(func(x.held))


@Sometimes.implements(subclasses.comparisons)
def of_a_family(func, x, y):
    return Sometimes(func(x.held, y)) if x.dtype == torch.float64 else None


@Sometimes.implements(torch.Tag.pointwise)
def of_a_tag(func, x):
    if x.dtype == torch.float64:
        return Sometimes(func(x.held))


CALLS = {
    "of_a_function": lambda x: torch.sin(x),
    "of_an_op": lambda x: x.cos(),
    "of_a_family": lambda x: x == 1,
    "of_a_tag": lambda x: x.exp(),
}
DOORS = {"eager": lambda f: f, "desugar": lambda f: desugar.compile(f, backend="eager", fullgraph=True)}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CALLS)
def test_a_result_that_is_missing(name, door):
    call = DOORS[door](CALLS[name])
    x = torch.ones(2, dtype=torch.float64)
    assert torch.equal(call(Sometimes(x)).held, CALLS[name](x))
    with pytest.raises(Exception, match=rf"the rule {name} .*returned None for these arguments") as caught:
        call(Sometimes(x.float()))
    assert door != "eager" or isinstance(caught.value, DispatchError)


def test_functions_that_return_none_may():
    class Quiet(TensorSubclass, fallback="map"):
        held: Tensor = inner()

    seen = []

    @Quiet.implements(Tensor.__setitem__)
    def rule(func, x, index, value):
        if len(seen) > 3:
            return NotImplemented
        seen.append(index)

    x = Quiet(torch.zeros(3))
    x[0] = 1
    assert seen == [0] and x.held.tolist() == [0, 0, 0]


# ---- something else than a tensor ------------------------------------------------------------------------------


class Listed(TensorSubclass):
    """A class whose rules return what is no tensor."""

    held: Tensor = inner()


@Listed.implements(aten.sin.default)
def listed(func, x):
    return [Listed(func(x.held))]


@Listed.implements(aten.abs.default)
def a_number(func, x):
    return 3.0


@Listed.implements(torch.Tag.pointwise)
def wrapped(func, *args):
    return Listed(func(*(a.held if isinstance(a, Listed) else a for a in args)))


@pytest.mark.parametrize(
    ("call", "words"),
    [(torch.sin, "the rule listed .* returned a list"), (torch.abs, "the rule a_number .* returned a float")],
)
def test_a_result_that_is_no_tensor(call, words):
    with pytest.raises(DispatchError, match=words + ".* the op has one tensor as its result"):
        call(Listed(torch.ones(2)))


def test_a_rule_for_a_tag_is_not_asked_for_an_op_that_returns_no_tensor():
    """PyTorch counts ``equal``, which returns a bool, among the pointwise ops."""
    x = Listed(torch.ones(2))
    assert (x * 2).held.tolist() == [2, 2]
    with pytest.raises(DispatchError, match=r"no rule for aten\.equal"):
        torch.equal(x, x)


RESULTS = {
    "a generator": lambda M, t: (M(part) for part in (t, t)),
    "a tuple of 3": lambda M, t: (M(t), M(t), M(t)),
    "a tuple of 1": lambda M, t: (M(t),),
    "a Several": lambda M, t: M(t),
}


@pytest.mark.parametrize("result", RESULTS)
def test_a_rule_with_a_wrong_number_of_results(result):
    """PyTorch reads as many results as the op has, wherever they may be."""

    class Several(TensorSubclass):
        held: Tensor = inner()

    @Several.implements(aten.aminmax)
    def both(func, x, **kwargs):
        return RESULTS[result](Several, x.held)

    with pytest.raises(DispatchError, match=rf"rule .*both .*returned {result} .* 2 tensors .* in a tuple"):
        torch.aminmax(Several(torch.ones(2)))


@pytest.mark.parametrize("op", ["unbind", "split"])
@pytest.mark.parametrize("result", ["a generator", "a Several"])
def test_a_rule_for_an_op_with_a_list_of_results(op, result):
    class Several(TensorSubclass):
        held: Tensor = inner()

    @Several.implements(aten.unbind, aten.split)
    def parts(func, x, *args):
        return RESULTS[result](Several, x.held)

    with pytest.raises(DispatchError, match=rf"rule .*parts .*returned {result} .* a list of tensors"):
        getattr(Several(torch.ones(2)), op)(*([1] * (op == "split")))


@pytest.mark.parametrize("kind", [list, tuple])
def test_results_in_a_list_or_a_tuple(kind):
    class Several(TensorSubclass):
        held: Tensor = inner()

    @Several.implements(aten.aminmax, aten.split)
    def both(func, x, *args, **kwargs):
        return kind(Several(x.held + n) for n in range(2))

    low, high = torch.aminmax(Several(torch.ones(2)))
    assert low.held.tolist() == [1, 1] and high.held.tolist() == [2, 2]
    assert [part.held[0].item() for part in Several(torch.ones(2)).split(1)] == [1, 2]


# ---- a value inside of another -------------------------------------------------------------------------------------


class Scaled(TensorSubclass):
    held: Tensor = inner()


@Scaled.implements(aten.mul)
def any_factor(func, x, y):
    if not isinstance(x, Scaled):
        x, y = y, x
    return Scaled(func(x.held, y))


@pytest.mark.parametrize("door", DOORS)
def test_a_rule_that_takes_a_value_for_a_plain_tensor(door):
    run = DOORS[door](lambda x, y: x * y)
    x = Scaled(torch.rand(3))
    assert torch.equal(run(x, torch.full((3,), 2.0)).held, x.held * 2)
    with pytest.raises(
        DispatchError if door == "eager" else Exception,
        match=r"any_factor .* returned a Scaled whose held is a Scaled, as no operand.*isinstance\(operand, Scaled\)",
    ):
        run(x, Scaled(torch.rand(3)))


def test_values_of_values_stay():
    x = Scaled(Scaled(torch.rand(3)))
    assert torch.equal((x * 2.0).held.held, x.held.held * 2)
