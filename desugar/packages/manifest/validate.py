"""Checks what the types of a manifest do not say: that numbers refer to things that exist, and names are names."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from desugar.errors import PackageError
from desugar.ir.calling import Argument, Passed
from desugar.ir.stages import FromForward, FromInput, FromTangent
from desugar.ir.values import Constant, Plain, Same, Slot, Wrapper, slots_of
from desugar.packages.manifest.expressions import Expression, Symbol, check_extent, symbols_in
from desugar.packages.manifest.records import (
    FromLeaf,
    FromSize,
    FromWeight,
    GraphRecord,
    LayoutRecord,
    Manifest,
    ProgramRecord,
    Result,
    SameLeaf,
    StridedView,
    TensorFacts,
    WrapperLeaf,
)
from desugar.packages.manifest.structure import check_tree, paths_of
from subclasses import TensorSubclass
from subclasses.errors import one_of


def check_manifest(manifest: Manifest) -> None:
    """Raises `PackageError` for a manifest that describes no programs."""
    _need(bool(manifest.programs), "it has no programs")
    _need(len({w.name for w in manifest.weights}) == len(manifest.weights), "two weights have one name")
    for weight in manifest.weights:
        _check_shapes(weight, 0)
    for program in manifest.programs:
        _need(program.parameters == manifest.programs[0].parameters, "its programs have different parameters")
        _check_shapes(program, len(program.symbols))
        _check_call(program, len(manifest.weights))
        _check_slots(program)
        _check_graphs(program)


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise PackageError(f"the manifest of this package is damaged: {problem}")


# --------------------------------------------------------------------------------------------- all records


def _check_shapes(record: Any, num_symbols: int) -> None:
    """Checks each part of a record that can be checked by itself."""
    for part in _parts(record):
        match part:
            case Symbol() | Expression():
                check_extent(part, num_symbols)
            case TensorFacts():
                _need(len(part.size) == len(part.stride), "a tensor has more sizes than strides, or fewer")
                numbers = [n for n in (*part.size, *part.stride, part.offset) if isinstance(n, int)]
                _need(all(0 <= n < 2**62 for n in numbers), "a tensor has an impossible size")
            case LayoutRecord():
                _check_layout(part)
            case WrapperLeaf() | Wrapper():
                _check_wrapper(part)


def _parts(record: Any) -> list[Any]:
    """Returns a record and the records in it, but not those inside of expressions."""
    found, rest = [], [record]
    while rest:
        part = rest.pop()
        if isinstance(part, tuple | list):
            rest.extend(part)
        elif (names := _fields(type(part))) is not None:
            found.append(part)
            rest.extend([getattr(part, name) for name in names])
    return found


@functools.cache
def _fields(cls: type) -> tuple[str, ...] | None:
    """Returns the names of a record's fields; None for what is no record."""
    fields = getattr(cls, "__dataclass_fields__", None)
    return () if cls is Expression else None if fields is None else tuple(fields)


def _check_layout(layout: LayoutRecord) -> None:
    spec = getattr(layout.cls, "__spec__", None)
    _need(spec is not None, f"it has a layout of {layout.cls.__name__}, which is no declared class")
    required = [field.attribute for field in spec.inners if not field.optional]  # type: ignore[union-attr]
    known = [field.attribute for field in spec.inners]  # type: ignore[union-attr]
    in_order = [name for name in known if name in layout.present]
    _need(list(layout.present) == in_order and set(required) <= set(in_order), "a layout lacks inner tensors")
    _need(len(layout.statics) == len(spec.statics), "a layout has other metadata than its class")  # type: ignore[union-attr]
    _need({name for name, _ in layout.nested} <= set(in_order), "a layout nests what is no inner tensor")


def _check_wrapper(wrapper: WrapperLeaf | Wrapper) -> None:
    names, cls = tuple(name for name, _ in wrapper.inner), wrapper.cls
    if issubclass(cls, TensorSubclass):
        _need(isinstance(wrapper.context, LayoutRecord), f"{one_of(cls)} has no layout")
        _need(wrapper.context.cls is cls, f"{one_of(cls)} has the layout of another class")
        _need(names == wrapper.context.present, f"{one_of(cls)} has other inner tensors than its layout")
        dynamics = tuple(field.name for field in cls.__spec__.dynamics)
        _need(
            tuple(n for n, _ in wrapper.dynamics) == dynamics,
            f"{one_of(cls)} has other ints than its class",
        )
    else:
        _need(not isinstance(wrapper.context, LayoutRecord), f"{cls.__name__} is no declared class")
        _check_names(names)


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        _need(name.isidentifier() and not name.startswith("__"), f"{name!r} is no name of an inner tensor")


