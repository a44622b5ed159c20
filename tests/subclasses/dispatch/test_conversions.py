"""Conversions of dtype: the value stays, or it is an error. Complex dtypes."""

import pytest
import torch
from torch import Tensor, nn

from subclasses import Outer, inner, static
from tests.doors import COMPILED
from tests.subclasses.autograd.judge import agreeing
from tests.subclasses.subjects import Pair, declare
from tests.tables import giving, raising

aten = torch.ops.aten

SCALED = {
    "qdata": inner(),
    "scale": inner(),
    "materialize": lambda self: self.qdata * self.scale,
}
BY_SCALE = {"outer": staticmethod(lambda qdata, scale: Outer(qdata.shape, dtype=scale.dtype))}
# The outer dtype is computed from the second inner tensor.
Computed = declare(keywords={"fallback": "materialize"}, **SCALED, **BY_SCALE)
Following = declare(keywords={"fallback": "materialize", "dtype_from": "scale"}, **SCALED)
# No materialize and no fallback.
Bare = declare(qdata=inner(), scale=inner(), **BY_SCALE)
classes = pytest.mark.parametrize("cls", [Computed, Following, Bare])


def fixed_class(name, fallback):
    """An outer dtype that is metadata."""
    return declare(
        name=name,
        keywords={"fallback": fallback},
        qdata=inner(),
        shown=static(default=torch.float32),
        materialize=lambda self: self.qdata.to(self.shown),
        outer=staticmethod(lambda qdata, shown: Outer(qdata.shape, dtype=shown)),
    )


Fixed = fixed_class("Fixed", "materialize")


def values(cls):
    return cls(torch.tensor([[3, 5], [7, 1]], dtype=torch.int8), torch.tensor([[0.5], [0.25]]))


def module_of(value):
    module = nn.Module()
    module.weight = nn.Parameter(value, requires_grad=False)
    return module


CONVERSIONS = {
    "half": lambda x: x.half(),
    "to": lambda x: x.to(torch.float16),
    "type": lambda x: x.type(torch.float16),
    "stock": COMPILED["stock"](lambda x: x.to(torch.float16), fullgraph=True),
    "desugar": COMPILED["desugar"](lambda x: x.to(torch.float16)),
    "a module's half": lambda x: module_of(x).half().weight,
    "a module's to": lambda x: module_of(x).to(torch.float16).weight,
}


@classes
@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_outer_dtype_follows_another_inner_tensor_than_the_first(cls, name):
    x = values(cls)
    y = CONVERSIONS[name](x)
    assert isinstance(y, nn.Parameter) == ("module" in name)
    assert (type(y), y.dtype, y.qdata.dtype, y.scale.dtype) == (cls, torch.float16, torch.int8, torch.float16)
    if cls is not Bare:
        assert torch.equal(y.materialize(), x.materialize().half())


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


# ---- an outer dtype that does not follow -------------------------------------------------------------------


def fixed(cls):
    return cls(torch.tensor([1.5, 2.0], dtype=torch.bfloat16))


test_what_becomes_of_values = giving(
    {
        "what stands for a plain tensor": (lambda: type(fixed(Fixed).half()), Tensor),
        "its numbers": (lambda: fixed(Fixed).half().tolist(), [1.5, 2.0]),
        "its dtype": (lambda: fixed(Fixed).half().dtype, torch.float16),
        "emptied": (lambda: torch.empty_like(fixed(Fixed), dtype=torch.float64).dtype, torch.float64),
        "each inner tensor of a mapped class": (
            lambda: [t.tolist() for t in Pair(torch.tensor([1.5]), torch.tensor([2.5])).int().unwrap()],
            [[1], [2]],
        ),
    }
)
Strict = declare(Following, name="Strict", keywords={"fallback": "error"})
STAYS = {
    "FixedMap": ("map", r"its outer dtype is torch.float32, which `outer` returns.*(_to_copy|empty_like)"),
    "FixedViews": (
        "views",
        r"@FixedViews\.implements\(torch\.ops\.aten\.(_to_copy|empty_like)\.default\)",
    ),
}
test_a_dtype_that_cannot_be = raising(
    {
        "a truncation without a plain tensor": (
            lambda: values(Strict).int(),
            r"@Strict\.implements\(torch\.ops\.aten\._to_copy\.default\)",
        ),
        **{
            f"{name}, {op}": (
                lambda call=call, name=name, fallback=fallback: call(fixed(fixed_class(name, fallback))),
                words,
            )
            for name, (fallback, words) in STAYS.items()
            for op, call in {
                "half": lambda x: x.half(),
                "empty_like": lambda x: torch.empty_like(x, dtype=torch.float16),
            }.items()
        },
    }
)


def test_a_module_with_a_parameter_that_does_not_convert():
    module = module_of(fixed(Fixed))
    with pytest.raises(
        TypeError, match=r"Fixed does not convert from torch.float32 to torch.float16.*_to_copy\.default"
    ):
        module.half()
    assert module.weight.dtype == torch.float32


def test_the_rule_that_the_errors_advise():
    def convert(func, x, *, dtype=None, **kwargs):
        return Ruled(func(x.qdata, **kwargs), shown=dtype or x.shown)

    Ruled = declare(Fixed, rules={aten._to_copy.default: convert})
    weight = module_of(fixed(Ruled)).half().weight
    assert (weight.dtype, weight.qdata.dtype) == (torch.float16, torch.bfloat16)
    assert torch.equal(weight.detach() + 0, torch.tensor([1.5, 2.0], dtype=torch.float16))


