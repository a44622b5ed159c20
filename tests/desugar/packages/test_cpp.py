"""The plain graphs of a package run from C++, by PyTorch's own loader."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import desugar
from desugar.ir.values import Slot, Wrapper
from desugar.packages.manifest.expressions import Symbol
from desugar.packages.manifest.records import FromWeight
from tests.desugar.packages.test_inference import Block, rows

SOURCE = Path(__file__).parents[3] / "examples" / "cpp" / "run_package.cpp"


def build(program: Path) -> None:
    libraries = Path(torch.__file__).parent / "lib"
    includes = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    linked = [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    command = [
        os.environ.get("CXX", "g++"),
        "-std=c++20",
        str(SOURCE),
        "-o",
        str(program),
        *includes,
        *linked,
    ]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


@pytest.mark.slow
def test_from_cpp(tmp_path):
    model, place, program = Block(), tmp_path / "rows.pt2", tmp_path / "run_package"
    desugar.save(place, model, desugar.call(rows(3, 5, 2)))
    package = desugar.load(place)
    x = rows(4, 0, 3)

    # The inputs of the graph, in the order of the manifest.
    (record,) = package.programs
    weights = list(package.state.values())
    given = [weights[source.index] if isinstance(source, FromWeight) else None for source in record.sources]
    inputs = plain_inputs(record, given, x)
    torch.save([tensor.detach() for tensor in inputs], tmp_path / "inputs.pt")
    build(program)
    command = [str(program), str(place), "forward0", str(tmp_path / "inputs.pt")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with torch.no_grad():
        expected = model(x).values
    size, total = said.splitlines()[0].rsplit(" ", 1)
    assert size == str(list(expected.shape))
    assert float(total) == pytest.approx(float(expected.sum()), rel=1e-4, abs=1e-4)


def plain_inputs(record, weights, x):
    """The plain tensors that the forward's library takes: `calling.arguments` numbers them among the input slots."""
    slots, ints, numbers = {}, {}, numbers_of(record, x)
    for value, source, weight in zip(record.values, record.sources, weights, strict=True):
        if isinstance(source, FromWeight):
            slots[value.index] = weight
        elif isinstance(value, Wrapper):
            for attribute, part in value.inner:
                slots[part.index] = getattr(x, attribute)
    for slot, origin in record.origins:
        source = record.sources[origin.leaf]
        if isinstance(source, Symbol):  # a size that Dynamo passes by itself
            ints[slot] = numbers[source.index]
        elif origin.method:
            ints[slot] = getattr(functools.reduce(getattr, origin.path, x), origin.method)(origin.dim)
        else:
            ints[slot] = functools.reduce(getattr, origin.path, x)
    return [
        torch.empty((ints[one.index], 0)) if one.is_int else slots[one.index]
        for one in record.forward.calling.arguments
    ]


def numbers_of(record, x):
    """The values of the symbols: sizes of inner tensors of the argument, and its ints."""
    (leaf, *_), found = record.leaves, {}
    for attribute, part in leaf.inner:
        for dim, extent in enumerate(record.leaf_facts[part.index].size):
            if isinstance(extent, Symbol):
                found[extent.index] = getattr(x, attribute).size(dim)
    for name, slot in (*leaf.dynamics, *((dim, slot) for dim, slot in enumerate(leaf.size))):
        if isinstance(slot, Slot) and isinstance(symbol := record.leaf_facts[slot.index], Symbol):
            found[symbol.index] = x.size(name) if isinstance(name, int) else getattr(x, name)
    return found
