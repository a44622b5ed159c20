"""Complex inner tensors: conjugate and negative bits below dispatch, where PyTorch disables them, and in gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import Outer, TensorSubclass, inner


class Polar(TensorSubclass, fallback="materialize"):
    """A complex number by two real ones."""

    magnitude: Tensor = inner()
    phase: Tensor = inner()

    @staticmethod
    def outer(magnitude, phase):
        return Outer(magnitude.shape, dtype=magnitude.dtype.to_complex())

    def materialize(self):
        return torch.polar(self.magnitude, self.phase)


class Conjugated(TensorSubclass, fallback="materialize"):
    """The conjugate of what it holds."""

    held: Tensor = inner()

    def materialize(self):
        return self.held.conj()


class Ruled(TensorSubclass, fallback="map"):
    """Whose rules conjugate below autograd."""

    held: Tensor = inner()


@Ruled.implements(torch.ops.aten.mul.Tensor)
def _(func, x, y):
    return Ruled(func(x.held.conj(), y.held))


@Ruled.implements(torch.ops.aten.abs)
def _(func, x):
    return (x.held.conj() * x.held).real.sqrt()


def numbers(*size):
    torch.manual_seed(0)
    return torch.randn(*size, dtype=torch.complex64)


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
def test_rules_below_autograd_see_conjugate_bits(mode):
    with mode():
        z = numbers(2, 3)
        x = Ruled(z)
        torch.testing.assert_close((x * x).held, z.conj() * z)
        torch.testing.assert_close(x.abs(), z.abs())
        x *= Ruled(z.clone())
        torch.testing.assert_close(x.held, numbers(2, 3).conj() * numbers(2, 3))


@pytest.mark.parametrize("mode", MODES)
def test_what_it_materializes_to_is_resolved(mode):
    ops = [torch.real, torch.imag, torch.view_as_real, torch.sum, torch.abs, torch.fft.fft, torch.fft.hfft]
    with mode():
        z = numbers(3, 4)
        for op in ops:
            torch.testing.assert_close(op(Conjugated(z)), op(z.conj().resolve_conj()))
        torch.testing.assert_close(Conjugated(z).mH @ z, z.conj().mH @ z)


@pytest.mark.parametrize("mode", MODES)
def test_kernels_that_are_composed_of_ops(mode):
    with mode():
        z, b = numbers(4, 4), numbers(4, 2)
        for fn in (torch.linalg.pinv, torch.pinverse, torch.linalg.inv, torch.linalg.svdvals, torch.fft.hfft):
            got = fn(Ruled(z))
            torch.testing.assert_close(got.held, fn(z), rtol=1e-3, atol=1e-3)
        got = torch.linalg.lstsq(Ruled(z), Ruled(b)).solution
        torch.testing.assert_close(got.held, torch.linalg.lstsq(z, b).solution, rtol=1e-3, atol=1e-3)


READS = {
    "a part and the whole": lambda x, first: first(x).abs().sum() + x.imag.sum(),
    "the whole and a part": lambda x, first: (x * (1 + 2j)).abs().sum() + first(x).abs().sum(),
    "two parts": lambda x, first: (first(x).conj() * 1j).abs().sum() + (first(x) + 1).abs().sum(),
    "the whole": lambda x, first: (x + 1j).abs().sum(),
}
DOORS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="aot_eager"),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager"),
    "backend": lambda fn: torch.compile(fn, backend="desugar", options={"backend": "eager"}),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("cls", [Polar, Conjugated])
def test_gradients_meet(cls, name, door):
    """A cotangent of the class is added to a plain one, which is pulled back through `materialize`."""
    fn = READS[name]

    def make():
        if cls is Conjugated:
            return [numbers(3).requires_grad_()]
        torch.manual_seed(0)
        return [torch.rand(3, requires_grad=True), torch.randn(3, requires_grad=True)]

    def wrapped(*parts):
        return fn(cls(*parts), lambda x: x.unwrap()[0])

    def plain(*parts):
        whole = torch.polar(*parts) if cls is Polar else parts[0].conj()
        return fn(whole, lambda x: parts[0])

    got, expected = make(), make()
    DOORS[door](wrapped)(*got).backward()
    plain(*expected).backward()
    for one, other in zip(got, expected, strict=True):
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        torch.testing.assert_close(one.grad, wanted)


def test_cotangents_with_conjugate_bits_are_added():
    z = numbers(3).requires_grad_()
    x = Conjugated(z)
    total = x.unwrap()[0].conj().real.sum() + (x.unwrap()[0].conj() * 1j).real.sum() + x.imag.sum()
    (got,) = torch.autograd.grad(total, z)
    (expected,) = torch.autograd.grad(
        z.conj().real.sum() + (z.conj() * 1j).real.sum() + z.conj().imag.sum(), z
    )
    torch.testing.assert_close(got, expected)


def test_the_bits_are_disabled_again_after_an_error():
    def fail(func, x):
        raise ValueError("expected")

    class Failing(TensorSubclass, fallback="map"):
        held: Tensor = inner()

    Failing.implements(torch.ops.aten.sin)(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="expected"):
            Failing(numbers(2)).sin()
    torch.testing.assert_close((Ruled(numbers(2)) * Ruled(numbers(2))).held, numbers(2).conj() * numbers(2))
