"""Generates and builds the runtime wrapper of a program from its record; no text of the file becomes code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from desugar.backends.base import CompiledGraph
from desugar.backward.emit import BackwardPlan, Variant, VariantEmitter, variant_name
from desugar.codegen.direct_calls import replace_backward
from desugar.errors import SignatureError
from desugar.ir.abstract_values import Described, Unknown
from desugar.ir.stages import CompiledGraphs, ProgramSpec
from desugar.ir.values import slots_of
from desugar.packages.manifest.expressions import Expression, Extent, Symbol, value_of
from desugar.packages.manifest.records import GraphRecord, ProgramRecord, Restrided, TensorFacts, rebuilt
from desugar.wrapper.run import emit_program
from subclasses.source_text.build import build_functions
from subclasses.source_text.emitter import Emitter

FILE = "<desugar package>"  # the file name of generated text in tracebacks
LoadGraph = Callable[[GraphRecord], CompiledGraph]


@dataclass(eq=False)
class Assembled:
    """A program of a package.

    Attributes:
        run: Runs the program on its inputs, and returns its results.
        source: The text of the functions generated so far.
    """

    run: Callable[..., tuple[Any, ...]]
    source: str


def assemble(record: ProgramRecord, load: LoadGraph) -> Assembled:
    """Builds a program.

    Args:
        record: The program.
        load: Returns the compiled graph of a record.
    """
    spec: ProgramSpec = _described(record.spec, record.hints)
    compiled = CompiledGraphs(spec, _refuse_sharing, load(record.forward))
    out, plan = emit_program(compiled, _refuse_sharing)
    scope, table = out.namespace, None
    if plan is not None:
        table = PackagedBackwards(record, spec, plan, load)
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
        "arguments with the saved storage offsets that do not overlap one that is written to",
        "others; pass clones",
    )


# ------------------------------------------------------------------------------------------------ backwards


class PackagedBackwards(dict[tuple[bool, ...], Callable[..., Any]]):
    """Maps the presence of each gradient to the function of that backward, which is built on first access.

    Attributes:
        assembled: The program.
        function: The autograd function that looks up backwards here.
    """

    assembled: Assembled
    function: Any

    def __init__(self, record: ProgramRecord, spec: ProgramSpec, plan: BackwardPlan, load: LoadGraph) -> None:
        super().__init__()
        self._record, self._spec, self._plan, self._load = record, spec, plan, load

    def __missing__(self, present: tuple[bool, ...]) -> Callable[..., Any]:
        variant, name = self._variant(present), variant_name(present)
        out = Emitter()
        tangents = (f"tangent{number}" for number, _ in self._spec.interface.tangents)
        out.reserve("ctx", "saved", "_", name, *tangents)
        on_mismatch = out.bind(self._run_another if all(present) else _refuse_gradients, "another_backward")
        emitter = VariantEmitter(
            out, self._spec.interface, self._plan, on_mismatch, autocast=False, reads_memory=True
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
        saved = {one.present: one for one in self._record.backwards}
        if present in saved:
            return self._load_variant(saved[present])
        if not self._spec.interface.calls:
            return self._fill(present)
        arrived = [n for n, is_present in enumerate(present) if is_present]
        known = [[n for n, p in enumerate(one) if p] for one in saved]
        raise SignatureError(
            "the gradients",
            f"gradients of results {' or '.join(map(str, known))} (counted among results with one)",
            str(arrived),
        )

    def _fill(self, present: tuple[bool, ...]) -> Variant:
        """Returns a variant that runs the backward for all gradients, with zeros in place of missing gradients."""
        whole = self._load_variant(next(one for one in self._record.backwards if all(one.present)))
        assert self._spec.split is not None
        pairs = zip(self._spec.interface.tangents, present, strict=True)
        arrived = {slot for (_, value), is_present in pairs if is_present for slot in slots_of(value)}
        depends = zip(whole.gradients, self._spec.split.depends, strict=True)
        gradients = tuple(gradient if on & arrived else None for gradient, on in depends)
        return replace(whole, present=present, gradients=gradients)

    def _load_variant(self, record: Variant) -> Variant:
        graph: Any = record.compiled
        return replace(_described(record, self._record.hints), compiled=self._load(graph))

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


def _described(record: Any, hints: Sequence[int]) -> Any:
    """Returns a record with :class:`Described` and :class:`Unknown` in place of facts and symbolic numbers."""

    def known(extent: Extent) -> int:
        return extent if isinstance(extent, int) else Unknown(value_of(extent, hints))

    def change(part: Any) -> Any:
        match part:
            case TensorFacts():
                size, stride = ([known(extent) for extent in extents] for extents in (part.size, part.stride))
                return Described(size, stride, known(part.offset), part.dtype, part.device)
            case Symbol() | Expression():
                return known(part)
            case Restrided():
                return part
        return NotImplemented

    return rebuilt(record, change)
