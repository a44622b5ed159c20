"""Differences are found, named and measured; rounding is told from being wrong."""

import pytest
import torch

from desugar.compare.judge import differences_of_values, find_differences, judge
from desugar.compare.outcome import copy_parts, record_outcome
from subclasses.ragged import JaggedTensor
from tests.desugar.compare.subjects import Pair


def outcome(result=None, arguments=None, state=None, before=None):
    state = state or {}
    return record_outcome(result, arguments or {}, state, copy_parts(state) if before is None else before)


def texts(want, got):
    return [difference.text for difference in find_differences(want, got)]


# -------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("want", "got", "says"),
    [
        (
            torch.ones(2),
            torch.tensor([1.0, 1.5]),
            "x[1]: 1.5, expected 1 (off by 0.5; the largest value is 1)",
        ),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "x: 1 of 2 values differ"),
        (torch.tensor([True]), torch.tensor([False]), "x: 1 of 1 values differ"),
        (torch.ones(2), torch.tensor([1.0, torch.nan]), "x[1]: nan, expected 1"),
        (torch.tensor([torch.inf]), torch.tensor([-torch.inf]), "x[0]: -inf, expected inf (off by inf"),
        (torch.tensor(2j), torch.tensor(3j), "x: 0+3j, expected 0+2j (off by 1; the largest value is 2)"),
        (torch.ones(2), torch.ones(3), "x: float32[3], expected float32[2]"),
        (torch.ones(2), torch.ones(2).double(), "x: float64[2], expected float32[2]"),
        # The error of a long sum is rounding, and a larger one is wrong.
        (torch.tensor([1000.0, 0.0]), torch.tensor([1000.0, 1e-1]), "x[1]: "),
        (torch.tensor([1000.0, 0.0]), torch.tensor([1000.0, 1e-2]), "rounding"),
    ],
)
def test_values_that_differ_are_wrong(want, got, says):
    (found,) = differences_of_values("x", want, got)
    assert found.is_rounding == (says == "rounding")
    assert found.is_rounding or found.text.startswith(says)


@pytest.mark.parametrize(
    "value",
    [
        *(
            torch.arange(4).to(getattr(torch, dtype))
            for dtype in "float32 float64 float16 bfloat16 int8".split()
        ),
        *(
            torch.ones(0).to(getattr(torch, dtype))
            for dtype in "float32 float64 float16 bfloat16 int8".split()
        ),
        torch.tensor([torch.nan, torch.inf, -torch.inf]),
    ],
)
def test_equal_values_do_not_differ(value):
    assert list(differences_of_values("x", value, value.clone())) == []


# ------------------------------------------------------------------------------------------------- outcomes


def test_the_same_call_twice_does_not_differ():
    def run():
        x = Pair(torch.ones(2), torch.zeros(2))
        return outcome((x, x.first, [None, 2.0, "a"]), {"x": x}, {"weight": torch.ones(2)})

    assert texts(run(), run()) == []


@pytest.mark.parametrize(
    ("want", "got", "says"),
    [
        ((torch.ones(2),), [torch.ones(2)], "the result is list(.), expected tuple(.)"),
        (torch.ones(2), 1, "result: the type is int, expected Tensor"),
        (torch.ones(2), torch.ones(2).double(), "result: the dtype is float64, expected float32"),
        (torch.ones(2), torch.ones(2).requires_grad_(), "result: requires_grad is True, expected False"),
        ({"a": 1}, {"a": 2}, "result['a']: 2, expected 1"),
        (torch.ones(2), Pair(torch.ones(2), torch.ones(2)), "subjects.Pair, expected Tensor"),
        (torch.ones(2), torch.ones(2).to_sparse(), "result: the layout is sparse_coo, expected strided"),
        (
            Pair(torch.ones(2), torch.ones(2)),
            Pair(torch.ones(2), torch.zeros(2)),
            "result.second[0]: 0, expected 1",
        ),
        (
            JaggedTensor.from_tensors([torch.ones(2, 1), torch.ones(1, 1)]),
            JaggedTensor.from_tensors([torch.ones(1, 1), torch.ones(2, 1)]),
            "result.offsets: 1 of 3 values differ",
        ),
    ],
)
def test_a_difference_is_named(want, got, says):
    assert any(says in text for text in texts(outcome(want), outcome(got)))


X = torch.ones(2)


def with_gradient(factor):
    x = torch.ones(2, requires_grad=True)
    if factor:
        (x * factor).sum().backward()
    return outcome(None, {"x": x})


def with_state(count):
    state = {"count": torch.zeros(1)}
    before = copy_parts(state)
    state["count"].add_(count)
    return outcome(None, {}, state, before)


@pytest.mark.parametrize(
    ("want", "got", "says"),
    [
        (
            outcome(X[:1], {"x": X}),
            outcome(torch.ones(1), {"x": X}),
            ["result shares memory with nothing, expected x"],
        ),
        (
            outcome(X, {"x": X}),
            outcome(torch.ones(2), {"x": X}),
            [
                "result shares memory with nothing, expected x",
                "result is the same object as nothing, expected x",
            ],
        ),
        (
            outcome(None, {"x": torch.ones(2)}),
            outcome(None, {"x": torch.zeros(2)}),
            ["x after the call[0]: 0, expected 1 (off by 1; the largest value is 1)"],
        ),
        (with_state(1), with_state(0), ["count after the call: it was changed in eager mode alone"]),
        (with_state(0), with_state(1), ["count after the call: it was changed in this way alone"]),
        (
            with_gradient(1),
            with_gradient(2),
            ["the gradient of x[0]: 2, expected 1 (off by 1; the largest value is 1)"],
        ),
        (with_gradient(1), with_gradient(0), ["the gradient of x: the type is NoneType, expected Tensor"]),
    ],
)
def test_memory_writes_and_gradients_are_compared(want, got, says):
    assert sorted(texts(want, got)) == sorted(says)


@pytest.mark.parametrize(
    ("second", "state", "says"),
    [
        ("right", "right", ""),
        ("off", "rounding", "call 2 of 2: result[1]"),
        ("other", "wrong", "call 2 of 2: "),
    ],
)
def test_a_verdict_names_the_first_call_that_differs(second, state, says):
    outcomes = {
        "right": outcome(torch.tensor([1e3, 0.0])),
        "off": outcome(torch.tensor([1e3, 0.01])),
        "other": outcome(None),
    }
    first = outcomes["off" if second == "other" else "right"]  # rounding hides no error
    found = judge([(outcomes["right"], first), (outcomes["right"], outcomes[second])])
    assert found.state == state and found.detail.startswith(says) and found.agrees == (state != "wrong")
