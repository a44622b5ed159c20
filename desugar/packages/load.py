"""`desugar.load`: reads programs from a file, and calls them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from desugar import _torch as private
from desugar.errors import PackageError, SignatureError
from desugar.ir.calling import Passed
from desugar.packages.archive import Archive
from desugar.packages.loading.assemble import assemble
from desugar.packages.loading.checks import Checking
from desugar.packages.loading.entry import LEFT, Callee, build_entry, build_runner
from desugar.packages.loading.guards import Guards, WeightGuards, plain_leaves
from desugar.packages.loading.libraries import library_call
from desugar.packages.loading.weights import find_weights
from desugar.packages.manifest.classes import find_classes
from desugar.packages.manifest.machine import check_machine
from desugar.packages.manifest.reading import Reader
from desugar.packages.manifest.records import (
    FORMAT,
    ClassRecord,
    GraphRecord,
    LayoutRecord,
    Left,
    Manifest,
    ProgramRecord,
    StridedView,
)
from desugar.packages.manifest.structure import match, paths_of, signature_of
from desugar.packages.manifest.validate import check_manifest


def load(
    path: str | os.PathLike[str],
    *,
    classes: Iterable[type] = (),
    state: Mapping[str, Tensor | nn.Module] | nn.Module | None = None,
    sha256: str | None = None,
    native: bool = True,
) -> Package:
    """Loads a package that :func:`desugar.save` wrote. Neither the source of the function nor a compiler is needed.

    A package holds machine code. Load files that you trust, or name the digest of the one that you trust.

    Args:
        path: The file.
        classes: The classes of arguments and results besides those that ship with this library. Nothing is imported by
            a name in the file.
        state: The weights: a module that has them, or tensors by name, or modules by what stands before the names
            (`{"model": model}` for `model.layer.weight`). They are shared, not copied. None: those in the file.
        sha256: The digest that the file has to have, in hexadecimal.
        native: Whether the machine code of the file runs. Otherwise its plain graphs are compiled here.

    Raises:
        FileNotFoundError: There is no such file.
        PackageError: It is damaged, or was written by another release, for another processor or other classes, or the
            weights do not fit.
    """
    archive = Archive(path, sha256)
    manifest = _read_manifest(archive, classes)
    if manifest.release != torch.__version__:
        raise PackageError(
            f"{archive.path} was saved with torch {manifest.release}, and this is {torch.__version__}: save it again"
        )
    if native and not manifest.is_native:
        raise PackageError(
            f"{archive.path} holds no machine code: load it with native=False, which compiles its graphs"
        )
    if native:
        check_machine(manifest.machine)
    graphs: Callable[[ProgramRecord], Callable[[GraphRecord], Any]]
    graphs = _NativeGraphs(archive).of if native else _compiled_graphs(archive)
    weights = find_weights(archive, manifest, state)
    try:
        return Package(manifest, weights, graphs, owns_weights=state is None)
    except (
        AssertionError,
        AttributeError,
        IndexError,
        KeyError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:
        raise PackageError(
            f"{archive.path}: the manifest refers to something that it does not have, or does not fit its graphs "
            f"({type(error).__name__}: {error}); save it again"
        ) from error


def _read_manifest(archive: Archive, classes: Iterable[type]) -> Manifest:
    data = archive.manifest()
    if not isinstance(data, dict) or data.keys() != {"format", "classes", "manifest"}:
        raise PackageError(f"{archive.path}: the manifest does not fit its schema")
    if data["format"] != FORMAT:
        raise PackageError(
            f"{archive.path}: expected a package of format {FORMAT}, got {data['format']!r:.80}"
        )
    said = data["classes"]
    if not isinstance(said, dict) or not all(isinstance(digest, str) for digest in said.values()):
        raise PackageError(f"{archive.path}: the classes of the manifest do not fit its schema")
    found = find_classes({name: ClassRecord(name, digest) for name, digest in said.items()}, classes)
    try:
        manifest = Reader((LayoutRecord, Left), found).read(data["manifest"], Manifest)
        check_manifest(manifest)
    except RecursionError as error:
        raise PackageError(f"{archive.path}: the manifest is nested too deeply") from error
    return manifest


# -------------------------------------------------------------------------------------------------- graphs


class _NativeGraphs:
    """Loads the libraries of a package."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def of(self, program: ProgramRecord) -> Callable[[GraphRecord], Any]:
        """Returns the function that loads the graphs of a program."""
        return self._load

    def _load(self, record: GraphRecord) -> Any:
        if not record.is_computed:
            return library_call(record.calling, lambda items: [])
        self._archive.check_library(record.name)
        try:
            loader = private.PackageLoader(str(self._archive.path), record.name, False, 1, -1)
        except RuntimeError as error:
            raise PackageError(f"{self._archive.path}: {record.name} cannot be loaded: {error}") from error
        return library_call(record.calling, loader.boxed_run)


def _compiled_graphs(archive: Archive) -> Callable[[ProgramRecord], Callable[[GraphRecord], Any]]:
    from desugar.packages.loading.recompile import RecompiledGraphs  # imports Inductor

    return RecompiledGraphs(archive.graphs()).of


# ------------------------------------------------------------------------------------------------- packages


