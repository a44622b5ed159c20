"""Rules that end without a value on some way through them."""

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
    assert door != "eager" or type(caught.value) is DispatchError


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
