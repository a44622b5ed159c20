"""Conversions of dtype: the outer dtype becomes what was asked for and the value stays, or it is an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import desugar
from subclasses import DispatchError, Outer, TensorSubclass, inner, static
from tests.subclasses.subjects import Pair

aten = torch.ops.aten


class Computed(TensorSubclass, fallback="materialize"):
    """The outer dtype is computed from the second inner tensor."""

    qdata: Tensor = inner()
    scale: Tensor = inner()

    def materialize(self):
        return self.qdata * self.scale

    @staticmethod
    def outer(qdata, scale):
        return Outer(qdata.shape, dtype=scale.dtype)


class Following(TensorSubclass, fallback="materialize", dtype_from="scale"):
    qdata: Tensor = inner()
    scale: Tensor = inner()

    def materialize(self):
        return self.qdata * self.scale


class Bare(TensorSubclass):
    """No materialize and no fallback."""

    qdata: Tensor = inner()
    scale: Tensor = inner()

    @staticmethod
    def outer(qdata, scale):
        return Outer(qdata.shape, dtype=scale.dtype)


class Fixed(TensorSubclass, fallback="materialize"):
    """An outer dtype that is metadata."""

    qdata: Tensor = inner()
    shown: torch.dtype = static(default=torch.float32)

    def materialize(self):
        return self.qdata.to(self.shown)

    @staticmethod
    def outer(qdata, shown):
        return Outer(qdata.shape, dtype=shown)


class FixedMap(Fixed, fallback="map"):
    pass


class FixedViews(Fixed, fallback="views"):
    pass


def values(cls):
    return cls(torch.tensor([[3, 5], [7, 1]], dtype=torch.int8), torch.tensor([[0.5], [0.25]]))


CONVERSIONS = {
    "half": lambda x: x.half(),
    "to": lambda x: x.to(torch.float16),
    "type": lambda x: x.type(torch.float16),
    "aot_eager": torch.compile(lambda x: x.to(torch.float16), backend="aot_eager", fullgraph=True),
    "desugar": desugar.compile(lambda x: x.to(torch.float16), backend="eager"),
}


@pytest.mark.parametrize("cls", [Computed, Following, Bare])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_outer_dtype_follows_another_inner_tensor_than_the_first(cls, name):
    x = values(cls)
    y = CONVERSIONS[name](x)
    assert (type(y), y.dtype, y.qdata.dtype, y.scale.dtype) == (cls, torch.float16, torch.int8, torch.float16)
    if cls is not Bare:
        assert torch.equal(y.materialize(), x.materialize().half())


@pytest.mark.parametrize("cls", [Computed, Following, Bare])
@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.to(torch.float16)])
def test_a_module_converts_its_parameters(cls, convert):
    module = nn.Module()
    module.weight = nn.Parameter(values(cls), requires_grad=False)
    weight = convert(module).weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, cls)
    assert (weight.dtype, weight.qdata.dtype, weight.scale.dtype) == (
        torch.float16,
        torch.int8,
        torch.float16,
    )


def test_an_empty_tensor_of_another_dtype():
    y = torch.empty_like(values(Computed), dtype=torch.float64)
    assert (type(y), y.dtype, y.scale.dtype) == (Computed, torch.float64, torch.float64)
    assert torch.equal(y.qdata, values(Computed).qdata)


@pytest.mark.parametrize("cls", [Computed, Following])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_truncation_is_of_the_value_and_not_of_its_inner_tensors(cls, dtype):
    x = values(cls)
    y = x.to(dtype)
    assert type(y) is Tensor
    assert torch.equal(y, x.materialize().to(dtype))


def test_a_truncation_without_a_plain_tensor_to_truncate_is_an_error():
    class Strict(Following, fallback="error"):
        pass

    with pytest.raises(DispatchError, match=r"@Strict\.implements\(torch\.ops\.aten\._to_copy\.default\)"):
        values(Strict).int()


def test_a_mapped_class_truncates_each_inner_tensor():
    x = Pair(torch.tensor([1.5]), torch.tensor([2.5])).to(torch.int32)
    assert (x.a.tolist(), x.b.tolist()) == ([1], [2])


# ---- an outer dtype that does not follow -------------------------------------------------------------------


def fixed(cls):
    return cls(torch.tensor([1.5, 2.0], dtype=torch.bfloat16))


def test_what_stands_for_a_plain_tensor_becomes_one():
    y = fixed(Fixed).half()
    assert (type(y), y.dtype, y.tolist()) == (Tensor, torch.float16, [1.5, 2.0])
    assert torch.empty_like(fixed(Fixed), dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("convert", [lambda x: x.half(), lambda x: torch.empty_like(x, dtype=torch.float16)])
def test_a_dtype_that_stays_is_an_error(convert):
    with pytest.raises(
        DispatchError, match=r"its outer dtype is torch.float32, which `outer` returns.*(_to_copy|empty_like)"
    ):
        convert(fixed(FixedMap))
    with pytest.raises(
        DispatchError, match=r"@FixedViews\.implements\(torch\.ops\.aten\.(_to_copy|empty_like)\.default\)"
    ):
        convert(fixed(FixedViews))


def test_a_module_with_a_parameter_that_does_not_convert():
    module = nn.Module()
    module.weight = nn.Parameter(fixed(Fixed), requires_grad=False)
    with pytest.raises(
        TypeError, match=r"Fixed does not convert from torch.float32 to torch.float16.*_to_copy\.default"
    ):
        module.half()
    assert module.weight.dtype == torch.float32


def test_the_rule_that_the_errors_advise():
    class Ruled(Fixed):
        pass

    @Ruled.implements(aten._to_copy.default)
    def convert(func, x, *, dtype=None, **kwargs):
        return Ruled(func(x.qdata, **kwargs), shown=dtype or x.shown)

    module = nn.Module()
    module.weight = nn.Parameter(fixed(Ruled), requires_grad=False)
    weight = module.half().weight
    assert (weight.dtype, weight.qdata.dtype) == (torch.float16, torch.bfloat16)
    assert torch.equal(weight.detach() + 0, torch.tensor([1.5, 2.0], dtype=torch.float16))


@pytest.mark.filterwarnings("ignore:.*discards the imaginary part")  # torch says so once in a process
def test_a_complex_value_in_a_module_that_becomes_real_is_told_what_works():
    class Complex(TensorSubclass, fallback="materialize"):
        re: Tensor = inner()
        im: Tensor = inner()

        @staticmethod
        def outer(re, im):
            return Outer(re.shape, dtype=torch.complex64)

        def materialize(self):
            return torch.complex(self.re, self.im)

    def convert():
        module = torch.nn.Linear(2, 2)
        value = Complex(torch.ones(2), torch.ones(2))
        module.extra = torch.nn.Parameter(value, requires_grad=False)
        return module.to(torch.bfloat16)

    match = r"no imaginary part.*@Complex\.implements\(torch\.ops\.aten\._to_copy"
    with pytest.raises(TypeError, match=match) as raised:
        convert()
    assert "dtype_from" not in str(raised.value)

    @Complex.implements(torch.ops.aten._to_copy.default)
    def _(func, x, *, dtype=None, **kwargs):
        return Complex(func(x.re, **kwargs), func(x.im, **kwargs))

    module = convert()
    assert (module.extra.dtype, module.weight.dtype) == (torch.complex64, torch.bfloat16)