@pytest.mark.filterwarnings("ignore:.*discards the imaginary part")  # torch says so once in a process
def test_a_complex_value_in_a_module_that_becomes_real_is_told_what_works():
    Complex = declare(
        name="Complex",
        keywords={"fallback": "materialize"},
        re=inner(),
        im=inner(),
        outer=staticmethod(lambda re, im: Outer(re.shape, dtype=torch.complex64)),
        materialize=lambda self: torch.complex(self.re, self.im),
    )

    def convert():
        module = module_of(Complex(torch.ones(2), torch.ones(2)))
        module.linear = nn.Linear(2, 2)
        return module.to(torch.bfloat16)

    match = r"no imaginary part.*@Complex\.implements\(torch\.ops\.aten\._to_copy"
    with pytest.raises(TypeError, match=match) as raised:
        convert()
    assert "dtype_from" not in str(raised.value)
    Complex.implements(aten._to_copy.default)(
        lambda func, x, *, dtype=None, **kwargs: Complex(func(x.re, **kwargs), func(x.im, **kwargs))
    )
    module = convert()
    assert (module.weight.dtype, module.linear.weight.dtype) == (torch.complex64, torch.bfloat16)


# ---- complex inner tensors: conjugate and negative bits below dispatch, and in gradients -----------------------


# A complex number by two real ones.
Polar = declare(
    keywords={"fallback": "materialize"},
    magnitude=inner(),
    phase=inner(),
    outer=staticmethod(lambda magnitude, phase: Outer(magnitude.shape, dtype=magnitude.dtype.to_complex())),
    materialize=lambda self: torch.polar(self.magnitude, self.phase),
)
# Represents the conjugate of its inner tensor.
Conjugated = declare(keywords={"fallback": "materialize"}, materialize=lambda self: self.held.conj())
# Its rules conjugate below autograd.
Ruled = declare(
    keywords={"fallback": "map"},
    rules={
        aten.mul.Tensor: lambda func, x, y: Ruled(func(x.held.conj(), y.held)),
        aten.abs: lambda func, x: (x.held.conj() * x.held).real.sqrt(),
    },
)


def numbers(*size):
    return torch.randn(*size, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))


modes = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])


@modes
def test_rules_below_autograd_see_conjugate_bits(mode):
    with mode():
        z = numbers(2, 3)
        x = Ruled(z.clone())
        torch.testing.assert_close((x * x).held, z.conj() * z)
        torch.testing.assert_close(x.abs(), z.abs())
        x *= Ruled(z.clone())
        torch.testing.assert_close(x.held, z.conj() * z)


@modes
def test_what_it_materializes_to_is_resolved(mode):
    ops = [torch.real, torch.imag, torch.view_as_real, torch.sum, torch.abs, torch.fft.fft, torch.fft.hfft]
    with mode():
        z = numbers(3, 4)
        for op in ops:
            torch.testing.assert_close(op(Conjugated(z)), op(z.conj().resolve_conj()))
        torch.testing.assert_close(Conjugated(z).mH @ z, z.conj().mH @ z)


@modes
def test_kernels_that_are_composed_of_ops(mode):
    lstsq = lambda z: torch.linalg.lstsq(z, type(z)(b) if type(z) is Ruled else b).solution  # noqa: E731
    inverses = (torch.linalg.pinv, torch.pinverse, torch.linalg.inv)
    with mode():
        z, b = numbers(4, 4), numbers(4, 2)
        for fn in (*inverses, torch.linalg.svdvals, torch.fft.hfft, lstsq):
            torch.testing.assert_close(fn(Ruled(z)).held, fn(z), rtol=1e-3, atol=1e-3)


READS = {
    "a part and the whole": lambda x, first: first(x).abs().sum() + x.imag.sum(),
    "the whole and a part": lambda x, first: (x * (1 + 2j)).abs().sum() + first(x).abs().sum(),
    "two parts": lambda x, first: (first(x).conj() * 1j).abs().sum() + (first(x) + 1).abs().sum(),
    "the whole": lambda x, first: (x + 1j).abs().sum(),
    "conjugate bits": lambda x, first: (
        first(x).conj().real.sum() + (first(x).conj() * 1j).real.sum() + x.imag.sum()
    ),
}
OF_CLASS = {
    Polar: (torch.polar, [torch.tensor([0.5, 1.0, 2.0]), torch.tensor([-1.0, 0.3, 1.0])]),
    Conjugated: (torch.conj, [numbers(3)]),
}


# A cotangent of the class is added to a plain one, which is pulled back through `materialize`.
test_gradients_meet = agreeing(
    {
        f"{whole.__name__}, {name}": (
            lambda *parts, fn=fn, cls=cls: fn(cls(*parts), lambda x: x.unwrap()[0]),
            lambda *parts, fn=fn, whole=whole: fn(whole(*parts), lambda x: parts[0]),
            leaves,
        )
        for name, fn in READS.items()
        for cls, (whole, leaves) in OF_CLASS.items()
    }
)


def test_the_bits_are_disabled_again_after_an_error():
    def fail(func, x):
        raise ValueError("expected")

    Failing = declare(keywords={"fallback": "map"}, rules={aten.sin: fail})
    for _ in range(2):
        with pytest.raises(ValueError, match="expected"):
            Failing(numbers(2)).sin()
    torch.testing.assert_close((Ruled(numbers(2)) * Ruled(numbers(2))).held, numbers(2).conj() * numbers(2))
