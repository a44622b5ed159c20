import pytest
import torch

from bench.prediction.traffic import count_call, nbytes

aten = torch.ops.aten
X, A, B = torch.randn(10), torch.randn(4, 8), torch.randn(8, 16)
EXPANDED = torch.randn(1, 8).expand(100, 8)
INTS = torch.ones(32, 8, dtype=torch.int8)
F32 = torch.float32
OF_PRODUCT = {"reads": {F32: 4 * (4 * 8 + 8 * 16)}, "writes": {F32: 4 * 4 * 16}, "flops": 2 * 4 * 8 * 16}


# The op, its arguments, and what is counted.
CALLS = {
    "a product reads both operands and writes its result": (aten.mm.default, (A, B), {}, OF_PRODUCT),
    "an out argument is written and not read": (aten.mm.out, (A, B), {"out": torch.empty(4, 16)}, OF_PRODUCT),
    "an in-place op reads what it writes": (
        aten.add_.Tensor,
        (torch.randn(10), X),
        {},
        {"reads": {F32: 80}, "writes": {F32: 40}},
    ),
    "an expanded operand is read once": (
        aten.mul.Tensor,
        (EXPANDED, torch.randn(100, 8)),
        {},
        {"reads": {F32: 32 + 3200}},
    ),
    "an embedding reads the rows that it takes": (
        aten.embedding.default,
        (torch.randn(1000, 16), torch.arange(3)),
        {},
        {"reads": {F32: 3 * 16 * 4, torch.int64: 24}},
    ),
    "an operand twice is read once": (aten.mul.Tensor, (X, X), {}, {"reads": {F32: 40}}),
    "integers are multiplied as often as floats": (
        aten._int_mm.default,
        (INTS, INTS.t()),
        {},
        {"flops": 2 * 32 * 8 * 32},
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_a_call_reads_writes_and_computes(case):
    func, args, kwargs, expected = CALLS[case]
    found = count_call(func, args, kwargs, func(*args, **kwargs))
    assert {name: getattr(found, name) for name in expected} == expected


def test_bytes_of_an_expanded_tensor():
    assert nbytes(EXPANDED) == 32
