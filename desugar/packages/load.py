"""`desugar.load`: reads programs from a file, and calls them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from desugar import _torch as torch_private
from desugar.backends.base import CompiledGraph
from desugar.backends.calling import Calling, Computed, Known, Passed
from desugar.errors import PackageError, SignatureError
from desugar.ir.values import View
from desugar.packages.archive import GRAPHS, Archive
from desugar.packages.loading.assemble import LoadGraph, assemble
from desugar.packages.loading.entry import Callee, build_entry, check_weight
from desugar.packages.loading.guards import WeightGuards, guards_of
from desugar.packages.loading.weights import find_weights
from desugar.packages.manifest.codec import Reader
from desugar.packages.manifest.needs import check_machine, find_classes
from desugar.packages.manifest.records import GraphRecord, Manifest, ProgramRecord
from desugar.packages.manifest.structure import signature_of


def load(
    path: str | os.PathLike[str],
    *,
    classes: Iterable[type] = (),
    state: Mapping[str, Tensor | nn.Module] | nn.Module | None = None,
    sha256: str | None = None,
    native: bool = True,
) -> Package:
    """Loads a package that :func:`desugar.save` wrote. Neither the source of the function nor a compiler is needed.

    A package holds machine code. Load files that you trust, or name the digest of a file that you trust.

    Args:
        path: The file.
        classes: The classes of arguments and results besides those that ship with this library. No class is imported by
            a name in the file.
        state: The weights: a module that has them, or tensors by name, or modules by a prefix of the names
            (`{"model": model}` for `model.layer.weight`). They are shared and not copied. None loads the weights in the
            file.
        sha256: The digest that the file must have, in hexadecimal.
        native: Whether the machine code of the file runs. Otherwise its plain graphs are compiled here.

    Raises:
        FileNotFoundError: The file does not exist.
        PackageError: The file is damaged, or was written by another release, for another processor or other classes, or
            the weights do not fit.
    """
    archive = Archive(path, sha256)
    fingerprints, data = archive.manifest()
    manifest: Manifest = Reader(find_classes(fingerprints, classes)).read(data, Manifest)
    if manifest.release != torch.__version__:
        raise PackageError(
            f"{archive.path} was saved with torch {manifest.release}, and this is {torch.__version__}: save it again"
        )
    if native:
        check_machine(manifest.machine)
        graphs = _native_graphs(archive)
    else:
        from desugar.packages.loading.recompile import recompiled  # imports Inductor

        graphs = functools.partial(recompiled, archive.json(GRAPHS))
    weights = find_weights(archive, manifest, state)
    try:
        return Package(manifest, weights, graphs, owns_weights=state is None)
    except (AssertionError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise PackageError(
            f"{archive.path}: the manifest refers to something that it does not have, or does not fit its graphs "
            f"({type(error).__name__}: {error}); save it again"
        ) from error


# -------------------------------------------------------------------------------------------------- graphs

Graphs = Callable[[ProgramRecord], LoadGraph]


def _native_graphs(archive: Archive) -> Graphs:
    """Returns a function from a program to the loader of its libraries."""

    def load(record: GraphRecord) -> Any:
        if not record.is_computed:
            return library_call(record.calling, lambda items: [])
        archive.check_library(record.name)
        try:
            loader = torch_private.PackageLoader(str(archive.path), record.name, False, 1, -1)
        except RuntimeError as error:
            raise PackageError(f"{archive.path}: {record.name} cannot be loaded: {error}") from error
        return library_call(record.calling, loader.boxed_run)

    return lambda program: load


def library_call(calling: Calling, run: Callable[[list[Any]], list[Any]]) -> CompiledGraph:
    """Returns a function that calls a graph's library with the graph's list of inputs.

    A lock lets one thread run a library at a time. Without it, a second thread would wait for the first inside
    PyTorch's loader while it holds the GIL. The first thread may need the GIL to delete a tensor.

    Args:
        calling: How the graph is called through its library.
        run: Runs the library on a list of tensors, and keeps no reference to them.
    """
    lock, empty = threading.Lock(), torch.empty
    places = [(argument.index, argument.is_int) for argument in calling.arguments]

    def call_directly(items: list[Any]) -> list[Any]:
        with lock:
            return run(items)

    def call(items: list[Any]) -> list[Any]:
        arguments = [empty((items[index], 0)) if is_int else items[index] for index, is_int in places]
        with lock:
            results = run(arguments)
        return [_output(output, items, results) for output in calling.outputs]

    return call_directly if calling.is_direct else call


def _output(output: Computed | Passed | Known, items: Sequence[Any], results: Sequence[Any]) -> Any:
    match output:
        case Computed(index, is_int):
            return results[index].item() if is_int else results[index]
        case Passed(index):
            return items[index]
        case Known(value):
            return value


# ------------------------------------------------------------------------------------------------- packages


class Package:
    """Programs loaded from a file. A call runs the first program that fits the arguments."""

    def __init__(
        self, manifest: Manifest, state: dict[str, Tensor], graphs: Graphs, *, owns_weights: bool
    ) -> None:
        self._manifest, self._state = manifest, state
        keeps = owns_weights and not manifest.is_training and all(map(_keeps_inputs, manifest.programs))
        weights = [state[record.name] for record in manifest.weights]
        self._weights = WeightGuards(weights, handed_out=not keeps)
        reads_grad_mode = not manifest.is_training and any(weight.requires_grad for weight in weights)
        self.__signature__ = signature_of(manifest.parameters)
        self._callees = [
            Callee(
                record,
                self.__signature__,
                assemble(record, graphs(record)),
                guards_of(record),
                self._weights,
                reads_grad_mode,
            )
            for record in manifest.programs
        ]
        self._call, self._text = build_entry(self.__signature__, self._callees, self._choose)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the saved function.

        Raises:
            SignatureError: No program fits the arguments. No tensor was changed.
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
        """The weights by name. After the first read of this property, each call checks them."""
        self._weights.handed_out[:] = [True]
        return MappingProxyType(self._state)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the weights that are parameters, for an optimizer."""
        return (tensor for tensor in self.state.values() if isinstance(tensor, nn.Parameter))

    @property
    def source(self) -> str:
        """The text of the functions that were generated for this package."""
        return "\n\n".join([self._text, *(callee.assembled.source for callee in self._callees)])

    def __reduce__(self) -> Any:
        raise TypeError("a package is neither copied nor pickled: load its file again")

    def __repr__(self) -> str:
        kind = "training" if self.is_training else "inference"
        return f"<desugar package for {kind}: {len(self.programs)} programs of {self.__signature__}>"

    # ................................................................................... calls that fail the checks

    def _choose(self, *given: Any) -> Any:
        """Runs the first program that fits a call which failed the entry's checks, or raises `SignatureError`."""
        if torch_private.is_any_autocast_enabled():
            raise SignatureError("autocast", "a call outside of torch.autocast", "one inside of it")
        errors = []
        for callee in self._callees:
            try:
                run = callee.explain(*given)
            except SignatureError as error:
                errors.append(error)
            else:
                self._check_weights()
                return run()
        raise _join(errors)

    def _check_weights(self) -> None:
        for record in self._manifest.weights:
            weight, is_known = self._state[record.name], self.is_training and record.value.requires_grad
            with torch.no_grad():
                check_weight(record, weight)
            if weight.requires_grad and not is_known and torch.is_grad_enabled():
                way = "a call under torch.no_grad(), as the package was saved for inference"
                if self.is_training:
                    way = "a weight that does not require grad, as when it was saved"
                raise SignatureError(f"weight {record.name}", way, "one that does, with gradients on")
        self._weights.accept(self._weights.tensors())


def _keeps_inputs(record: ProgramRecord) -> bool:
    """Whether a program changes none of its inputs, and no result is an input or a view."""
    outputs = record.spec.outputs
    return not (
        outputs.inputs
        or outputs.stores
        or outputs.assigns
        or any(isinstance(value, View) for value in outputs.values)
        or any(isinstance(output, Passed) for output in record.forward.calling.outputs)
    )


def _join(errors: list[SignatureError]) -> SignatureError:
    if len(errors) == 1:
        return errors[0]
    if len({error.argument for error in errors}) == 1:
        expected = " or ".join(dict.fromkeys(error.expected for error in errors))
        return SignatureError(errors[0].argument, expected, errors[0].got)
    lines = "; ".join(f"program {n}: {error}" for n, error in enumerate(errors))
    return SignatureError(None, f"arguments of one of {len(errors)} programs", f"others ({lines})")
