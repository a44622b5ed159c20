"""Says what is in a package, without loading its code or knowing its classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from desugar.errors import PackageError
from desugar.packages.archive import Archive, file_digest
from desugar.packages.loading.guards import plain_leaves
from desugar.packages.manifest.expressions import Extent, text_of
from desugar.packages.manifest.reading import Reader
from desugar.packages.manifest.records import (
    ConstantLeaf,
    IntLeaf,
    LayoutRecord,
    Leaf,
    Left,
    Manifest,
    Parameter,
    ProgramRecord,
    SameLeaf,
    TensorFacts,
    TensorLeaf,
    UnusedLeaf,
    WeightRecord,
    WrapperLeaf,
)
from desugar.packages.manifest.structure import paths_of, signature_of
from subclasses.layout import field_name


def show(path: str) -> str:
    """Returns the description of a package: its signatures, layouts, sizes, weights and digest.

    Raises:
        FileNotFoundError: There is no such file.
        PackageError: It is no package.
    """
    archive = Archive(path)
    data = archive.manifest()
    if not isinstance(data, dict) or not isinstance(data.get("classes"), dict):
        raise PackageError(f"{path}: the manifest does not fit its schema")
    classes = {name: type(str(name).rpartition(".")[2], (), {}) for name in data["classes"]}
    manifest: Manifest = Reader((LayoutRecord, Left), classes).read(data.get("manifest"), Manifest)
    return "\n".join(_lines(archive, manifest, list(classes)))


def _lines(archive: Archive, manifest: Manifest, classes: list[str]) -> Iterator[str]:
    yield f"{archive.path}: a package for {'training' if manifest.is_training else 'inference'}"
    yield f"sha256    {file_digest(archive.path)}"
    yield f"release   torch {manifest.release}"
    machine = manifest.machine
    code = f"for {machine.system}, {machine.processor}" if manifest.is_native else "none: plain graphs alone"
    yield f"code      {code}"
    if classes:
        yield f"classes   {', '.join(classes)}"
    yield f"weights   {_weights(manifest.weights)}"
    for weight in manifest.weights:
        kind = "parameter" if weight.is_parameter else "buffer or constant"
        yield f"  {weight.name}: {describe_leaf(weight.leaf, _number)}, {kind}"
    for number, program in enumerate(manifest.programs):
        yield from _program_lines(number, program)


def _weights(weights: Iterable[WeightRecord]) -> str:
    known = list(weights)
    leaves = [leaf for weight in known for leaf in plain_leaves([weight.leaf])]
    total = sum(prod(map(_number_of, leaf.facts.size)) * leaf.facts.dtype.itemsize for leaf in leaves)
    where = "in the file" if all(weight.data for weight in known) else "to be given as state="
    return f"{len(known)} tensors, {total:,} bytes, {where}" if known else "none"


def _program_lines(number: int, program: ProgramRecord) -> Iterator[str]:
    yield f"program {number}  {_signature(program.parameters)}"
    for parameter, tree in program.arguments:
        for index, where in paths_of(tree, parameter):
            yield f"  {where}: {describe_leaf(program.leaves[index], _number)}"
    for index, symbol in enumerate(program.symbols):
        low = "" if symbol.low is None else f"{symbol.low} <= "
        high = "" if symbol.high is None else f" <= {symbol.high}"
        yield f"  where {low}{_number(index)}{high}, {symbol.hint} in the saved call"
    for guard in program.guards:
        yield f"  where {text_of(guard, _number)}"
    yield f"  returns {len(program.results)} values, {program.outputs.num_visible} computed"


def _signature(parameters: Iterable[Parameter]) -> str:
    return str(signature_of(tuple(parameters))).replace("Left()", "...")


def describe_leaf(leaf: Leaf, read: Any) -> str:
    """Returns a leaf in words; `read` returns the text of a symbol."""
    match leaf:
        case TensorLeaf(facts, requires_grad):
            return _describe_facts(facts, read) + (", requires grad" if requires_grad else "")
        case WrapperLeaf():
            inner = ", ".join(f"{field_name(name)}: {describe_leaf(part, read)}" for name, part in leaf.inner)
            ints = "".join(f", {name}: {text_of(extent, read)}" for name, extent in leaf.dynamics)
            return f"{leaf.cls.__name__}({inner}{ints})"
        case IntLeaf(extent):
            return f"int {text_of(extent, read)}"
        case ConstantLeaf(value):
            return f"{value!r:.60}, a constant"
        case SameLeaf(index):
            return f"the same object as leaf {index}"
        case UnusedLeaf():
            return "any tensor, which is not used"
    raise AssertionError(leaf)


def _describe_facts(facts: TensorFacts, read: Any) -> str:
    sizes = ", ".join(text_of(extent, read) for extent in facts.size)
    return f"{str(facts.dtype).removeprefix('torch.')}[{sizes}]"


def _number(index: int) -> str:
    return f"n{index}"


def _number_of(extent: Extent) -> int:
    return extent if isinstance(extent, int) else 0
