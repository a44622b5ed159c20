"""Dispatch checks the result of a rule on each way through it: its class, the number of tensors, and their sizes."""

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import DispatchError
from tests.subclasses.subjects import declare
from tests.tables import giving, raising

aten = torch.ops.aten


def of_a_function(func, x):
    if x.dtype == torch.float64:
        return type(x)(func(x.unwrap("held")))


def of_an_op(func, x, *more):
    return type(x)(func(x.held, *more)) if x.dtype == torch.float64 else None


def of_a_family(func, x, y):
    return of_an_op(func, x, y)


def of_a_tag(func, x):
    return of_an_op(func, x)


# Each rule has an answer for double precision alone.
Sometimes = declare(
    keywords={"fallback": "views"},
    rules={
        torch.sin: of_a_function,
        aten.cos.default: of_an_op,
        subclasses.comparisons: of_a_family,
        torch.Tag.pointwise: of_a_tag,
    },
)
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
    seen = []
    rule = lambda func, x, index, value: seen.append(index)  # noqa: E731
    x = declare(keywords={"fallback": "map"}, rules={Tensor.__setitem__: rule})(torch.zeros(3))
    x[0] = 1
    assert seen == [0] and x.held.tolist() == [0, 0, 0]


# ---- something else than a tensor ------------------------------------------------------------------------------


def listed(func, x):
    return [type(x)(func(x.held))]


def a_number(func, x):
    return 3.0


def wrapped(func, *args):
    return Listed(func(*(a.held if isinstance(a, Listed) else a for a in args)))


# A class whose rules return something else than a tensor.
Listed = declare(rules={aten.sin.default: listed, aten.abs.default: a_number, torch.Tag.pointwise: wrapped})


test_a_result_that_is_no_tensor = raising(
    [
        (
            lambda call=call: call(Listed(torch.ones(2))),
            DispatchError,
            words + ".* the op has one tensor as its result",
        )
        for call, words in [
            (torch.sin, "the rule listed .* returned a list"),
            (torch.abs, "the rule a_number .* returned a float"),
        ]
    ]
)


# PyTorch counts ``equal``, which returns a bool, among the pointwise ops.
test_a_rule_for_a_tag_is_not_asked_for_an_op_that_returns_no_tensor = raising(
    [(lambda: torch.equal(*[Listed(torch.ones(2))] * 2), r"no rule for aten\.equal")]
)


RESULTS = {
    "a generator": lambda M, t: (M(part) for part in (t, t)),
    "a tuple of 3": lambda M, t: (M(t), M(t), M(t)),
    "a tuple of 1": lambda M, t: (M(t),),
    "a Several": lambda M, t: M(t),
    "list": lambda M, t: [M(t), M(t + 1)],
    "tuple": lambda M, t: (M(t), M(t + 1)),
}


def several(result):
    """A value whose rules for ops of several results return some other thing."""

    def both(func, x, *args, **kwargs):
        return RESULTS[result](Several, x.held)

    Several = declare(name="Several", rules=dict.fromkeys((aten.aminmax, aten.unbind, aten.split), both))
    return Several(torch.ones(2))


# PyTorch reads as many results as the op has, wherever they may be.
test_a_rule_with_a_wrong_number_of_results = raising(
    [
        (
            lambda call=call, result=result: call(several(result)),
            DispatchError,
            rf"rule .*both .*returned {result} .* {number}",
        )
        for call, result, number in [
            *((torch.aminmax, result, "2 tensors .* in a tuple") for result in list(RESULTS)[:4]),
            *((torch.unbind, result, "a list of tensors") for result in ("a generator", "a Several")),
            *((lambda x: x.split(1), result, "a list of tensors") for result in ("a generator", "a Several")),
        ]
    ]
)


test_results_in_a_list_or_a_tuple = giving(
    {
        f"{name} in a {kind}": (
            lambda call=call, kind=kind: [part.held.tolist() for part in call(several(kind))],
            [[1, 1], [2, 2]],
        )
        for name, call in {"two": torch.aminmax, "parts": lambda x: x.split(1)}.items()
        for kind in ("list", "tuple")
    }
    | {"one by a rule for a tag": (lambda: (Listed(torch.ones(2)) * 2).held.tolist(), [2, 2])}
)


# ---- a value inside of another -------------------------------------------------------------------------------------


def any_factor(func, x, y):
    x, y = (x, y) if isinstance(x, Scaled) else (y, x)
    return Scaled(func(x.held, y))


Scaled = declare(name="Scaled", rules={aten.mul: any_factor})


@pytest.mark.parametrize("door", DOORS)
def test_a_rule_that_takes_a_value_for_a_plain_tensor(door):
    run = DOORS[door](lambda x, y: x * y)
    x = Scaled(torch.rand(3))
    assert torch.equal(run(x, torch.full((3,), 2.0)).held, x.held * 2)
    assert torch.equal((Scaled(x) * 2.0).held.held, x.held * 2)
    with pytest.raises(
        DispatchError if door == "eager" else Exception,
        match=r"any_factor .* returned a Scaled whose held is a Scaled, as no operand.*isinstance\(operand, Scaled\)",
    ):
        run(x, Scaled(torch.rand(3)))
