"""Complex inner tensors: conjugate and negative bits below dispatch, where PyTorch disables them, and in gradients."""

from __future__ import annotations

import pytest
import torch

from subclasses import Outer, inner
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agree
from tests.subclasses.subjects import declare

aten = torch.ops.aten

# A complex number by two real ones.
Polar = declare(
    keywords={"fallback": "materialize"},
    magnitude=inner(),
    phase=inner(),
    outer=staticmethod(lambda magnitude, phase: Outer(magnitude.shape, dtype=magnitude.dtype.to_complex())),
    materialize=lambda self: torch.polar(self.magnitude, self.phase),
)
# The conjugate of what it holds.
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


@pytest.mark.sweep(6)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("cls", OF_CLASS)
def test_gradients_meet(cls, name, door):
    """A cotangent of the class is added to a plain one, which is pulled back through `materialize`."""
    fn, (whole, leaves) = READS[name], OF_CLASS[cls]
    agree(
        lambda *parts: fn(cls(*parts), lambda x: x.unwrap()[0]),
        lambda *parts: fn(whole(*parts), lambda x: parts[0]),
        leaves,
        door=door,
    )


def test_the_bits_are_disabled_again_after_an_error():
    def fail(func, x):
        raise ValueError("expected")

    Failing = declare(keywords={"fallback": "map"}, rules={aten.sin: fail})
    for _ in range(2):
        with pytest.raises(ValueError, match="expected"):
            Failing(numbers(2)).sin()
    torch.testing.assert_close((Ruled(numbers(2)) * Ruled(numbers(2))).held, numbers(2).conj() * numbers(2))
