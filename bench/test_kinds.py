"""Benchmarks a wrapped argument for int8 weights and rows: families × kinds × ways × modes × N; see `kinds.py`."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from bench.kinds import FAMILIES, PEERS, make_call
from bench.subjects import COUNTS, MODES, WAYS

# Hand-written classes lack a method that PyTorch's cache calls.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* does not implement _stable_hash_for_caching"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
CASES = [
    (mode, count, family, kind, way)
    for mode, count, (family, kinds) in itertools.product(MODES, COUNTS, FAMILIES.items())
    for kind, way in itertools.product(kinds, WAYS)
    if not (kind in PEERS and "desugar" in way)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_call(benchmark, case):
    mode, count, family, kind, way = case
    if kind == "torchao" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    benchmark.group = f"{family}, {mode}, N = {count}"
    benchmark(make_call(FAMILIES[family][kind], way, mode, count))