class Package:
    """Programs that were loaded from a file; calling it runs the one that fits the arguments."""

    def __init__(
        self,
        manifest: Manifest,
        state: dict[str, Tensor],
        graphs: Callable[[ProgramRecord], Callable[[GraphRecord], Any]],
        *,
        owns_weights: bool,
    ) -> None:
        self._manifest, self._state = manifest, state
        keeps = owns_weights and not manifest.is_training and all(map(_keeps_inputs, manifest.programs))
        weights = [state[record.name] for record in manifest.weights]
        self._weights = WeightGuards(weights, handed_out=not keeps)
        self._programs = [self._program(record, graphs(record)) for record in manifest.programs]
        parameters = manifest.programs[0].parameters
        self.__signature__ = signature_of(parameters)
        callees = [one.callee for one in self._programs]
        self._call, self._text = build_entry(parameters, callees, self._choose)

    def _program(self, record: ProgramRecord, load: Callable[[GraphRecord], Any]) -> _Program:
        reads = not self._manifest.is_training and any(one.requires_grad for one in self._weights.weights)
        guards = Guards(list(plain_leaves(record.leaves)))
        assembled = assemble(record, load)
        callee = Callee(record, assembled, guards, self._weights, reads)
        return _Program(callee)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the saved function.

        Raises:
            SignatureError: No program takes such arguments. Nothing was changed.
        """
        return self._call(*args, **kwargs)

    @property
    def programs(self) -> tuple[ProgramRecord, ...]:
        """The records of the programs, in the order of the saved calls."""
        return self._manifest.programs

    @property
    def is_training(self) -> bool:
        """Whether results have gradients."""
        return self._manifest.is_training

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The weights by name. From when it was read, each call checks them."""
        self._weights.hand_out()
        return MappingProxyType(self._state)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the weights that are parameters, for an optimizer."""
        return (tensor for tensor in self.state.values() if isinstance(tensor, nn.Parameter))

    @property
    def source(self) -> str:
        """The text of the functions that were generated for this package."""
        return "\n\n".join([self._text, *(one.callee.assembled.source for one in self._programs)])

    def __reduce__(self) -> Any:
        raise TypeError("a package is neither copied nor pickled: load its file again")

    def __repr__(self) -> str:
        kind = "training" if self.is_training else "inference"
        return f"<desugar package for {kind}: {len(self._programs)} programs of {self.__signature__}>"

    # ....................................................................................... calls that need a look

    def _choose(self, *given: Any) -> Any:
        """Runs the program that fits a call which did not pass the entry's checks; raises what does not fit."""
        if private.is_any_autocast_enabled():
            raise SignatureError("autocast", "a call outside of torch.autocast", "one inside of it")
        errors = []
        for program in self._programs:
            try:
                leaves = self._leaves(program, given)
            except SignatureError as error:
                errors.append(error)
            else:
                return program.run(*leaves)
        raise _join(errors)

    def _leaves(self, program: _Program, given: tuple[Any, ...]) -> list[Any]:
        record = program.callee.record
        by_name = dict(zip((parameter.name for parameter in record.parameters), given, strict=True))
        found: dict[int, Any] = {}
        arguments = dict(record.arguments)
        for parameter in record.parameters:
            value = by_name[parameter.name]
            if parameter.name in arguments:
                if value is LEFT:
                    raise SignatureError(parameter.name, "an argument", "none")
                match(arguments[parameter.name], value, found, parameter.name)
            elif not _is_left_out(parameter, value):
                raise SignatureError(
                    parameter.name, "no such argument: the saved call left it out", f"{value!r:.80}"
                )
        names = {n: name for parameter, tree in record.arguments for n, name in paths_of(tree, parameter)}
        checking = Checking(record.leaves, record.symbols, record.guards, self.is_training)
        checking.run(found, names)
        self._check_weights()
        program.callee.guards.accept(checking.tensors)
        return [found[number] for number in range(len(record.leaves))]

    def _check_weights(self) -> None:
        for record in self._manifest.weights:
            weight, name = self._state[record.name], f"weight {record.name}"
            Checking((), (), (), self.is_training).check_weight(record.leaf, weight, name)
            is_known = self.is_training and record.leaf.requires_grad
            if weight.requires_grad and not is_known and torch.is_grad_enabled():
                way = "a call under torch.no_grad(), as the package was saved for inference"
                if self.is_training:
                    way = "a weight that does not require grad, as when it was saved"
                raise SignatureError(name, way, "one that does, with gradients on")
        self._weights.accept()


@dataclass(frozen=True)
class _Program:
    """A program, and the function that runs it on the leaves of a call that fits, made when it is first needed."""

    callee: Callee

    @functools.cached_property
    def run(self) -> Callable[..., Any]:
        return build_runner(self.callee)


def _keeps_inputs(record: ProgramRecord) -> bool:
    """Whether no result of a program, and nothing that it writes, is an input of it or shares its memory."""
    outputs = record.outputs
    return not (
        outputs.inputs
        or outputs.stores
        or outputs.assigns
        or any(isinstance(value, StridedView) for value in outputs.values)
        or any(isinstance(output, Passed) for output in record.forward.calling.outputs)
    )


def _is_left_out(parameter: Any, value: Any) -> bool:
    if not parameter.is_optional:
        return not value  # *args or **kwargs
    default = parameter.default
    return value is LEFT or (
        type(value) is type(default) and (value == default or repr(value) == repr(default))
    )


def _join(errors: list[SignatureError]) -> SignatureError:
    if len(errors) == 1:
        return errors[0]
    arguments = {error.argument for error in errors}
    if len(arguments) == 1:
        expected = " or ".join(dict.fromkeys(error.expected for error in errors))
        return SignatureError(errors[0].argument, expected, errors[0].got)
    lines = "; ".join(f"program {n}: {error}" for n, error in enumerate(errors))
    return SignatureError(None, f"arguments of one of {len(errors)} programs", f"others ({lines})")