# --------------------------------------------------------------------------------------------------- calls


def _check_call(program: ProgramRecord, num_weights: int) -> None:
    known = [parameter.name for parameter in program.parameters]
    passed = [name for name, _ in program.arguments]
    _need(len(set(passed)) == len(passed) and set(passed) <= set(known), "arguments are of no parameter")
    for _, tree in program.arguments:
        check_tree(tree, len(program.leaves))
    check_tree(program.result, len(program.results))
    _check_each_leaf_once(program)
    for number, leaf in enumerate(program.leaves):
        if isinstance(leaf, SameLeaf):
            _need(0 <= leaf.index < number, "a leaf is the same as a later one")
    for source in program.sources:
        _check_source(source, program, num_weights)
    for result in program.results:
        if isinstance(result, Result):
            _need(0 <= result.index < program.outputs.num_visible, "a result is none of the program's")
        _check_source(result, program, 0)
    for symbol in program.symbols:
        _need(symbol.low is None or symbol.low <= symbol.hint, "a size is impossible")
        _need(symbol.high is None or symbol.hint <= symbol.high, "a size is impossible")


def _check_each_leaf_once(program: ProgramRecord) -> None:
    found = [index for name, tree in program.arguments for index, _ in paths_of(tree, name)]
    _need(sorted(found) == list(range(len(program.leaves))), "a leaf is in no argument, or in two")


def _check_source(source: Any, program: ProgramRecord, num_weights: int) -> None:
    match source:
        case FromLeaf(index, path) | FromSize(index, path):
            _need(0 <= index < len(program.leaves), "an input is of no argument")
            leaf: Any = program.leaves[index]
            for name in path:
                inner = dict((*leaf.inner, *leaf.dynamics)) if isinstance(leaf, WrapperLeaf) else {}
                _need(name in inner, f"an input reads {name!r} of an argument that has no such inner tensor")
                leaf = inner[name]
            if isinstance(source, FromSize):
                _need(source.method in ("size", "stride") and 0 <= source.dim < 64, "an input is no size")
        case FromWeight(index):
            _need(0 <= index < num_weights, "an input is no weight")


# --------------------------------------------------------------------------------------------------- slots


def _check_slots(program: ProgramRecord) -> None:
    num_inputs, num_slots = len(program.values), len(program.facts)
    _need(len(program.sources) == num_inputs, "its inputs are not those of its arguments")
    _need(all(0 <= n < num_inputs for n in program.parameters_among), "a parameter is no input")
    _check_values(program.values, num_inputs, num_inputs, num_slots)
    for origin in program.origins:
        _need(0 <= origin.slot < num_slots and 0 <= origin.leaf < num_inputs, "an int is read from no input")
        _need(
            origin.method in ("", "size", "stride") and 0 <= origin.dim < 64, "an int is read in no known way"
        )
        _check_path(program.values[origin.leaf], origin.path, is_size=bool(origin.method))
    outputs, items = program.outputs, len(program.outputs.items)
    _need(0 <= outputs.num_visible <= len(outputs.values), "it has fewer results than it says")
    _check_values(outputs.values, num_inputs, len(outputs.values), items)
    slots = [*((a, b) for a, b in outputs.inputs), *((value, slot) for slot, value in outputs.stores)]
    _need(all(0 <= a < items and 0 <= b < num_slots for a, b in slots), "a result is no slot")
    _need(all(0 <= slot < items for slot in outputs.tokens), "a token is no result")
    for value in outputs.values:
        if isinstance(value, StridedView):
            _check_view(value, program)
    for leaf, number in outputs.writes:
        _need(0 <= leaf < num_inputs and 0 <= number < len(outputs.values), "a write has no argument")
    for leaf, path, _ in outputs.versions:
        _need(0 <= leaf < num_inputs, "a write has no argument")
        _check_path(program.values[leaf], path, is_size=True)
    for leaf, name, number in outputs.assigns:
        _need(0 <= leaf < num_inputs and 0 <= number < len(outputs.values), "an assignment has no argument")
        _check_path(program.values[leaf], (name,), is_size=True)
    _check_gradients(program)


