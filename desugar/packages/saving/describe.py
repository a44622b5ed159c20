"""Describes a captured call as a record of a manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import SymInt, Tensor

from desugar import _torch as private
from desugar.errors import PackageError
from desugar.flatten.origins import Origin as InputOrigin
from desugar.ir.outputs import Outputs
from desugar.ir.storage import base_of
from desugar.ir.values import (
    Int,
    Slot,
    Value,
    View,
    Wrapper,
    dynamic_names as names_of_dynamics,
    inner_names,
    is_wrapper,
)
from desugar.packages.manifest.expressions import Extent, Symbol, symbols_in
from desugar.packages.manifest.records import (
    BackwardRecord,
    ConstantLeaf,
    FromLeaf,
    FromNumber,
    FromSize,
    FromWeight,
    GraphRecord,
    IntLeaf,
    Leaf,
    Origin,
    OutputsRecord,
    OutputValue,
    ProgramRecord,
    Result,
    SameLeaf,
    Source,
    SplitRecord,
    StridedView,
    UnusedLeaf,
)
from desugar.packages.manifest.structure import flatten
from desugar.packages.saving.capture import Captured, Placeholder, as_expression
from desugar.packages.saving.leaves import (
    context_record,
    declared_names,
    describe_tensor,
    inner_tensors,
    symbols_read,
    with_fixed,
)
from desugar.packages.saving.provenance import Probe, ProbeInt
from desugar.packages.saving.tensor_facts import Symbols, Weights
from desugar.tracing.views import InnerReplay, ViewReplay, return_base

# ---------------------------------------------------------------------------------------------- the program


class Description:
    """Describes one captured call."""

    def __init__(self, captured: Captured, weights: Weights, grads: bool) -> None:
        place = captured.place
        if place.stored is None or place.inputs is None:
            raise PackageError("the graph was not compiled by this library, so there is nothing to save")
        self.captured, self.weights, self.grads = captured, weights, grads
        self.stored, self.inputs = place.stored, place.inputs
        self.symbols = Symbols(self.inputs.fakes.env)
        self._leaves = captured.flattened.leaves
        self._fixed: set[tuple[int, tuple[str, ...]]] = set()

    def record(self, graphs: dict[int, GraphRecord]) -> ProgramRecord:
        """Returns the record.

        Args:
            graphs: id of a library -> its record.

        Raises:
            PackageError: A part of the program cannot be described.
        """
        inputs, found, outputs = self.inputs, self.stored, self.stored.interface.outputs
        if inputs.captured or inputs.generators:
            raise PackageError("the function uses generators")
        self._check_identities()
        self._note_facts()
        sources = tuple(
            self._source(source, example)
            for source, example in zip(self.captured.sources, self.captured.examples, strict=True)
        )
        leaves = tuple(self._leaf(number) for number in range(len(self._leaves)))
        interface, symbols = found.interface, self.symbols
        result, results = self._result()
        record = ProgramRecord(
            self.captured.flattened.parameters,
            self.captured.flattened.arguments,
            leaves,
            (),
            (),
            sources,
            tuple(map(_with_records, inputs.values)),
            symbols.facts_of(inputs.fake_items[slot] for slot in range(len(inputs.flat.items))),
            tuple(_origins(inputs.origins)),
            frozenset(inputs.parameters),
            frozenset(slot for slot, origin in inputs.origins.items() if origin in inputs.inference),
            inputs.fakes.offsets_matter,
            self._outputs(outputs),
            interface.num_forward,
            tuple((number, _with_records(value)) for number, value in interface.tangents),
            tuple(map(symbols.facts, interface.tangent_items)),
            tuple(
                (number, None if value is None else _with_records(value)) for number, value in interface.grads
            ),
            self._split(),
            graphs[id(found.forward)],
            tuple(self._backwards(graphs)),
            result,
            results,
        )
        return self._finish(record)

    def _note_facts(self) -> None:
        """Notes the ints of wrappers that are constants of the program.

        Raises:
            PackageError: The function reads an attribute of an argument that no call is checked for.
        """
        for text in self.captured.facts:
            number, path = self.captured.locate(text) or (0, ())
            if not path:
                continue
            owner: Any = self._leaves[number]
            for attribute in path[:-1]:
                owner = getattr(owner, attribute, None)
            if self._is_dynamic(number, path):
                self._fixed.add((number, path))
            elif path[-1] in getattr(owner, "__dict__", {}) and path[-1] not in declared_names(owner):
                raise _reads_attribute(text)

    def _is_dynamic(self, number: int, path: tuple[str, ...]) -> bool:
        """Whether attributes lead from an argument leaf, through inner tensors alone, to a dynamic int of a class."""
        owner: Any = self._leaves[number]
        for attribute in path[:-1]:
            owner = (
                getattr(owner, attribute) if is_wrapper(owner) and attribute in inner_names(owner) else None
            )
        return is_wrapper(owner) and path[-1] in names_of_dynamics(type(owner))

    def _check_identities(self) -> None:
        """Raises `PackageError` if an argument is the same object as something that no call is checked for."""
        names = self.captured.flattened.names()
        leaves = {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, Tensor)}
        inner = Counter(id(part) for leaf in leaves.values() for _, part in inner_tensors(leaf))
        found = [names[n] for n, leaf in enumerate(self._leaves) if n in names and id(leaf) in inner]
        found += sorted(self.captured.duplicated)
        for source, example in zip(self.captured.sources, self.captured.examples, strict=True):
            is_own = self.captured.is_of_argument(source)
            if inner[id(example)] > is_own or (id(example) in leaves and not is_own):
                found.append(private.source_name(source))
        if found:
            raise PackageError(
                f"{as_expression(found[0])} is the same object as another part of the call, or as an object that the "
                "function holds: save a call with a clone of it"
            )

    def _finish(self, record: ProgramRecord) -> ProgramRecord:
        """Adds guards and symbols, which are known last; every symbol has to be read from an argument."""
        guards = self.symbols.guards()
        symbols = self.symbols.records()
        missing = set(range(len(symbols))) - set(symbols_read(record.leaves))
        if missing:
            raise PackageError(
                f"{len(missing)} sizes of the program are no sizes of its arguments; pass dynamic=False, or mark which "
                "sizes change with torch._dynamo.mark_dynamic"
            )
        return replace(record, guards=guards, symbols=symbols)

    # .............................................................................................. arguments

    def _leaf(self, number: int) -> Leaf:
        leaf = self._leaves[number]
        first = next(n for n, other in enumerate(self._leaves) if other is leaf)
        if isinstance(leaf, Tensor):
            if first != number:
                return SameLeaf(first)
            if number not in self.captured.fakes:
                return UnusedLeaf()
            described = describe_tensor(leaf, self.captured.fakes[number], self.symbols, self.grads)
            fixed = [path for other, path in self._fixed if other == number]
            return with_fixed(described, leaf, fixed)
        if type(leaf) is int and (value := self._dynamic_int(number)) is not None:
            return IntLeaf(value)
        return ConstantLeaf(leaf)

    def _dynamic_int(self, number: int) -> Extent | None:
        """Returns the symbol of an int argument; None if it is a constant of the program."""
        for source, example in zip(self.captured.sources, self.captured.examples, strict=True):
            if isinstance(example, int | SymInt) and self._locate(source) == (number, ()):
                return self.symbols.extent(example)
        return None

    def _locate(self, source: Any) -> tuple[int, tuple[str, ...]] | None:
        return self.captured.locate(private.source_name(source))

    # ................................................................................................. inputs

    def _source(self, source: Any, example: Any) -> Source:
        if isinstance(example, Tensor):
            return self._tensor_source(source, example)
        if isinstance(source, private.TensorPropertySource):
            return self._size_source(source)
        found = self._number_source(source)
        if found is not None:
            return found
        self._refuse_attribute(source)
        value = example.node.hint if isinstance(example, SymInt) else example
        if type(value) is not int:
            raise PackageError(
                f"the function holds {value!r:.80}, which is no tensor and no int: pass it as an argument"
            )
        if isinstance(example, SymInt):
            self.symbols.hold(example, value)
        return FromNumber(value)

    def _number_source(self, source: Any) -> FromLeaf | None:
        """Returns the argument, or the dynamic int of one, that a source names; None if it names neither."""
        found = self._locate(source)
        is_known = found is not None and (not found[1] or self._is_dynamic(*found))
        return FromLeaf(*found) if is_known else None  # type: ignore[misc]

    def _refuse_attribute(self, source: Any) -> None:
        """Raises `PackageError` for what is neither an argument nor held by the function."""
        if type(private.source_root(source)).__name__ == "RandomValueSource":
            raise PackageError("the function draws random numbers in Python: draw them with torch")
        if self.captured.is_of_argument(source):
            raise _reads_attribute(private.source_name(source))

    def _tensor_source(self, source: Any, example: Tensor) -> Source:
        for number, leaf in enumerate(self._leaves):
            if leaf is example:
                return FromLeaf(number, ())
        for number, leaf in enumerate(self._leaves):
            for path, inner in inner_tensors(leaf):
                if inner is example:
                    return FromLeaf(number, path)
        self._refuse_attribute(source)
        return FromWeight(self.weights.index(example, source))

    def _size_source(self, source: Any) -> Source:
        methods = {private.TensorProperty.SIZE: "size", private.TensorProperty.STRIDE: "stride"}
        found = self._locate(source.base)
        if source.prop not in methods or found is None:
            raise PackageError(
                f"the function reads {private.source_name(source)}, which is no size of an argument"
            )
        return FromSize(*found, methods[source.prop], source.idx)

    # ................................................................................................ results

    def _outputs(self, outputs: Outputs) -> OutputsRecord:
        return OutputsRecord(
            len(outputs.visible),
            tuple(map(self._output_value, outputs.values)),
            self.symbols.facts_of(outputs.items),
            tuple(outputs.inputs.items()),
            outputs.writes,
            outputs.stores,
            outputs.versions,
            outputs.assigns,
            outputs.tokens,
        )

    def _output_value(self, value: Value) -> OutputValue:
        if not isinstance(value, View):
            return _with_records(value)  # type: ignore[return-value]
        replay, path, is_unwrapped, view, reads = value.replay, (), False, None, {}
        if isinstance(replay, InnerReplay):
            path, is_unwrapped, replay = replay.inner.path, replay.inner.differentiable, replay.replay
        if replay is not return_base:
            view, reads = self._strided(replay)
        places = tuple((symbol, *place) for symbol, place in reads.items())
        return StridedView(
            value.of, value.index, path, is_unwrapped, view, places, value.detached, value.no_grad
        )

    def _strided(self, replay: Any) -> tuple[Any, dict[int, tuple[str, int]]]:
        """Returns the size, stride and offset of a view, and where the symbols in them are read of its base."""
        extents = replay.extents() if isinstance(replay, ViewReplay) else None
        if extents is not None:
            size, stride, start = (self.symbols.extents(part) for part in (*extents[:2], extents[2:]))
            base = self.symbols.facts(base_of(replay.traced))
            needed = set().union(*map(symbols_in, (*size, *stride, *start)))
            found = {
                extent.index: (method, dim)
                for method, kind in (("stride", base.stride), ("size", base.size))
                for dim, extent in enumerate(kind)
                if isinstance(extent, Symbol) and extent.index in needed
            }
            if found.keys() == needed:
                return (size, stride, *start), found
        raise PackageError(
            "a result is a view of an argument or of another result, of another dtype, of a wrapper, or with sizes "
            "that are not its own: return a clone()"
        )

    def _result(self) -> tuple[Any, tuple[Any, ...]]:
        leaves: list[Any] = []
        tree = flatten(self.captured.result, leaves, "the result", (Probe,))
        return tree, tuple(map(self._result_leaf, leaves))

    def _result_leaf(self, leaf: Any) -> Result | ConstantLeaf | FromLeaf | FromSize:
        if isinstance(leaf, Probe | ProbeInt):
            return leaf.source
        for number, known in enumerate(self.captured.standins):
            if leaf is known and isinstance(leaf, Tensor | Placeholder):
                return Result(number)
        if isinstance(leaf, Tensor):
            raise PackageError(
                "the result holds a tensor that is neither computed nor an argument (a parameter, or an attribute of "
                "an argument): return a clone of it"
            )
        return ConstantLeaf(leaf)

    # ................................................................................................. graphs

    def _split(self) -> SplitRecord | None:
        split = self.stored.split
        if split is None:
            return None
        facts = self.symbols.facts_of
        return SplitRecord(
            split.num_forward,
            split.backward_inputs,
            facts(split.forward_outputs),
            facts(split.backward_items),
            facts(split.gradients),
            split.saved_from,
            split.depends,
            not self.stored.interface.calls,
            split.random_op,
        )

    def _backwards(self, graphs: dict[int, GraphRecord]) -> Iterator[BackwardRecord]:
        variants = self.captured.program.variants
        for present, compiled in self.captured.place.backwards.items():
            assert variants is not None
            variant = variants.describe(present, compiled)
            items, gradients = self.symbols.facts_of(variant.items), self.symbols.facts_of(variant.gradients)
            yield BackwardRecord(present, variant.sources, items, gradients, graphs[id(compiled)])


# ------------------------------------------------------------------------------------------------- helpers


def _with_records(value: Value) -> Value:
    """Returns a value whose layouts are records."""
    if not isinstance(value, Wrapper):
        return value
    inner = tuple((name, _with_records(part)) for name, part in value.inner)
    size, stride = (tuple(map(_known_int, extents)) for extents in (value.size, value.stride))
    context = context_record(value.context)
    return replace(value, context=context, inner=inner, size=size, stride=stride)


def _known_int(extent: Any) -> Int:
    """Returns a size or stride of an input; one that others determine, which nothing reads, is any slot."""
    return Slot(0) if isinstance(extent, SymInt) else extent


def _origins(origins: dict[int, InputOrigin]) -> Iterator[Origin]:
    for slot, origin in origins.items():
        if origin.method is not None:
            yield Origin(slot, origin.leaf, origin.path, origin.method, origin.dim or 0)


def _reads_attribute(name: str) -> PackageError:
    return PackageError(
        f"the function reads {as_expression(name)}, an attribute of an argument: pass it as an argument"
    )
