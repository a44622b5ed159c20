"""Every variant keeps what the conformance kit asks for, and torchao's own cases for such a class pass."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
import torch

from subclasses import testing
from subclasses.int8 import Int8Tensor, Int8WeightOnlyConfig, quantize_

VARIANTS: dict[str, dict[str, Any]] = {
    "row": {},
    "tensor": {"block_size": (4, 6)},
    "group": {"block_size": (1, 3)},
    "blocks": {"block_size": (2, 2)},
    "asymmetric": {"symmetric": False},
    "asymmetric groups": {"symmetric": False, "block_size": (2, 3)},
    "dynamic": {"activation": "row"},
    "dynamic asymmetric": {"activation": "tensor", "activation_symmetric": False, "symmetric": False},
}

# Those put to the test under the compilers too.
COMPILED = {"row", "asymmetric groups", "dynamic"}

# A dynamic layer rounds its input, so that F.linear gives another number than on the dequantized weight;
# test_layers.py compares it with that rounding done by hand.
ROUNDING = (
    *("values", "keyword_arguments", "other_metadata", "mixed_metadata"),
    *("two_values", "two_value_gradients", "gradients", "inner_gradients", "nested_outside"),
)


# The case of a normal run.
NORMAL = {("row", False)}
CASES = [(variant, compiled) for variant in VARIANTS for compiled in {False, variant in COMPILED}]


@pytest.mark.parametrize(
    ("variant", "compiled"),
    [pytest.param(*case, marks=() if case in NORMAL else pytest.mark.slow) for case in sorted(CASES)],
)
def test_the_kit(variant, compiled):
    options = VARIANTS[variant]
    skip = ROUNDING if "activation" in options else ()
    compared: dict[str, Any] = {} if compiled else {"paths": {}}
    testing.check(lambda: Int8Tensor.from_float(torch.randn(4, 6), **options), skip=skip, **compared)


@pytest.mark.slow
def test_the_kit_on_a_narrow_dtype():
    # The sum is scaled, not the weight, so what bfloat16 rounds is another number.
    # A copy to a wider dtype keeps what bfloat16 would have rounded.
    skip = ("gradients", "inner_gradients", "mixed_metadata")
    testing.check(lambda: Int8Tensor.from_float(torch.randn(4, 6).bfloat16()), paths={}, skip=skip)


# ---- torchao's ---------------------------------------------------------------------------------------------


# The basic case calls .cuda().
NEEDS_CUDA = set() if torch.cuda.is_available() else {"test_device1_to_device2_device1_cpu_device2_cpu"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("base", "excused"),
    [
        ("TorchAOBasicTestCase", NEEDS_CUDA),
        pytest.param("TorchAOCompileTestCase", set(), marks=pytest.mark.slow),
    ],
)
def test_torchaos_cases(base, excused):
    utils, result = pytest.importorskip("torchao.testing.utils"), unittest.TestResult()
    # Parametrized tests are made anew for each class; those of the base are inherited as they are.
    body = {"TENSOR_SUBCLASS": Int8Tensor, "FACTORY_FN": staticmethod(Int8Tensor.from_float), "kwargs": {}}
    case = type(f"Ours{base}", (getattr(utils, base),), body)
    methods = [name for name in dir(case) if name.startswith("test_")]
    unittest.TestSuite([case(m) for m in methods]).run(result)
    failed = {test.id().rpartition(".")[2]: text for test, text in (*result.failures, *result.errors)}
    assert result.testsRun == len(methods) > 0
    assert set(failed) <= excused, next(text for name, text in failed.items() if name not in excused)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dim", [0, 1])
def test_torchaos_chunks(dim):
    utils = pytest.importorskip("torchao.testing.utils")
    case = utils.TorchAOIntegrationTestCase("__init__")
    for size in ((8, 16), (4, 8, 16)):
        case._test_chunk_similar_to_vllm_llama4(Int8Tensor.from_float(torch.randn(size)), dim)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchaos_shards(dtype):
    """The steps of its tensor parallel case that need no second device: quantize, cut by columns or rows, use."""
    utils = pytest.importorskip("torchao.testing.utils")
    layer, linear = torch.nn.Linear(64, 32, bias=False, dtype=dtype), torch.nn.functional.linear
    quantize_(layer, Int8WeightOnlyConfig())
    assert utils.TorchAOTensorParallelTestCase.QUANT_METHOD_FN is not None
    x, whole = torch.randn(3, 64, dtype=dtype), layer.weight
    torch.testing.assert_close(
        torch.cat([linear(x, part) for part in (whole[:16, :], whole[16:, :])], -1), layer(x)
    )
    columns = sum(linear(x[:, i : i + 32], whole[:, i : i + 32]) for i in (0, 32))
    torch.testing.assert_close(columns, layer(x), atol=2e-2, rtol=2e-2)