def _check_values(values: Iterable[Any], num_inputs: int, num_outputs: int, num_slots: int) -> None:
    for value in values:
        for part in _parts(value):
            match part:
                case Plain(index) | Constant(_, int(index)) | Slot(index):
                    _need(0 <= index < num_slots, "a value has no slot")
                case Same(of, index) | StridedView(of, index):
                    count = {"input": num_inputs, "output": num_outputs}.get(of, 0)
                    _need(0 <= index < count, "a value refers to no other")


def _check_view(value: StridedView, program: ProgramRecord) -> None:
    if value.path:
        _need(value.of == "input", "a result is a view of a tensor inside of another result")
        _check_path(program.values[value.index], value.path, is_size=True)
    known = {symbol for symbol, _, _ in value.reads}
    places = [(method, dim) for _, method, dim in value.reads]
    _need(all(m in ("size", "stride") and 0 <= dim < 64 for m, dim in places), "a view reads what is no size")
    sizes, strides, start = value.view or ((), (), 0)
    needed = set().union(*map(symbols_in, (*sizes, *strides, start)))
    _need(needed <= known and len(sizes) == len(strides), "a view has a size that it does not read")


def _check_path(value: Any, path: tuple[str, ...], *, is_size: bool) -> None:
    for position, name in enumerate(path):
        inner = dict(value.inner) if isinstance(value, Wrapper) else {}
        dynamics = dict(value.dynamics) if isinstance(value, Wrapper) else {}
        is_last_int = not is_size and position == len(path) - 1 and name in dynamics
        _need(name in inner or is_last_int, f"{name!r} is no inner tensor of an argument")
        value = inner.get(name)


def _check_gradients(program: ProgramRecord) -> None:
    num_tangents, num_inputs = len(program.tangent_items), len(program.values)
    for number, value in program.tangents:
        _need(0 <= number < len(program.outputs.values), "a gradient is of no result")
        _need(all(0 <= slot < num_tangents for slot in slots_of(value)), "a gradient has no slot")
    _need(bool(program.tangents) == (program.split is not None), "it has a backward without gradients")
    if program.split is None:
        _need(not program.backwards and not program.grads, "it has a backward in inference")
        return
    gradients = len(program.split.gradients)
    for number, value in program.grads:
        _need(0 <= number < num_inputs, "a gradient is of no argument")
        _check_values([] if value is None else [value], num_inputs, 0, gradients)
    _check_sources(program, program.split.backward_inputs)
    _need(len(program.split.depends) == gradients, "a gradient depends on nothing that is known")
    _need(any(all(one.present) for one in program.backwards), "it has no backward for all gradients")
    for backward in program.backwards:
        _need(len(backward.present) == len(program.tangents), "a backward is for other results")
        _need(len(backward.sources) == len(backward.items), "a backward has other inputs than it says")
        _need(len(backward.gradients) == gradients, "a backward has other gradients than the program")
        _check_sources(program, backward.sources)


def _check_sources(program: ProgramRecord, sources: Iterable[Any]) -> None:
    assert program.split is not None
    counts = {
        FromInput: len(program.facts),
        FromForward: len(program.split.forward_outputs),
        FromTangent: len(program.tangent_items),
    }
    _need(all(0 <= source.index < counts[type(source)] for source in sources), "a backward reads nothing")


# -------------------------------------------------------------------------------------------------- graphs


def _check_graphs(program: ProgramRecord) -> None:
    returned = len(program.outputs.items) - len(program.outputs.inputs)
    outputs = returned if program.split is None else len(program.split.forward_outputs)
    _check_graph(program.forward, len(program.facts), outputs)
    _need(program.split is not None or program.num_forward == returned, "the forward has other results")
    for backward in program.backwards:
        _check_graph(backward.graph, len(backward.sources), len(backward.gradients))


def _check_graph(graph: GraphRecord, num_inputs: int, num_outputs: int) -> None:
    _need(graph.name.replace("_", "").isalnum(), f"{graph.name!r} is no name of a graph")
    _need(len(graph.calling.outputs) == num_outputs, f"{graph.name} has other results than its program")
    indices = [a.index for a in graph.calling.arguments if isinstance(a, Argument)]
    indices += [o.index for o in graph.calling.outputs if isinstance(o, Passed)]
    _need(all(0 <= index < num_inputs for index in indices), f"{graph.name} takes what is no input")
