"""The plain graphs of a package run from C++, by PyTorch's own loader."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import desugar
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
    given = [weights[source.index] if hasattr(source, "index") else None for source in record.sources]
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
    from desugar.packages.manifest.records import FromLeaf, FromWeight

    slots, ints = {}, {}
    for value, source, weight in zip(record.values, record.sources, weights, strict=True):
        if isinstance(source, FromWeight):
            slots[value.index] = weight
        elif isinstance(source, FromLeaf):
            for attribute, part in value.inner:
                slots[part.index] = getattr(x, attribute)
    for origin in record.origins:
        source = record.sources[origin.leaf]
        read = x if isinstance(source, FromLeaf) else None
        for attribute in origin.path:
            read = getattr(read, attribute)
        if origin.method:
            ints[origin.slot] = getattr(read, origin.method)(origin.dim)
        elif origin.path:
            ints[origin.slot] = read
        else:  # a size that Dynamo passes by itself
            ints[origin.slot] = getattr(x, source.method)(source.dim)
    return [
        torch.empty((ints[one.index], 0)) if one.is_int else slots[one.index]
        for one in record.forward.calling.arguments
    ]
