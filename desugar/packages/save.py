"""`desugar.save`: writes compiled programs to a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from desugar import _torch as torch_private
from desugar.api import uncompiled
from desugar.backends.ahead_of_time import Library, library_backend
from desugar.errors import PackageError
from desugar.ir.stages import presence_bits
from desugar.ir.values import Flat, unwrap_value
from desugar.packages import graph_text
from desugar.packages.archive import file_digest, length_of, write_archive
from desugar.packages.manifest.codec import Writer, check
from desugar.packages.manifest.needs import fingerprint, this_machine
from desugar.packages.manifest.records import FORMAT, GraphRecord, Manifest, WeightRecord
from desugar.packages.manifest.structure import parameters_of
from desugar.packages.saving.capture import Call, Captured, capture_call
from desugar.packages.saving.describe import Description, Symbols, Weights


def save(  # noqa: PLR0913 - a contract, and options of `compile`
    path: str | os.PathLike[str],
    fn: Any,
    *calls: Call,
    weights: bool = True,
    training: bool = False,
    dynamic: bool | None = None,
    native: bool = True,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Compiles a function for some calls, and writes the programs to a file that runs without the function's source.

    No call is run, and no tensor is changed. The package keeps the present values of attributes, globals and modes of
    modules that the function reads.

    Args:
        path: The path of the `.pt2` file; an existing file is replaced.
        fn: A function, method or `nn.Module`, compiled or not.
        *calls: The arguments of calls, as :func:`desugar.call` returns them. Each call becomes a program.
        weights: Whether the file holds the parameters and buffers of `fn`. Without them, `load` needs `state`.
        training: Whether results are differentiable with respect to the arguments and weights that require grad now.
        dynamic: Which sizes may differ in other calls: all (True), none (False), or the marked sizes (None).
            `torch._dynamo.mark_dynamic` or a class marks a size, such as the rows of a `JaggedTensor`. The same holds
            for ints.
        native: Whether the file holds machine code for this kind of processor. Without it, the file holds plain graphs
            alone, and `load(..., native=False)` compiles them.
        options: Options of Inductor, as for `torch.compile`.

    Returns:
        The sha256 of the file, in hexadecimal, for `load(..., sha256=...)`.

    Raises:
        PackageError: A call depends on state of this process that a file cannot hold. No file is written.
        DesugarError: Desugaring does not support the function.
        torch._dynamo.exc.Unsupported: Dynamo cannot capture a call as one graph.
        TypeError, ValueError: No call is given, or the path does not end in `.pt2`.
    """
    file = _check(Path(path), calls)
    fn = uncompiled(fn)
    with tempfile.TemporaryDirectory(prefix="desugar-package-") as folder:
        backend = library_backend(Path(folder) if native else None, options)
        known, graphs, programs = Weights(fn), _Graphs(), []
        for given in calls:
            # A size may be 1 in other calls. Equal sizes share a symbol only if the function requires it.
            with torch.set_grad_enabled(training), torch_private.oblivious_sizes():
                captured = capture_call(fn, given, backend, dynamic)
                _compile_backwards(captured)
                records = graphs.add_all(captured)
                programs.append(Description(captured, known, training).record(records))
        data: list[Tensor] = []
        manifest = Manifest(
            str(torch.__version__),
            this_machine() if native else None,
            training,
            tuple(parameters_of(captured.flattened.signature)),
            tuple(_describe_weights(known, data if weights else None)),
            tuple(programs),
        )
        write_archive(file, _to_json(manifest), graphs.texts, graphs.files, data)
    return file_digest(file)


def _check(path: Path, calls: tuple[Call, ...]) -> Path:
    if path.suffix != ".pt2":
        raise ValueError(f"expected a path that ends in .pt2, got {path}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into")
    if not calls:
        raise TypeError("expected the arguments of a call: desugar.save(path, fn, desugar.call(x, y))")
    for given in calls:
        if not isinstance(given, Call):
            raise TypeError(f"expected desugar.call(...), got {given!r:.80} of type {type(given).__name__}")
    if torch_private.is_any_autocast_enabled():
        raise PackageError("save outside of torch.autocast; the function may enter its own")
    return path


