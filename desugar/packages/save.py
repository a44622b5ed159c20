"""`desugar.save`: writes compiled programs to a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as private
from desugar.api import uncompiled
from desugar.backends.ahead_of_time import Library, library_backend
from desugar.errors import PackageError
from desugar.ir.stages import presence_bits
from desugar.ir.values import plain_parts
from desugar.packages import graph_text
from desugar.packages.archive import checksum_of, file_digest, write_archive
from desugar.packages.manifest.classes import classes_in, describe_classes
from desugar.packages.manifest.codec import Writer
from desugar.packages.manifest.machine import this_machine
from desugar.packages.manifest.records import (
    FORMAT,
    GraphRecord,
    LayoutRecord,
    Left,
    Manifest,
    ProgramRecord,
    WeightRecord,
)
from desugar.packages.saving.capture import Call, Captured, capture_call
from desugar.packages.saving.describe import Description
from desugar.packages.saving.leaves import describe_weight
from desugar.packages.saving.tensor_facts import Weights


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

    No call is run, and no tensor is changed. What the function reads besides its tensors (attributes, globals, the
    mode of a module) is that of now.

    Args:
        path: The file, a `.pt2`; one that exists is replaced.
        fn: A function, method or `nn.Module`, compiled or not.
        *calls: The arguments of calls, as :func:`desugar.call` returns them. Each becomes a program.
        weights: Whether the file holds the parameters and buffers of `fn`. Without them, `load` is given them.
        training: Whether results have gradients: those of the arguments and weights that require grad now.
        dynamic: Which sizes may differ in other calls: all (True), none (False), those that are marked (None), by
            `torch._dynamo.mark_dynamic` or by a class, as the rows of a `JaggedTensor` are. The same for ints.
        native: Whether the file holds machine code for this kind of processor. Without it, the file holds plain graphs
            alone, and `load(..., native=False)` compiles them.
        options: Options of Inductor, as for `torch.compile`.

    Returns:
        The sha256 of the file, in hexadecimal, for `load(..., sha256=...)`.

    Raises:
        PackageError: A call cannot be a program that knows nothing of this process. No file is written.
        DesugarError: The pass does not support the function.
        torch._dynamo.exc.Unsupported: Dynamo cannot capture a call as one graph.
        TypeError, ValueError: No call is given, or the path does not end in `.pt2`.
    """
    place = _check(Path(path), calls)
    fn = uncompiled(fn)
    with tempfile.TemporaryDirectory(prefix="desugar-package-") as folder:
        backend = library_backend(Path(folder) if native else None, options)
        known, found = Weights(fn), _Graphs()
        programs = []
        for given in calls:
            with _one_compilation(training=training):
                captured = capture_call(fn, given, backend, dynamic)
                _compile_backwards(captured)
                programs.append(_describe(captured, known, found, grads=training))
        data = _Data(known.tensors if weights else [])
        manifest = Manifest(
            torch.__version__,
            this_machine(),
            native,
            training,
            tuple(
                data.describe(describe_weight(*one))
                for one in zip(known.names, known.aliases, known.tensors, strict=True)
            ),
            tuple(programs),
        )
        write_archive(place, _to_json(manifest), found.texts, found.files, data.plain)
    return file_digest(place)


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
    if private.is_any_autocast_enabled():
        raise PackageError(
            "save outside of torch.autocast; what the function does inside of its own is saved"
        )
    return path


@contextlib.contextmanager
def _one_compilation(*, training: bool) -> Iterator[None]:
    """A size may be 1 in other calls, and equal sizes are one only if the function needs it."""
    with torch.set_grad_enabled(training), private.oblivious_sizes():
        yield


def _compile_backwards(captured: Captured) -> None:
    """Compiles a backward for each set of gradients that is saved."""
    variants = captured.program.variants
    if variants is None:
        return
    count = len(variants.traced.tangents)
    alone = [tuple(n == one for n in range(count)) for one in range(count)]
    for present in dict.fromkeys([(True,) * count, *alone]):
        if all(present) or variants.is_compiled_for(present):
            variants.table[present]
            if present not in captured.place.backwards:
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

    def add(self, library: Any, name: str) -> GraphRecord:
        """Adds a graph, and returns its record."""
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


def _describe(captured: Captured, weights: Weights, graphs: _Graphs, *, grads: bool) -> ProgramRecord:
    number = len([name for name in graphs.texts if name.startswith("forward")])
    place = captured.place
    assert place.stored is not None
    records = {id(place.stored.forward): graphs.add(place.stored.forward, f"forward{number}")}
    for present, compiled in place.backwards.items():
        records[id(compiled)] = graphs.add(compiled, f"backward{number}_{presence_bits(present)}")
    return Description(captured, weights, grads).record(records)


def _to_json(manifest: Manifest) -> Any:
    classes = describe_classes(classes_in(manifest))
    writer = Writer((LayoutRecord, Left), {record.name: cls for cls, record in classes.items()})
    return {
        "format": FORMAT,
        "classes": {record.name: record.fingerprint for record in classes.values()},
        "manifest": writer.write(manifest, Manifest),
    }


# -------------------------------------------------------------------------------------------------- weights


class _Data:
    """The bytes of the weights.

    Attributes:
        plain: A tensor of bytes per plain tensor.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.plain: list[Tensor] = []
        self._numbers: dict[str, tuple[tuple[int, int], ...]] = {}
        self._owners: dict[int, str] = {}
        self._tensors = tensors

    def describe(self, record: WeightRecord) -> WeightRecord:
        """Adds the bytes of the next weight, and returns its record."""
        position = len(self._numbers)
        numbers: tuple[tuple[int, int], ...] = ()
        if self._tensors:
            plain = plain_parts(self._tensors[position])
            self._check_alone(record.name, plain)
            added = [_memory_of(tensor) for tensor in plain]
            checksums = [checksum_of(tensor.untyped_storage()) for tensor in added]
            numbers = tuple(enumerate(checksums, start=len(self.plain)))
            self.plain += added
        self._numbers[record.name] = numbers
        return replace(record, data=numbers)

    def _check_alone(self, name: str, plain: list[Tensor]) -> None:
        """Raises `PackageError` if a weight shares memory with another one, which a file would tell apart."""
        for tensor in plain:
            owner = self._owners.setdefault(tensor.untyped_storage()._cdata, name)
            if owner != name:
                raise PackageError(
                    f"the weights {owner} and {name} share memory, and would be two in a file: pass weights=False, and "
                    "load with state="
                )


def _memory_of(tensor: Tensor) -> Tensor:
    """Returns the memory that a tensor covers, from its first to its last number, in a storage of its own."""
    with torch.no_grad():
        if tensor.is_meta:
            raise PackageError(
                "a weight is on the meta device, and has no numbers to save: pass weights=False"
            )
        tensor = tensor.detach()
        length = (
            0
            if tensor.numel() == 0
            else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        )
        return tensor.as_strided((length,), (1,)).cpu().clone()
