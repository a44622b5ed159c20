"""What an Int8Tensor is made of, how good it is, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from subclasses import DispatchError
from subclasses.int8 import Int8Tensor
from tests.tables import raising


@pytest.mark.parametrize(
    ("size", "block_size", "counts"),
    [
        ((5,), None, (1,)),
        ((4, 6), None, (4, 1)),
        ((4, 6), (4, 6), (1, 1)),
        ((4, 6), (1, 3), (4, 2)),
        ((2, 4, 6), None, (2, 4, 1)),
        ((2, 3, 4, 6), (1, 3, 4, 6), (2, 1, 1, 1)),
        ((0, 6), None, (0, 1)),
        ((4, 0), None, (4, 1)),
    ],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_one_scale_for_each_block(size, block_size, counts, symmetric):
    w = torch.randn(size)
    x = Int8Tensor.from_float(w, block_size=block_size, symmetric=symmetric)
    assert x.scale.shape == (counts if 0 not in size[:1] else x.scale.shape)
    assert (x.zero_point is None) is symmetric and x.shape == w.shape and x.dtype == w.dtype
    assert 0 in size or x.block_size == (block_size or (*(1 for _ in size[:-1]), size[-1]))
    assert x.dequantize().shape == w.shape


@given(st.integers(0, 2**31), st.booleans(), st.floats(-8, 8), st.sampled_from([1e-30, 1e-8, 1.0, 1e20]))
def test_no_entry_is_further_off_than_half_a_step(seed, symmetric, shift, size):
    w = (torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)) + shift) * size
    x = Int8Tensor.from_float(w, block_size=(1, 4), symmetric=symmetric)
    step = x.scale.repeat_interleave(4, 1)
    # A zero point is rounded too, so a range that ends between two steps may be half a step short.
    bound = 0.5 if symmetric else 1.0
    assert ((x.dequantize() - w).abs() <= bound * step * 1.001).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_widest_range_has_a_finite_scale(symmetric):
    w = torch.tensor([[3e38, -3e38, 1e38, 0.0]])
    got = Int8Tensor.from_float(w, symmetric=symmetric).dequantize()
    torch.testing.assert_close(got, w, atol=3e36, rtol=0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_not_finite_spoils_its_block_alone(wrong, symmetric):
    w = torch.randn(3, 8)
    w[1, 2] = wrong
    got = Int8Tensor.from_float(w, symmetric=symmetric).dequantize()
    assert not got[1].isfinite().any()
    torch.testing.assert_close(got[::2], w[::2], atol=0.1, rtol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_constants_and_zeros(value, symmetric):
    x = Int8Tensor.from_float(torch.full((2, 4), value), symmetric=symmetric)
    torch.testing.assert_close(x.dequantize(), torch.full((2, 4), value), rtol=0.005, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_scales_are_wide(dtype):
    x = Int8Tensor.from_float(torch.randn(4, 6, dtype=dtype))
    assert x.dtype == x.dequantize().dtype == dtype
    assert x.scale.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert x.dequantize(torch.float64).dtype == torch.float64


Q, S = torch.zeros(4, 6, dtype=torch.int8), torch.ones(4, 1)


def test_from_parts():
    q = torch.randint(-128, 128, (4, 6), dtype=torch.int8)
    x = Int8Tensor(q, torch.tensor(0.5), zero_point=torch.tensor(3, dtype=torch.int8), block_size=(4, 6))
    assert torch.equal(x.dequantize(), (q.float() - 3) * 0.5)
    assert Int8Tensor(q, torch.rand(4, 1, dtype=torch.bfloat16)).dtype == torch.bfloat16
    scale = torch.rand(4, 1, requires_grad=True)
    (grad,) = torch.autograd.grad(Int8Tensor(q, scale).dequantize().square().sum(), scale)
    torch.testing.assert_close(grad, (2 * scale * q.float().square()).sum(1, keepdim=True).detach())


test_refused = raising(
    [
        (make, error, says)
        for make, error, says in [
            (
                lambda: Int8Tensor(Q, torch.ones(4)),
                ValueError,
                r"2 dimensions that divide \(4, 6\), got \(4,\)",
            ),
            (lambda: Int8Tensor(Q, torch.ones(3, 1)), ValueError, r"got \(3, 1\)"),
            (lambda: Int8Tensor(Q, S, torch.zeros(1, 6, dtype=torch.int8)), ValueError, "zero_point"),
            (lambda: Int8Tensor(Q, S, block_size=(1, 3)), ValueError, r"asks for a scale of size \(4, 2\)"),
            (lambda: Int8Tensor(Q, S, block_size=(6,)), ValueError, "each of the 2 dimensions"),
            (lambda: Int8Tensor.from_float(S, block_size=4), ValueError, "each of the 2 dimensions"),
            (lambda: Int8Tensor(Q.float(), S), ValueError, "torch.int8"),
            (lambda: Int8Tensor(Q, S.int()), ValueError, "floating point"),
            (lambda: Int8Tensor(Q, S, float_dtype=torch.int32), ValueError, "floating point"),
            (lambda: Int8Tensor(Q, S, activation="column"), ValueError, "'column'"),
            (lambda: Int8Tensor(Q, 1.0), TypeError, "scale"),
            (lambda: Int8Tensor.from_float(Q), TypeError, "torch.int8"),
            (lambda: Int8Tensor.from_float([1.0]), TypeError, "list"),
            (lambda: Int8Tensor.from_float(torch.tensor(1.0)), ValueError, "one dimension"),
            (
                lambda: Int8Tensor.from_float(torch.ones(4, 6), block_size=(1, 4)),
                ValueError,
                "does not divide",
            ),
            (
                lambda: Int8Tensor.from_float(torch.ones(4, 6), block_size=(1, 0)),
                ValueError,
                "does not divide",
            ),
            (lambda: Int8Tensor.from_float(torch.randn(4))[0], DispatchError, "one dimension"),
        ]
    ]
)
