"""Writes the wrapper of a program from its record, and builds it; no text comes from the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from desugar.backends.base import CompiledGraph
from desugar.errors import PackageError, SignatureError
from desugar.flatten.fakes import Fakes
from desugar.flatten.inputs import Inputs
from desugar.flatten.origins import Origin
from desugar.ir.abstract_values import Described, Unknown
from desugar.ir.outputs import Outputs
from desugar.ir.stages import Graphs, Interface, Split
from desugar.ir.values import Flat, Value, View, Wrapper, slots_of
from desugar.packages.manifest.expressions import Extent, value_of
from desugar.packages.manifest.records import (
    BackwardRecord,
    Fact,
    GraphRecord,
    LayoutRecord,
    Origin as OriginRecord,
    ProgramRecord,
    StridedView,
    TensorFacts,
)
from desugar.wrapper.backward import Variant, VariantEmitter, variant_name
from desugar.wrapper.backward_plan import BackwardPlan, first_paths
from desugar.wrapper.direct_calls import replace_backward
from desugar.wrapper.results import Parts
from desugar.wrapper.run import emit_program
from subclasses import TensorSubclass
from subclasses.autograd.construct import unwrap_one
from subclasses.codegen.build import build_functions
from subclasses.codegen.emitter import Emitter
from subclasses.layout import Layout, intern_layout

FILE = "<desugar package>"  # of generated text, in tracebacks
LoadGraph = Callable[[GraphRecord], CompiledGraph]


@dataclass(eq=False)
class Assembled:
    """A program of a package.

    Attributes:
        run: Takes the inputs of the program, and returns its results.
        source: The text of the functions generated so far.
    """

    run: Callable[..., tuple[Any, ...]]
    source: str


def assemble(record: ProgramRecord, load: LoadGraph) -> Assembled:
    """Builds a program.

    Args:
        record: The program.
        load: Returns the compiled form of a graph.
    """
    hints = [symbol.hint for symbol in record.symbols]
    inputs = _inputs_of(record, hints)
    interface = _interface_of(record, hints)
    split = _split_of(record, hints)
    out, plan = emit_program(Parts(inputs, interface, load(record.forward), _refuse_sharing, split))
    scope, table = out.namespace, None
    if plan is not None:
        table = PackagedBackwards(record, interface, plan, load)
        scope = scope | {"backwards": table}
    assembled = Assembled(_refuse_sharing, out.source)
    functions = build_functions(out.source, scope, filename=FILE, owner=assembled)
    assembled.run = functions["run"]
    if table is not None:
        table.assembled, table.function = assembled, functions["Backward"]
    return assembled


def _refuse_sharing(*leaves: Any) -> NoReturn:
    raise SignatureError(
        None,
        "arguments that begin where those of the saved call did in their memory, and share none with one that the "
        "function writes to",
        "others; pass clones",
    )


# ------------------------------------------------------------------------------------------------ backwards


class PackagedBackwards(dict[tuple[bool, ...], Callable[..., Any]]):
    """Presence of each gradient -> the function of that backward; builds the function on first access.

    Attributes:
        assembled: The program.
        function: The autograd function that looks up backwards here.
    """

    assembled: Assembled
    function: Any

    def __init__(
        self, record: ProgramRecord, interface: Interface, plan: BackwardPlan, load: LoadGraph
    ) -> None:
        super().__init__()
        self._record, self._interface, self._plan, self._load = record, interface, plan, load
        self._hints = [symbol.hint for symbol in record.symbols]

    def __missing__(self, present: tuple[bool, ...]) -> Callable[..., Any]:
        variant, name = self._variant(present), variant_name(present)
        out = Emitter()
        tangents = (f"tangent{number}" for number, _ in self._interface.tangents)
        out.reserve("ctx", "saved", "_", name, *tangents)
        fallback = out.bind(self._run_another if all(present) else _refuse_gradients, "another_backward")
        emitter = VariantEmitter(
            out, self._interface, self._plan, fallback, autocast=False, reads_memory=True
        )
        emitter.emit(variant)
        function = build_functions(out.source, out.namespace, filename=FILE, owner=self)[name]
        self.assembled.source += "\n\n" + out.source
        self[present] = function  # type: ignore[assignment]
        if self._plan.is_replaced and all(present):
            replace_backward(self.function, function)
        return function  # type: ignore[return-value]

    def _variant(self, present: tuple[bool, ...]) -> Variant:
        if not any(present):
            return Variant(present, (), (), (), None)
        found = next((one for one in self._record.backwards if one.present == present), None)
        if found is None and self._record.split is not None and self._record.split.fills_zeros:
            return self._fill(present)
        if found is None:
            arrived = [n for n, is_present in enumerate(present) if is_present]
            saved = [[n for n, p in enumerate(one.present) if p] for one in self._record.backwards]
            raise SignatureError(
                "the gradients",
                f"those of results {' or '.join(map(str, saved))} (counted among those with one)",
                str(arrived),
            )
        return self._describe(found)

    def _fill(self, present: tuple[bool, ...]) -> Variant:
        """Returns the variant that runs the backward of all gradients, with zeros for those that do not arrive."""
        whole = next(one for one in self._record.backwards if all(one.present))
        found = self._describe(whole)
        assert self._record.split is not None
        arrived = {
            slot
            for (_, value), is_present in zip(self._interface.tangents, present, strict=True)
            if is_present
            for slot in slots_of(value)
        }
        depends = self._record.split.depends
        pairs = zip(found.gradients, depends, strict=True)
        return replace(found, present=present, gradients=tuple(g if d & arrived else None for g, d in pairs))

    def _describe(self, found: BackwardRecord) -> Variant:
        items, gradients = (
            tuple(_item(fact, self._hints) for fact in facts) for facts in (found.items, found.gradients)
        )
        return Variant(found.present, found.sources, items, gradients, self._load(found.graph))

    def _run_another(self, ctx: Any, tangents: tuple[Any, ...]) -> tuple[Any, ...]:
        present = tuple(tangent is not None for tangent in tangents)
        if all(present):
            _refuse_gradients(ctx, tangents)
        return self[present](ctx, *tangents)


def _refuse_gradients(ctx: Any, tangents: tuple[Any, ...]) -> NoReturn:
    got = ", ".join(type(tangent).__name__ for tangent in tangents)
    if torch.is_grad_enabled():
        got += ", to be differentiated again (create_graph=True)"
    raise SignatureError(
        "the gradients", "gradients of the types and layouts of the results, of first order", got
    )


# ----------------------------------------------------------------------------------------- from the records


def _inputs_of(record: ProgramRecord, hints: Sequence[int]) -> Inputs:
    fakes = Fakes(env=None, mode=_NO_MODE, offsets_matter=record.offsets_matter)
    items = {slot: _item(fact, hints) for slot, fact in enumerate(record.facts)}
    values = [with_layouts(value) for value in record.values]
    origins = {slot: Origin(*place) for slot, place in first_paths(values).items()}
    inference = {origins[slot] for slot in record.inference}
    inputs = Inputs(
        fakes,
        values=values,
        fake_items=items,
        origins=origins | {origin.slot: _origin(origin) for origin in record.origins},
        num_arguments=len(record.values),
        is_sealed=True,
        parameters=set(record.parameters_among),
        inference=inference | {Origin(origin.leaf) for origin in inference},
    )
    inputs.flat = Flat([items[slot] for slot in range(len(items))])
    return inputs


_NO_MODE = object()  # a described program is not traced


def _origin(record: OriginRecord) -> Origin:
    return Origin(record.leaf, record.path, record.method, record.dim if record.method else None)


def _item(fact: Fact, hints: Sequence[int]) -> Any:
    if fact is None:
        return None
    if isinstance(fact, TensorFacts):
        size, stride = ([known(extent, hints) for extent in extents] for extents in (fact.size, fact.stride))
        return Described(size, stride, known(fact.offset, hints), fact.dtype, fact.device)
    return known(fact, hints)


def known(extent: Extent, hints: Sequence[int]) -> int:
    """Returns a constant, or the value of an expression in the saved call as an :class:`Unknown`."""
    return extent if isinstance(extent, int) else Unknown(value_of(extent, hints))


def with_layouts(value: Value) -> Any:
    """Returns a value with layouts in place of their records."""
    if not isinstance(value, Wrapper):
        return value
    inner = tuple((name, with_layouts(part)) for name, part in value.inner)
    context = layout_of_record(value.context)
    cls = context.cls if isinstance(context, Layout) else value.cls
    return replace(value, cls=cls, context=context, inner=inner)


def layout_of_record(context: Any) -> Any:
    """Returns the layout of a record; the constant of a handwritten class unchanged."""
    if not isinstance(context, LayoutRecord):
        return context
    nested: tuple[tuple[str, Layout], ...] = tuple(
        (name, layout_of_record(one)) for name, one in context.nested
    )
    try:
        return intern_layout(context.cls, context.statics, context.present, nested, context.cotangent)
    except TypeError as error:
        raise PackageError(f"the manifest has a layout that cannot be: {error}") from error


def _interface_of(record: ProgramRecord, hints: Sequence[int]) -> Interface:
    described = record.outputs
    outputs = Outputs(
        described.num_visible,
        tuple(_view(v) if isinstance(v, StridedView) else with_layouts(v) for v in described.values),
        tuple(_item(fact, hints) for fact in described.items),
        dict(described.inputs),
        described.writes,
        described.stores,
        described.versions,
        described.assigns,
        described.tokens,
    )
    return Interface(
        outputs,
        record.num_forward,
        tuple((number, with_layouts(value)) for number, value in record.tangents),
        tuple(_item(fact, hints) for fact in record.tangent_items),
        tuple((number, None if value is None else with_layouts(value)) for number, value in record.grads),
    )


class _Restrided:
    """Takes a view of a tensor, or of one inside of it: of its size, stride and offset; all of it without them."""

    def __init__(self, record: StridedView) -> None:
        self.record = record

    def __call__(self, base: Any, ints: Sequence[int]) -> Tensor:
        record = self.record
        for name in record.path:
            is_unwrapped = record.is_unwrapped and isinstance(base, TensorSubclass)
            base = unwrap_one(base, name) if is_unwrapped else getattr(base, name)
        if record.view is None:
            return base
        symbols = {symbol: getattr(base, method)(dim) for symbol, method, dim in record.reads}
        sizes, strides, start = record.view
        size, stride = ([value_of(extent, symbols) for extent in extents] for extents in (sizes, strides))
        return base.as_strided(size, stride, base.storage_offset() + value_of(start, symbols))


def _view(view: StridedView) -> View:
    return View(view.of, view.index, _Restrided(view), (), view.detached, view.no_grad)


def _split_of(record: ProgramRecord, hints: Sequence[int]) -> Split | None:
    split = record.split
    if split is None:
        return None
    items: Mapping[str, tuple[Any, ...]] = {
        name: tuple(_item(fact, hints) for fact in getattr(split, name))
        for name in ("forward_outputs", "backward_items", "gradients")
    }
    return Split(
        Graphs(_no_graphs),
        split.num_forward,
        split.backward_inputs,
        split.depends,
        items["forward_outputs"],
        items["backward_items"],
        items["gradients"],
        split.saved_from,
        split.random_op,
    )


def _no_graphs() -> NoReturn:
    raise PackageError("the plain graphs of a package are read with native=False only")
