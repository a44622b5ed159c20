"""Describes a package, without loading its code and without its classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from desugar.ir.values import Constant, Plain, Same, Slot, Wrapper
from desugar.packages.archive import Archive, file_digest
from desugar.packages.manifest.codec import Reader
from desugar.packages.manifest.expressions import Extent, symbols_in, text_of
from desugar.packages.manifest.records import Leaf, Manifest, ProgramRecord, WeightRecord
from desugar.packages.manifest.structure import names_of, signature_of
from subclasses.layout import field_name


def show(path: str) -> str:
    """Returns the description of a package: its signatures, layouts, sizes, weights and digest.

    Raises:
        FileNotFoundError: The file does not exist.
        PackageError: The file is not a package.
    """
    archive = Archive(path)
    names, data = archive.manifest()
    classes: dict[str, Any] = {name: type(name.rpartition(".")[2], (), {}) for name in names}
    for cls in classes.values():
        cls.Cotangent = cls
    return "\n".join(_lines(archive, Reader(classes).read(data, Manifest), list(classes)))


def _lines(archive: Archive, manifest: Manifest, classes: list[str]) -> list[str]:
    machine, signature = manifest.machine, signature_of(manifest.parameters)
    code = "none: plain graphs alone" if machine is None else f"for {machine.system}, {machine.processor}"
    return [
        f"{archive.path}: a package for {'training' if manifest.is_training else 'inference'}",
        f"sha256    {file_digest(archive.path)}",
        f"release   torch {manifest.release}",
        f"code      {code}",
        *([f"classes   {', '.join(classes)}"] if classes else []),
        f"weights   {_weights(manifest.weights)}",
        *(
            f"  {weight.name}: {describe_leaf(weight.value, weight.facts)}, "
            + ("parameter" if weight.is_parameter else "buffer or constant")
            for weight in manifest.weights
        ),
        *(
            line
            for number, program in enumerate(manifest.programs)
            for line in (f"program {number}  {signature}", *_program_lines(program))
        ),
    ]


def _weights(weights: Sequence[WeightRecord]) -> str:
    plain: list[Any] = [facts for weight in weights for facts in weight.facts]
    total = sum(prod(facts.size) * facts.dtype.itemsize for facts in plain)
    where = "in the file" if all(weight.data for weight in weights) else "to be given as state="
    return f"{len(weights)} tensors, {total:,} bytes, {where}" if weights else "none"


def _program_lines(program: ProgramRecord) -> Iterator[str]:
    for where, leaf in zip(names_of(program.arguments), program.leaves, strict=True):
        yield f"  {where}: {describe_leaf(leaf, program.leaf_facts)}"
    for index, symbol in enumerate(program.symbols):
        low = "" if symbol.low is None else f"{symbol.low} <= "
        high = "" if symbol.high is None else f" <= {symbol.high}"
        yield f"  where {low}n{index}{high}, {symbol.hint} in the saved call"
    for guard in program.guards:
        yield f"  where {_text(guard)}"
    visible = program.spec.outputs.num_visible
    yield f"  returns {len(program.results)} values, {visible} computed"


def describe_leaf(leaf: Leaf, facts: Sequence[Any]) -> str:
    """Returns a leaf in words; `facts` are the tensors and numbers of its slots."""
    match leaf:
        case Plain(index, requires_grad):
            sizes = ", ".join(map(_text, facts[index].size))
            dtype = str(facts[index].dtype).removeprefix("torch.")
            return f"{dtype}[{sizes}]" + (", requires grad" if requires_grad else "")
        case Wrapper():
            parts = [f"{field_name(name)}: {describe_leaf(part, facts)}" for name, part in leaf.inner]  # type: ignore[arg-type]
            for name, extent in leaf.dynamics:
                parts.append(f"{name}: {_text(facts[extent.index] if isinstance(extent, Slot) else extent)}")
            return f"{leaf.cls.__name__}({', '.join(parts)})"
        case Constant(_, int(index)):
            return f"int {_text(facts[index])}"
        case Constant(value):
            return f"{value!r:.60}, a constant"
        case Same(_, index):
            return f"the same object as leaf {index}"
    return "any tensor, which is not used"


def _text(extent: Extent) -> str:
    return text_of(extent, {index: f"n{index}" for index in symbols_in(extent)})
