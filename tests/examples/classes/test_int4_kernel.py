"""The four-bit weight with a kernel: the op is well-formed, products are those of the whole matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import desugar
from classes import int4_kernel as example
from classes.int4_kernel import KernelInt4Weight
from subclasses import DispatchError, strict
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, check_refused, check_unchanged

X = torch.linspace(-1, 1, 24).view(3, 8)


def make(rows=4, group=4):
    return KernelInt4Weight.from_float(torch.randn(rows, 8), group)


TestKernelInt4Weight = suite(
    make, ops={F.linear: lambda x: (X, x)}, sizes=[lambda n=n: make(n) for n in (5, 7)]
)


@pytest.mark.slow
def test_the_op_is_well_formed():
    w = make()
    x, scale = torch.randn(3, 2, 4, requires_grad=True), w.scale.clone().requires_grad_()
    torch.library.opcheck(example.int4_linear, (x, w.packed, scale))
    doubles = [t.detach().double().requires_grad_() for t in (x, scale)]
    assert torch.autograd.gradcheck(lambda x, scale: example.int4_linear(x, w.packed, scale), doubles)


@pytest.mark.sweep(18)
@pytest.mark.parametrize("size", [(8,), (3, 8), (2, 3, 8), (0, 8), (1, 8)], ids=str)
def test_values_and_gradients(way, size):
    w = make()
    leaves = [t.requires_grad_() for t in (torch.randn(size), w.scale.clone(), torch.randn(4))]
    numbers = w.materialize() / w.scale.repeat_interleave(4, 1)

    def layer(x, scale, bias):
        return F.linear(x, KernelInt4Weight(w.packed, scale), bias).tanh()

    got = way(layer)(*leaves)
    expected = F.linear(leaves[0], numbers * leaves[1].repeat_interleave(4, 1), leaves[2]).tanh()
    check_gradients(got, expected, leaves)


def test_the_matrix_is_that_of_the_nearest_numbers():
    numbers = torch.arange(-7, 8).repeat(2)[:28].view(2, 14)
    numbers[:, 0] = 7
    w = KernelInt4Weight.from_float(numbers.double() * 0.5, 14)
    assert torch.equal(w.materialize(), numbers * 0.5)
    torch.testing.assert_close(2 / (w + 9), 2 / (numbers.double() * 0.5 + 9))


def test_compiled_code_holds_one_node_for_the_kernel():
    layer = desugar.compile(lambda x, w: F.linear(x, w), backend="eager")
    w = make()
    with strict():
        torch.testing.assert_close(layer(X, w), X @ w.materialize().T)
    (program,) = layer.programs
    assert program.forward.code.count("gallery.int4_linear.default(") == 1
    assert "bitwise_and" not in program.forward.code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    w = make()
    assert F.linear(X.to(dtype), w).dtype == dtype
    converted = w.to(dtype)
    assert isinstance(converted, KernelInt4Weight) and converted.dtype == converted.scale.dtype == dtype
    assert torch.equal(converted.packed, w.packed)


def test_no_rows_and_zeros():
    assert F.linear(X, KernelInt4Weight.from_float(torch.zeros(0, 8), 4)).shape == (3, 0)
    assert not F.linear(X, KernelInt4Weight.from_float(torch.zeros(2, 8), 8)).any()


def test_what_is_refused():
    group = "an even group that divides the row"
    check_refused(lambda: make(group=3), lambda: make(group=16), error=ValueError, match=group)
    words = r"numbers of size \[4, 2, 2\] with scales of size \[4, 3\]"
    check_refused(lambda: KernelInt4Weight(make().packed, torch.ones(4, 3)), error=ValueError, match=words)
    w = make()
    writes = lambda: w.mul_(2), lambda: w.__isub__(1), lambda: w.copy_(torch.zeros(4, 8))
    check_unchanged([w.packed, w.scale], *writes, error=DispatchError)
    # An input of another length; the second has as many numbers as three rows.
    wrong = lambda: F.linear(torch.ones(3, 7), w), lambda: F.linear(torch.ones(4, 6), w)
    check_refused(*wrong, error=RuntimeError, match="unflatten")
