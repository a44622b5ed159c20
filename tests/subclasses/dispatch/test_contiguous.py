"""A contiguous copy of a value whose `outer` gives another stride: `reshape` and `flatten` ask for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner, static
from tests.subclasses.subjects import MODES


class Images(TensorSubclass, fallback="materialize"):
    """Channels last inside, first outside."""

    pixels: Tensor = inner(differentiable=True)

    @staticmethod
    def outer(pixels):
        shown = pixels.movedim(-1, -3)
        return Outer(shown.shape, shown.stride(), storage_offset=shown.storage_offset())

    def materialize(self):
        return self.pixels.movedim(-1, -3) * 2


CALLS = {
    "reshape": lambda x: x.reshape(2, -1),
    "flatten": lambda x: x.flatten(1),
    "ravel": lambda x: x.ravel(),
    "contiguous": lambda x: x.contiguous().view(2, -1),
    "clone": lambda x: x.clone(memory_format=torch.contiguous_format),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_values_and_gradients(call, mode):
    pixels, plain = (torch.arange(48.0).reshape(2, 4, 2, 3).requires_grad_() for _ in range(2))
    found = MODES[mode](lambda x: CALLS[call](x) * 3)(Images(pixels))
    expected = CALLS[call](plain.movedim(-1, -3) * 2) * 3
    torch.testing.assert_close(found, expected)
    assert CALLS[call](Images(pixels)).is_contiguous()
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(pixels.grad, plain.grad)


def test_a_copy_that_keeps_its_stride_stays_a_value():
    x = Images(torch.rand(2, 4, 2, 3))
    assert type(x.clone()) is Images and x.clone().stride() == x.stride()


class Matrix(TensorSubclass, fallback="materialize"):
    """A transpose is a flag, and the strides of the value tell of it."""

    rows: Tensor = inner(differentiable=True)
    turned: bool = static(default=False)

    @staticmethod
    def outer(rows, turned):
        m, n = rows.shape
        return Outer((n, m), stride=(1, n)) if turned else Outer((m, n))

    def materialize(self):
        return self.rows.t() if self.turned else self.rows + 0


@Matrix.implements(torch.ops.aten.t)
def _(func, x):
    return Matrix(x.rows, turned=not x.turned)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("size", [(2, 3), (3, 3), (1, 3)])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "stock"])
def test_a_result_with_strides_of_its_own_has_a_gradient(mode, size):
    rows = torch.rand(size, requires_grad=True)
    out = MODES[mode](lambda x: x.t().clone())(Matrix(rows))
    assert type(out) is Matrix and out.turned
    (out.materialize() ** 2).sum().backward()
    torch.testing.assert_close(rows.grad, 2 * rows.detach())
