"""Packages with machine code: loaded where neither the function nor a compiler is."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import desugar
from desugar import SignatureError
from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from tests.desugar.packages.test_inference import Block, rows


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An int8 model of rows, saved with machine code."""
    torch.manual_seed(0)
    torch.compiler.reset()
    place, model = tmp_path_factory.mktemp("native") / "rows.pt2", Block(32)
    quantize_(model, Int8WeightOnlyConfig())
    desugar.save(place, model, desugar.call(rows(3, 5, 2, width=32)))
    return place, model


def test_rows_of_other_lengths(saved):
    place, model = saved
    package = desugar.load(place)
    with torch.no_grad():
        for lengths in [(3, 5, 2), (7,), (1, 1), (0, 2), (0, 0, 9, 1)]:
            x = rows(*lengths, width=32)
            torch.testing.assert_close(package(x), model(x))
    with pytest.raises(SignatureError, match=r"x.size\(2\): expected 32, got 33"):
        package(rows(3, width=33))


def test_in_a_process_without_the_model(saved, tmp_path):
    place, model = saved
    x = rows(4, 0, 3, width=32)
    with torch.no_grad():
        torch.save((x.values, x.offsets, model(x).values), tmp_path / "expected.pt")
    code = """
        import sys
        import torch, desugar
        from subclasses.ragged import JaggedTensor
        package = desugar.load(sys.argv[1])
        values, offsets, expected = torch.load(sys.argv[2])
        got = package(JaggedTensor(values, offsets, max_length=4))
        wrong = {"torch._inductor.compile_fx", "torch._dynamo.convert_frame", "sympy", "tests"} & set(sys.modules)
        assert not wrong, wrong
        torch.testing.assert_close(got.values, expected)
    """
    files = str(place), str(tmp_path / "expected.pt")
    made = subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(code), *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr


def test_several_threads(saved):
    from concurrent.futures import ThreadPoolExecutor

    place, model = saved
    package = desugar.load(place)
    given = [rows(n, 3, width=32) for n in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(package, given * 4))
    with torch.no_grad():
        for x, y in zip(given * 4, got, strict=True):
            torch.testing.assert_close(y, model(x))


@pytest.mark.slow
def test_training(tmp_path):
    model = Block()

    def fn(x):
        y = model(x)
        return y.sum(), y * 2

    place = tmp_path / "training.pt2"
    desugar.save(place, fn, desugar.call(rows(3, 5, 2)), training=True)
    package = desugar.load(place, state={"model": model})
    for lengths in [(3, 5, 2), (7,), (0, 4)]:
        for loss in (lambda r: r[0], lambda r: r[1].values.square().sum() + r[0]):
            x, found = rows(*lengths), []
            for one in (package, fn):
                model.zero_grad()
                loss(one(x)).backward()
                found.append([parameter.grad.clone() for parameter in model.parameters()])
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
