"""Packages with machine code: loaded where neither the function nor a compiler is, and run from C++."""

import functools
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import desugar
from desugar import SignatureError
from desugar.ir.values import Slot, Wrapper
from desugar.packages.manifest.expressions import Symbol
from desugar.packages.manifest.records import FromWeight
from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from subclasses.keyed import EmbeddingBagCollection, KeyedJaggedTensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.desugar.packages.test_inference import Block, of_one_row, rows
from tests.desugar.packages.test_training import LOSSES, Both, assert_same_gradients
from tests.modules import Held


def run(*command):
    """Runs a program in a process of its own; returns its output."""
    made = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An int8 model of rows, saved with machine code."""
    torch.manual_seed(0)
    torch.compiler.reset()
    place = tmp_path_factory.mktemp("native") / "rows.pt2"
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU())
    quantize_(model, Int8WeightOnlyConfig())
    desugar.save(place, model, desugar.call(rows(3, 5, 2, width=32)))
    return place, model


@pytest.mark.slow
def test_rows_of_other_lengths(saved):
    place, model = saved
    package = desugar.load(place)
    with torch.no_grad():
        for lengths in [(3, 5, 2), (7,), (1, 1), (0, 2), (0, 0, 9, 1)]:
            x = rows(*lengths, width=32)
            torch.testing.assert_close(package(x), model(x))
    with pytest.raises(SignatureError, match=r"input.size\(2\): expected 32, got 33"):
        package(rows(3, width=33))


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
def test_sizes_of_one(tmp_path, native):
    """Inductor reasons about sizes of its own accord: none may be one of the saved call, nor read past an end."""
    for saved, *others in ([(5, 3), (1, 3), (2, 7), (4, 1), (1, 1)], [(1, 3), (1, 7)]):
        torch.compiler.reset()
        place = tmp_path / "ones.pt2"
        desugar.save(place, of_one_row, desugar.call(torch.randn(saved)), native=native, dynamic=True)
        package = desugar.load(place, native=native)
        for size in (saved, *others):
            x = torch.randn(size)
            torch.testing.assert_close(package(x), of_one_row(x))


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
    run(sys.executable, "-I", "-c", textwrap.dedent(code), place, tmp_path / "expected.pt")


def test_another_layout_is_named(saved):
    """Values whose metadata is equal may differ in which inner tensors there are."""
    package, x = desugar.load(saved[0]), rows(3, 2, width=32)
    expected = r"input: expected JaggedTensor\(ragged_dim=1, lengths=None, count=None\), got \w+\(ragged_dim=1, count=N"
    with torch.no_grad(), pytest.raises(SignatureError, match=expected):
        package(x[:1])


def test_several_threads(saved):
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
    model, place = Both(block=Block()), tmp_path / "training.pt2"
    desugar.save(place, model, desugar.call(rows(3, 5, 2)), training=True)
    package = desugar.load(place, state=model)
    for lengths in [(3, 5, 2), (7,), (0, 4)]:
        for loss in (LOSSES["the first"], LOSSES["both"]):
            assert_same_gradients(package, model, model.parameters(), (rows(*lengths),), loss, atol=1e-4)


class Attention(Held):
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.into(x).chunk(3, -1))
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_attention_and_lookups_are_served_without_dynamo(tmp_path):
    """The first call of an op of `torch.library.custom_op` imports it, in seconds. A batch of one row has a program."""
    model = Attention(into=torch.nn.Linear(16, 48), out=torch.nn.Linear(16, 16))
    parts = [torch.randn(n, 16) for n in (3, 5, 2)]
    given = JaggedTensor.from_tensors(parts), PaddedTensor.from_tensors(parts)
    keyed = KeyedJaggedTensor(["a"], torch.tensor([1, 2, 0]), torch.tensor([2, 1]))
    bags = EmbeddingBagCollection({"a": torch.nn.EmbeddingBag(4, 3, mode="sum")})
    with torch.no_grad():
        one = JaggedTensor.from_tensors([torch.randn(1, 16)])
        desugar.save(tmp_path / "rows.pt2", model, *map(desugar.call, (*given, one)))
        desugar.save(tmp_path / "bags.pt2", bags, desugar.call(keyed))
        expected = [model(x).to_dense() for x in (*given, one)], bags(keyed)
    torch.save((given, one, keyed, expected), tmp_path / "expected.pt")
    code = """
        import sys
        import torch, desugar
        import subclasses.keyed, subclasses.ragged
        package, bags = (desugar.load(f"{sys.argv[1]}/{name}.pt2") for name in ("rows", "bags"))
        given, one, keyed, expected = torch.load(f"{sys.argv[1]}/expected.pt", weights_only=False)
        got = [package(x).to_dense() for x in (*given, one)], bags(keyed)
        assert "torch._dynamo" not in sys.modules
        torch.testing.assert_close(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1])
    """
    run(sys.executable, "-c", textwrap.dedent(code), tmp_path)


# ---- the plain graphs from C++, by PyTorch's own loader --------------------------------------------------------

SOURCE = Path(__file__).parents[3] / "examples" / "cpp" / "run_package.cpp"


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
    torch.save([tensor.detach() for tensor in plain_inputs(record, given, x)], tmp_path / "inputs.pt")
    libraries = Path(torch.__file__).parent / "lib"
    includes = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    linked = [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    run(os.environ.get("CXX", "g++"), "-std=c++20", SOURCE, "-o", program, *includes, *linked)
    said = run(program, place, "forward0", tmp_path / "inputs.pt")
    with torch.no_grad():
        expected = model(x).values
    size, total = said.splitlines()[0].rsplit(" ", 1)
    assert size == str(list(expected.shape))
    assert float(total) == pytest.approx(float(expected.sum()), rel=1e-4, abs=1e-4)


def plain_inputs(record, weights, x):
    """The plain tensors that the forward's library takes: `calling.arguments` numbers them among the input slots."""
    slots, ints, numbers = {}, {}, numbers_of(record, x)
    for value, source, weight in zip(record.spec.inputs.values, record.sources, weights, strict=True):
        if isinstance(source, FromWeight):
            slots[value.index] = weight
        elif isinstance(value, Wrapper):
            for attribute, part in value.inner:
                slots[part.index] = getattr(x, attribute)
    for slot, origin in ((n, one) for n, one in enumerate(record.spec.inputs.origins) if one.is_symbol):
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
