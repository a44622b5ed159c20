"""`torch.compile(fn, backend="desugar").aot_compile(...)`, saved and loaded."""

import os
import subprocess
import sys

import pytest
import torch

from desugar.errors import DesugarError
from subclasses.int8 import Int8Tensor
from subclasses.ragged import JaggedTensor
from tests.desugar.judge import judge

pytestmark = pytest.mark.skipif(
    not hasattr(torch.compiler, "load_compiled_function"),
    reason="this release does not save compiled functions",
)


@pytest.fixture(autouse=True)
def _saving():
    with torch._dynamo.config.patch(enable_aot_compile=True):
        yield


def saved(path, fn, *args, **options):
    """Compiles for a call, saves, and loads."""
    compiled = torch.compile(fn, backend="desugar", fullgraph=True, options={"compile_threads": 1} | options)
    compiled.aot_compile((args, {})).save_compiled_function(str(path / "f"))
    with open(path / "f", "rb") as file:
        return torch.compiler.load_compiled_function(file)


def linear(x, w):
    return torch.nn.functional.linear(x, w)


def rows(*lengths):
    return JaggedTensor(torch.randn(sum(lengths), 4), torch.tensor([0, *lengths]).cumsum(0), max_length=8)


@pytest.mark.slow
def test_rows_of_other_lengths(tmp_path):
    weight = torch.randn(3, 4)
    fn = saved(tmp_path, linear, rows(3, 0, 4), weight)
    for lengths in ((3, 0, 4), (5, 2, 1), (8, 8), (2, 2, 2, 2, 2)):
        judge(linear, lambda n=lengths: (rows(*n), weight), fn, atol=1e-5, rtol=1e-5)


def test_training(tmp_path):
    def make_args():
        return torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    fn = lambda x, w: torch.nn.functional.relu(x @ w).square().sum()  # noqa: E731
    judge(fn, make_args, saved(tmp_path, fn, *make_args()), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_what_does_not_fit_is_refused(tmp_path):
    weight, x = Int8Tensor.from_float(torch.randn(8, 4)), torch.randn(4, 4)
    fn = saved(tmp_path, linear, x, weight)
    assert torch.allclose(fn(x, weight), linear(x, weight), atol=1e-5)
    for wrong in (
        (torch.randn(5, 4), weight),
        (x.double(), weight),
        (x, weight.dequantize()),
        (rows(4), weight),
    ):
        with pytest.raises(RuntimeError, match="GuardManager check failed"):
            fn(*wrong)


@pytest.mark.slow
def test_stock_compiles_what_is_saved(tmp_path, caplog):
    fn, x = lambda x: (x.view(4), x * 2), torch.ones(2, 2)
    view, double = saved(tmp_path, fn, x)(x)
    assert "AOTAutograd compiles this graph instead: PyTorch saves functions" in caplog.text
    assert view.data_ptr() == x.data_ptr() and torch.equal(double, x * 2)
    with pytest.raises(DesugarError, match=r"desugar\.save"):
        saved(tmp_path, fn, x, strict=True)


SCRIPT = """
import sys, torch
from subclasses.ragged import JaggedTensor
with open(sys.argv[1], "rb") as file:
    fn = torch.compiler.load_compiled_function(file)
x = JaggedTensor(torch.arange(24.).reshape(6, 4), torch.tensor([0, 1, 6]), max_length=8)
w = torch.ones(3, 4, requires_grad=True)
result = fn(x, w)
assert torch.equal(result.values, x.values @ w.mT), result
(grad,) = torch.autograd.grad(result.values.sum(), w)
assert torch.equal(grad, x.values.sum(0).expand(3, 4)), grad
"""


@pytest.mark.slow
def test_another_process_runs_it(tmp_path):
    saved(tmp_path, linear, rows(3, 0, 4), torch.randn(3, 4, requires_grad=True))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "f")], env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
