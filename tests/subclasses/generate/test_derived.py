"""``inner(derived=fn)``: a tensor that follows from the other fields of a value."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from subclasses import SpecError, TensorSubclass, inner, static
from tests.doors import DOORS

aten = torch.ops.aten


class Rows(TensorSubclass, fallback="map"):
    values: Tensor = inner()
    ends: Tensor = inner(derived=lambda x: x.total())
    computed: ClassVar[list[int]] = []

    def total(self):
        self.computed.append(1)
        return self.values.cumsum(0)


@Rows.implements(aten.sin.default)
def _(func, x):
    return Rows(func(x.values) * x.ends)


class Scaled(TensorSubclass, fallback="map"):
    values: Tensor = inner()
    factor: int = static(default=1)
    scaled: Tensor = inner(derived=lambda x: x.values * x.factor)


class Holder(TensorSubclass):
    rows: Scaled = inner()
    total: Tensor = inner(derived=lambda x: x.rows.values.sum())


def test_other_metadata_and_memory_are_other_results():
    x = Scaled(torch.ones(2))
    assert x.scaled.tolist() == [1, 1]
    x.data = Scaled(x.values, factor=3)
    assert x.scaled.tolist() == [3, 3]
    x.values.data = torch.full((2,), 5.0)
    assert x.scaled.tolist() == [15, 15]
    torch.utils.swap_tensors(x.values, torch.ones(2))
    assert x.scaled.tolist() == [3, 3]


def test_a_write_to_what_is_inside_of_an_inner_tensor():
    x = Holder(Scaled(torch.ones(2)))
    assert x.total == 2
    x.rows.values.add_(1)
    assert x.total == 4
    with torch.no_grad():
        x.rows.values = torch.full((2,), 5.0)
    assert x.total == 10


def test_values_of_inference_mode():
    with torch.inference_mode():
        x = Scaled(torch.ones(2))
    assert x.scaled.tolist() == [1, 1]
    with torch.inference_mode():
        x.values.add_(1)
    assert x.scaled.tolist() == [2, 2]


def test_modules_convert_a_parameter_whose_tensor_was_read():
    module = nn.Linear(3, 4)
    module.weight = nn.Parameter(Scaled(torch.zeros(4, 3)))
    assert module.weight.scaled.dtype is torch.float32
    assert module.double().weight.scaled.dtype is torch.float64
    module.load_state_dict({"weight": Scaled(torch.ones(4, 3).double()), "bias": torch.zeros(4)})
    assert module.weight.scaled.sum() == 12


def test_a_result_that_is_the_value_is_not_kept():
    cls = type(
        "Own", (Scaled,), {"__annotations__": {"same": Tensor}, "same": inner(derived=lambda x: x.view(-1))}
    )
    x = cls(torch.ones(2))
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
    Rows.computed.clear()
    assert x.ends is x.ends and len(Rows.computed) == 1
    WRITES[write](x)
    assert torch.equal(x.ends, x.values.cumsum(0)) and len(Rows.computed) == 2


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
    run = DOORS[door](lambda x: x.ends * 2, fullgraph=True) if door != "eager" else lambda x: x.ends * 2
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


def test_what_is_inherited_and_declared_anew():
    class Child(Rows):
        pass

    class Given(Rows):
        ends: Tensor = inner()

    assert Child(torch.ones(2)).ends.tolist() == [1, 2]
    assert Given(torch.ones(2), torch.zeros(2)).ends.tolist() == [0, 0]


def test_what_is_refused():
    x = Rows(torch.ones(2))
    with pytest.raises(AttributeError, match=r"Rows\.ends follows from the other fields"):
        x.ends = torch.ones(2)
    with pytest.raises(TypeError, match="takes 2 positional arguments"):
        Rows(torch.ones(2), torch.ones(2))
    with pytest.raises(SpecError, match="no other keyword goes with it"):

        class Both(TensorSubclass):
            values: Tensor = inner()
            ends: Tensor | None = inner(optional=True, derived=lambda x: x.values)

    class Number(TensorSubclass):
        values: Tensor = inner()
        count: Tensor = inner(derived=lambda x: 3)

    with pytest.raises(TypeError, match=r"Number\.count: expected a tensor from derived=, got an int"):
        _ = Number(torch.ones(2)).count
    with pytest.raises(TypeError, match=r"Number\.count: expected a tensor from derived=, got an int"):
        Number(torch.ones(2)).unwrap("count")
