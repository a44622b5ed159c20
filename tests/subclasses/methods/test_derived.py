"""``inner(derived=fn)``: a tensor that follows from the other fields of a value."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

from subclasses import SpecError, inner, static
from tests.doors import DOORS
from tests.subclasses.subjects import declare
from tests.tables import giving, raising

aten = torch.ops.aten


COMPUTED: list[int] = []


def total(x):
    COMPUTED.append(1)
    return x.values.cumsum(0)


Rows = declare(
    name="Rows",
    __module__=__name__,
    keywords={"fallback": "map"},
    values=inner(),
    ends=inner(derived=lambda x: x.total()),
    total=total,
    rules={aten.sin.default: lambda func, x: type(x)(func(x.values) * x.ends)},
)
Scaled = declare(
    keywords={"fallback": "map"},
    values=inner(),
    factor=static(default=1),
    scaled=inner(derived=lambda x: x.values * x.factor),
)
Holder = declare(rows=inner(), total=inner(derived=lambda x: x.rows.values.sum()))


# How a value is made, its tensor, and numbers of that after each change, the first of which is none.
STEPS = {
    "other metadata and memory": (
        lambda: Scaled(torch.ones(2)),
        "scaled",
        [
            (lambda x: None, [1, 1]),
            (lambda x: setattr(x, "data", Scaled(x.values, factor=3)), [3, 3]),
            (lambda x: setattr(x.values, "data", torch.full((2,), 5.0)), [15, 15]),
            (lambda x: torch.utils.swap_tensors(x.values, torch.ones(2)), [3, 3]),
        ],
    ),
    "inside of an inner tensor": (
        lambda: Holder(Scaled(torch.ones(2))),
        "total",
        [
            (lambda x: None, 2),
            (lambda x: x.rows.values.add_(1), 4),
            (torch.no_grad()(lambda x: setattr(x.rows, "values", torch.full((2,), 5.0))), 10),
        ],
    ),
    "values of inference mode": (
        torch.inference_mode()(lambda: Scaled(torch.ones(2))),
        "scaled",
        [(lambda x: None, [1, 1]), (torch.inference_mode()(lambda x: x.values.add_(1)), [2, 2])],
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_it_follows_the_other_fields(case):
    make, name, steps = STEPS[case]
    x = make()
    for change, expected in steps:
        change(x)
        assert getattr(x, name).tolist() == expected


def test_modules_convert_a_parameter_whose_tensor_was_read():
    module = nn.Linear(3, 4)
    module.weight = nn.Parameter(Scaled(torch.zeros(4, 3)))
    assert module.weight.scaled.dtype is torch.float32
    assert module.double().weight.scaled.dtype is torch.float64
    module.load_state_dict({"weight": Scaled(torch.ones(4, 3).double()), "bias": torch.zeros(4)})
    assert module.weight.scaled.sum() == 12


def test_a_result_that_is_the_value_is_not_kept():
    x = declare(Scaled, same=inner(derived=lambda x: x.view(-1)))(torch.ones(2))
    held = weakref.ref(x.values)
    assert x.same.values.tolist() == [1, 1]
    del x
    gc.collect()
    assert held() is None


def test_it_is_unwrapped_as_a_function_of_the_value():
    leaf = torch.ones(2, requires_grad=True)
    Scaled(leaf, factor=3).unwrap("scaled").sum().backward()
    assert leaf.grad.tolist() == [3, 3]


WRITES = {
    "the inner tensor": lambda x: x.values.add_(1),
    "the value": lambda x: x.mul_(2),
    "an assignment": lambda x: setattr(x, "values", torch.ones(3)),
    "the result itself": lambda x: x.ends.add_(1),
    "data": lambda x: setattr(x, "data", Rows(torch.ones(3))),
}


@pytest.mark.parametrize("write", WRITES)
def test_it_is_computed_once_for_the_inner_tensors_of_a_value(write):
    x = Rows(torch.arange(3.0))
    COMPUTED.clear()
    assert x.ends is x.ends and len(COMPUTED) == 1
    WRITES[write](x)
    assert torch.equal(x.ends, x.values.cumsum(0)) and len(COMPUTED) == 2


def test_a_step_of_an_optimizer():
    parameter = nn.Parameter(Rows(torch.arange(3.0)))
    before = parameter.ends.clone()
    parameter.grad = parameter.cotangent(values=torch.ones(3))
    torch.optim.SGD([parameter], lr=1.0).step()
    assert torch.equal(parameter.ends, before - torch.arange(1.0, 4.0))


def test_it_is_neither_saved_nor_copied_nor_kept():
    x = Rows(torch.arange(3.0))
    assert x.ends.tolist() == [0, 1, 3]
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    for y in (copy.copy(x), copy.deepcopy(x), torch.load(file), x.clone(), x.detach()):
        assert "_derived" not in vars(y) and y.ends is not x.ends and torch.equal(y.ends, x.ends)


@pytest.mark.parametrize("door", DOORS)
def test_a_function_reads_it_of_an_argument(door):
    x = Rows(torch.arange(3.0))
    run = DOORS[door](lambda x: x.ends * 2, fullgraph=True)
    for _ in range(2):
        assert torch.equal(run(x), x.values.cumsum(0) * 2)
        x.values.add_(1)


@pytest.mark.parametrize("door", DOORS)
def test_a_rule_is_differentiated_through_it(door):
    leaf, plain = (torch.arange(4.0, requires_grad=True) for _ in range(2))
    DOORS[door](lambda t: Rows(t).sin().unwrap("values").sum())(leaf).backward()
    (plain.sin() * plain.cumsum(0)).sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_modes():
    x = Rows(torch.arange(3.0, requires_grad=True))
    assert not x.ends.requires_grad
    with torch.inference_mode():
        assert x.ends.is_inference() and Rows(torch.ones(2)).ends.is_inference()
    assert not x.ends.is_inference()
    assert torch.func.vmap(lambda t: t * Rows(torch.ones(3)).ends)(torch.ones(2, 3)).shape == (2, 3)


test_what_is_inherited_and_declared_anew = giving(
    {
        "inherited": (lambda: declare(Rows)(torch.ones(2)).ends.tolist(), [1, 2]),
        "declared anew": (
            lambda: declare(Rows, ends=inner())(torch.ones(2), torch.zeros(2)).ends.tolist(),
            [0, 0],
        ),
    }
)


Number = declare(name="Number", values=inner(), count=inner(derived=lambda x: 3))
NO_TENSOR = r"Number\.count: expected a tensor from derived=, got an int"


test_what_is_refused = raising(
    [
        (call, error, words)
        for call, error, words in [
            (
                lambda: setattr(Rows(torch.ones(2)), "ends", torch.ones(2)),
                AttributeError,
                r"Rows\.ends follows from the other fields",
            ),
            (lambda: Rows(torch.ones(2), torch.ones(2)), TypeError, "takes 2 positional arguments"),
            (
                lambda: declare(values=inner(), ends=inner(optional=True, derived=lambda x: x.values)),
                SpecError,
                "no other keyword goes with it",
            ),
            (lambda: Number(torch.ones(2)).count, TypeError, NO_TENSOR),
            (lambda: Number(torch.ones(2)).unwrap("count"), TypeError, NO_TENSOR),
        ]
    ]
)