def _compile_backwards(captured: Captured) -> None:
    """Compiles a backward for each set of gradients that the package supports."""
    variants = captured.program.variants
    if variants is None:
        return
    count = len(variants.interface.tangents)
    alone = [tuple(n == one for n in range(count)) for one in range(count)]
    for present in dict.fromkeys([(True,) * count, *alone]):
        if all(present) or variants.uses_graph(present):
            variants.table[present]
            if present not in captured.cache.backwards:
                raise PackageError("the backward assumes sizes that the forward does not: pass dynamic=False")


class _Graphs:
    """The graphs of a package.

    Attributes:
        files: Name of a library -> its files.
        texts: Name of a graph -> its text as JSON data.
    """

    def __init__(self) -> None:
        self.files: dict[str, tuple[Path, ...]] = {}
        self.texts: dict[str, Any] = {}

    def add_all(self, captured: Captured) -> dict[int, GraphRecord]:
        """Adds the graphs of a program; returns id of a library -> the record of its graph."""
        cache, number = captured.cache, sum(name.startswith("forward") for name in self.texts)
        assert cache.stored is not None
        records = {id(cache.stored.forward): self._add(cache.stored.forward, f"forward{number}")}
        for present, compiled in cache.backwards.items():
            records[id(compiled)] = self._add(compiled, f"backward{number}_{presence_bits(present)}")
        return records

    def _add(self, library: Any, name: str) -> GraphRecord:
        if not isinstance(library, Library):
            raise PackageError("a graph of this function cannot be compiled ahead of time")
        if library.files:
            self.files[name] = library.files
        try:
            self.texts[name] = graph_text.write(library.graph)
        except PackageError as reason:
            if not library.files:
                raise PackageError(f"{reason}, which is machine code only: pass native=True") from reason
            self.texts[name] = None
        return GraphRecord(name, library.is_computed, library.calling)


def _to_json(manifest: Manifest) -> Any:
    writer = Writer()
    written = writer.write(manifest)
    check(manifest, Manifest)
    fingerprints = {name: fingerprint(cls) for name, cls in sorted(writer.classes.items())}
    return {"format": FORMAT, "classes": fingerprints, "manifest": written}


# -------------------------------------------------------------------------------------------------- weights


def _describe_weights(weights: Weights, data: list[Tensor] | None) -> Iterator[WeightRecord]:
    """Yields the records of the weights, and adds their bytes to `data`.

    Raises:
        PackageError: Two weights share memory; a file would hold two copies.
    """
    owners: dict[int, str] = {}
    for tensor, name, aliases in weights.entries:
        flat, first = Flat(), len(data or ())
        value = unwrap_value(tensor, flat)
        facts = tuple(map(Symbols().fact, flat.items))
        for plain in flat.items if data is not None else ():
            owner = owners.setdefault(plain.untyped_storage()._cdata, name)
            if owner != name:
                raise PackageError(
                    f"the weights {owner} and {name} share memory, and would be two in a file: pass weights=False, and "
                    "load with state="
                )
            data.append(_memory_of(plain))  # type: ignore[union-attr]
        numbers = tuple(range(first, len(data or ())))
        yield WeightRecord(name, aliases, value, facts, isinstance(tensor, nn.Parameter), numbers)  # type: ignore[arg-type]


def _memory_of(tensor: Tensor) -> Tensor:
    """Copies the memory that a tensor spans, from its first to its last element, to a new storage on the CPU."""
    with torch.no_grad():
        if tensor.is_meta:
            raise PackageError(
                "a weight is on the meta device, and has no numbers to save: pass weights=False"
            )
        length = length_of(tensor.size(), tensor.stride())
        return tensor.detach().as_strided((length,), (1,)).cpu().clone()
