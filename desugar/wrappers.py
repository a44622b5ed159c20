"""The generated runtime wrapper of one program, and its autograd function.

One function, `run(args, kwargs)`, checks the signature and, straight on, takes the arguments apart, calls the
compiled graph and builds the result. With a backward, the graph is called inside the forward of a generated
`torch.autograd.Function`, which takes the differentiable *outer* tensors as arguments, so that autograd's edges,
hooks and version checks are on what the user holds; the inner tensors travel beside them in a list that
autograd does not look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor

from desugar import _torch as private
from desugar.arguments import Unpacking
from desugar.compilers import CompiledGraph
from desugar.inputs import Inputs
from desugar.partition import FromForward, FromInput, FromTangent, Partitioned
from desugar.results import (
    emit_constant,
    emit_int,
    emit_result,
    emit_value,
    same_leaf,
    zeros_expression,
)
from desugar.runtime import refuse_double_backward, refuse_tangent, restride
from desugar.signature import Names, SignatureEmitter, State, TrustedEmitter
from desugar.trace import Outputs, Traced
from desugar.values import Constant, Plain, Same, Value, Wrapper, paths_of, requires_grad
from subclasses import TensorSubclass
from subclasses.emit import Emitter

# ------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the text of one program is made from."""

    inputs: Inputs
    outputs: Outputs
    traced: Traced
    state: State
    leaves: list[Any]  # the argument leaves that were traced
    unpacking: Unpacking
    forward: CompiledGraph
    partitioned: Partitioned | None = None
    backward: CompiledGraph | None = None
    autocast: bool = False
    trusted: bool = False  # somebody else has checked the signature


def emit_program(parts: Parts) -> Emitter:
    """The text of one program: `run`, and before it the autograd function if there is a backward."""
    out = Emitter()
    out.reserve(
        "run", "args", "kwargs", "items", "kept", "ctx", "Backward", "saved", *_guard_names(parts.inputs)
    )
    if parts.partitioned is not None:
        _FunctionEmitter(out, parts, parts.partitioned).emit()
        out.writeline()
        out.writeline()
    _emit_run(out, parts)
    return out


def _guard_names(inputs: Inputs) -> list[str]:
    return [name for name, _ in inputs.fakes.guarded]


# ------------------------------------------------------------------------------------------------------ run


def _emit_run(out: Emitter, parts: Parts) -> None:
    out.writeline("def run(args, kwargs):")
    with out.indent():
        emitter = TrustedEmitter if parts.trusted else SignatureEmitter
        signature = emitter(out, parts.inputs, parts.state)
        leaf_names = parts.unpacking.emit(out, signature.require)
        names = signature.emit(leaf_names, parts.leaves)
        if parts.partitioned is None:
            _emit_inference(out, parts, names)
        else:
            _emit_training(out, parts, names)


def _items(parts: Parts, names: Names) -> str:
    return "[" + ", ".join(names.slots[slot] for slot in range(len(parts.inputs.flat.items))) + "]"


def _emit_inference(out: Emitter, parts: Parts, names: Names) -> None:
    results = _emit_graph_call(out, parts, _items(parts, names))
    leaves = _emit_results(out, parts, names, results)
    out.writeline(f"return {emit_result(out, parts.outputs.treespec, leaves)}")


def _emit_graph_call(out: Emitter, parts: Parts, items: str, extra: int = 0) -> list[str]:
    """Calls the compiled graph; returns the names of its outputs."""
    results = [out.fresh_name(f"r{n}") for n in range(parts.traced.num_forward + extra)]
    call = f"{out.bind(parts.forward, 'compiled_forward')}({items})"
    target = f"({', '.join(results)},) = " if results else ""
    _emit_call(out, parts, f"{target}{call}")
    return results


def _emit_call(out: Emitter, parts: Parts, line: str) -> None:
    if not parts.autocast:
        out.writeline(line)
        return
    out.writeline(f"with {out.bind(private.DisableAutocast, 'DisableAutocast')}():  # casts are in the graph")
    with out.indent():
        out.writeline(line)


def _emit_results(out: Emitter, parts: Parts, names: Names, results: Sequence[str]) -> list[str]:
    """Writes what builds the results; returns one expression per leaf."""
    outputs = parts.outputs
    positions = {slot: n for n, slot in enumerate(outputs.returned)}

    def read(slot: int) -> str:
        return names.slots[outputs.inputs[slot]] if slot in outputs.inputs else results[positions[slot]]

    leaves: list[str] = []
    for number, value in enumerate(outputs.values):
        if isinstance(value, Same):
            leaves.append(same_leaf(value, names.leaves, leaves))
        else:
            leaves.append(emit_value(out, value, read, f"out{number}"))
    return leaves


def _differentiable_leaves(parts: Parts) -> list[int]:
    """Input leaves that get a gradient."""
    return [number for number, value in parts.traced.grads if value is not None]


def _emit_training(out: Emitter, parts: Parts, names: Names) -> None:
    made = [number for number, value in enumerate(parts.outputs.values) if _from_function(value)]
    targets = {number: out.fresh_name(f"out{number}") for number in made}
    kept = ", ".join(
        names.leaves[leaf] for leaf in range(len(parts.inputs.values)) if _is_tensor(parts, leaf)
    )
    differentiable = ", ".join(names.leaves[leaf] for leaf in _differentiable_leaves(parts))
    call = f"Backward.apply({_items(parts, names)}, ({kept},), {differentiable})"
    target = ", ".join(targets[number] for number in made)
    out.writeline(f"{target} = {call}")
    leaves: list[str] = []
    for number, value in enumerate(parts.outputs.values):
        if isinstance(value, Same):
            leaves.append(same_leaf(value, names.leaves, leaves))
        elif isinstance(value, Constant) and value.index is None:
            leaves.append(emit_constant(out, value.value))
        else:
            leaves.append(targets[number])
    out.writeline(f"return {emit_result(out, parts.outputs.treespec, leaves)}")


def _from_function(value: Value) -> bool:
    """Whether a result leaf comes out of the autograd function."""
    return isinstance(value, Plain | Wrapper) or (isinstance(value, Constant) and value.index is not None)


def _is_tensor(parts: Parts, leaf: int) -> bool:
    return isinstance(parts.inputs.values[leaf], Plain | Wrapper)


# ------------------------------------------------------------------------------------- the autograd function


class _FunctionEmitter:
    """Writes `class Backward(torch.autograd.Function)`."""

    def __init__(self, out: Emitter, parts: Parts, partitioned: Partitioned) -> None:
        self.out, self.parts, self.partitioned = out, parts, partitioned
        self.inputs, self.outputs = parts.inputs, parts.outputs
        self.saved: list[str] = []  # expressions in the forward, of the objects for save_for_backward
        self.reads: dict[Any, str] = {}  # backward input -> expression in the backward
        self.ints: list[str] = []
        self.sizes: list[str] = []
        self.size_reads: dict[int, str] = {}
        self.companions: list[str] = []
        self.companion_reads: dict[int, str] = {}

    def emit(self) -> None:
        function = self.out.bind(torch.autograd.Function, "Function")
        self.out.writeline(f"class Backward({function}):")
        with self.out.indent():
            self._emit_forward()
            self.out.writeline()
            self._emit_backward()

    # ............................................................................................... forward

    def _emit_forward(self) -> None:
        out, parts = self.out, self.parts
        out.writeline("@staticmethod")
        out.writeline("def forward(ctx, items, kept, *differentiable):")
        with out.indent():
            names = self._names_in_forward()
            extra = len(_graph_outputs(self.partitioned)) - parts.traced.num_forward
            results = _emit_graph_call(out, parts, "items", extra)
            leaves = _emit_results(out, parts, names, results)
            self._plan_saving(names, results, leaves)
            out.writeline(f"ctx.save_for_backward({', '.join(self.saved)})")
            for attribute, values in (
                ("ints", self.ints),
                ("sizes", self.sizes),
                ("companions", self.companions),
            ):
                if values:
                    out.writeline(f"ctx.{attribute} = ({', '.join(values)},)")
            out.writeline("ctx.set_materialize_grads(False)")
            plain = [
                leaf
                for leaf, value in zip(leaves, self.outputs.values, strict=True)
                if isinstance(value, Plain | Wrapper) and not value.requires_grad
            ]
            if plain:
                out.writeline(f"ctx.mark_non_differentiable({', '.join(plain)})")
            made = [leaf for leaf, v in zip(leaves, self.outputs.values, strict=True) if _from_function(v)]
            out.writeline(f"return {made[0] if len(made) == 1 else '(' + ', '.join(made) + ')'}")

    def _names_in_forward(self) -> Names:
        """Unpacks what the forward reads besides handing it to the graph."""
        out = self.out
        tensors = [leaf for leaf in range(len(self.inputs.values)) if _is_tensor(self.parts, leaf)]
        leaves = {leaf: out.fresh_name(f"x{leaf}") for leaf in tensors}
        slots = {slot: out.fresh_name(f"i{slot}") for slot in range(len(self.inputs.flat.items))}
        out.writeline(f"({', '.join(leaves.values())},) = kept")
        out.writeline(f"({', '.join(slots.values())},) = items")
        return Names([leaves.get(n, "None") for n in range(len(self.inputs.values))], slots)

    def _plan_saving(self, names: Names, results: Sequence[str], leaves: Sequence[str]) -> None:
        """Decides for each backward input what object is saved and how the backward reads it."""
        input_paths = _first_paths(self.inputs.values)
        output_paths = _first_paths(self.outputs.values)
        returned = self.outputs.returned
        for source in self.partitioned.backward_inputs:
            match source:
                case FromInput(index) if isinstance(self.inputs.fake_items[index], Tensor):
                    leaf, path = input_paths[index]
                    self._save(source, names.leaves[leaf], path)
                case FromInput(index):
                    self._save_int(source, names.slots[index])
                case FromForward(index) if (
                    index < self.parts.traced.num_forward and returned[index] in output_paths
                ):
                    leaf, path = output_paths[returned[index]]
                    self._save(source, leaves[leaf], path)
                case FromForward(index):
                    fake = _graph_outputs(self.partitioned)[index].meta["val"]
                    if isinstance(fake, Tensor):
                        self._save(source, results[index], ())
                    else:
                        self._save_int(source, results[index])
                case FromTangent():
                    pass
        self._plan_tangents(leaves)

    def _plan_tangents(self, leaves: Sequence[str]) -> None:
        for number, value in self.parts.traced.tangents:
            companions = list(_companions(value))
            for _, path in companions:
                self.companion_reads[len(self.companions)] = f"ctx.companions[{len(self.companions)}]"
                self.companions.append(".".join([leaves[number], *path]))
        if len(self.parts.traced.tangents) > 1:
            for number, value in self.parts.traced.tangents:
                for slot, path in paths_of(value):
                    fake = self.parts.traced.tangent_items[slot]
                    if any(isinstance(extent, SymInt) for extent in fake.size()):
                        self.size_reads[slot] = f"ctx.sizes[{len(self.sizes)}]"
                        self.sizes.append(".".join([leaves[number], *path]) + ".size()")

    def _save(self, source: Any, obj: str, path: Sequence[str]) -> None:
        if obj not in self.saved:
            self.saved.append(obj)
        self.reads[source] = ".".join([f"saved[{self.saved.index(obj)}]", *path])

    def _save_int(self, source: Any, text: str) -> None:
        self.reads[source] = f"ctx.ints[{len(self.ints)}]"
        self.ints.append(text)

    # .............................................................................................. backward

    def _emit_backward(self) -> None:
        out, traced = self.out, self.parts.traced
        tangents = {number: out.fresh_name(f"tangent{number}") for number, _ in traced.tangents}
        parameters = []
        for number, value in enumerate(self.outputs.values):
            if _from_function(value):
                parameters.append(tangents.get(number) or out.fresh_name("_unused"))
        out.writeline("@staticmethod")
        out.writeline(f"def backward(ctx, {', '.join(parameters)}):")
        with out.indent():
            out.writeline(f"if {out.bind(torch.is_grad_enabled, 'is_grad_enabled')}():")
            with out.indent():
                out.writeline(f"{out.bind(refuse_double_backward, 'refuse_double_backward')}()")
            arrived = self._emit_arrived(tangents)
            items = self._emit_tangents(tangents)
            self._emit_gradients(items, arrived)

    def _emit_arrived(self, tangents: dict[int, str]) -> dict[int, str] | None:
        """Notes which tangents are there, where a gradient may depend on fewer than all; slot -> flag."""
        if len(tangents) == 1:
            return None
        flags: dict[int, str] = {}
        for number, value in self.parts.traced.tangents:
            flag = self.out.fresh_name(f"arrived{number}")
            self.out.writeline(f"{flag} = {tangents[number]} is not None")
            for slot, _ in paths_of(value):
                flags[slot] = flag
        return flags

    def _emit_tangents(self, tangents: dict[int, str]) -> dict[int, str]:
        """Takes the tangents apart; slot -> name."""
        items: dict[int, str] = {}
        alone = len(tangents) == 1
        companions = iter(range(len(self.companions)))
        for number, value in self.parts.traced.tangents:
            name = tangents[number]
            if alone:
                self.out.writeline(f"if {name} is None:")
                with self.out.indent():
                    nones = ", ".join(["None"] * (2 + len(_differentiable_leaves(self.parts))))
                    self.out.writeline(f"return {nones}")
                self._emit_tangent(name, value, items, companions)
                continue
            for slot, _ in paths_of(value):
                items[slot] = self.out.fresh_name(f"g{slot}")
            self.out.writeline(f"if {name} is None:")
            with self.out.indent():
                for slot, _ in paths_of(value):
                    fake = self.parts.traced.tangent_items[slot]
                    size = self.size_reads.get(slot) or repr(tuple(fake.size()))
                    self.out.writeline(f"{items[slot]} = {zeros_expression(self.out, fake, size)}")
            self.out.writeline("else:")
            with self.out.indent():
                self._emit_tangent(name, value, items, companions)
        return items

    def _emit_tangent(self, name: str, value: Value, items: dict[int, str], companions: Any) -> None:
        """Checks that a tangent is what was traced and names its differentiable plain tensors."""
        out = self.out
        refuse = out.bind(refuse_tangent, "refuse_tangent")
        match value:
            case Plain(index):
                target = items.setdefault(index, out.fresh_name(f"g{index}"))
                kind = out.bind(Tensor, "Tensor")
                out.writeline(f"if type({name}) is not {kind} and not {refuse}({name}, {kind}):")
                with out.indent():
                    out.writeline("pass")
                self._emit_restride(target, name, self.parts.traced.tangent_items[index])
            case Constant():
                companion = self.companion_reads[next(companions)]
                equal = out.bind(torch.equal, "equal")
                out.writeline(f"if {name} is not {companion} and not {equal}({name}, {companion}):")
                with out.indent():
                    out.writeline(f"{refuse}({name}, {companion})")
            case Wrapper():
                self._emit_wrapper_tangent(name, value, items, companions)

    def _emit_wrapper_tangent(
        self, name: str, value: Wrapper, items: dict[int, str], companions: Any
    ) -> None:
        out = self.out
        refuse, cls = out.bind(refuse_tangent, "refuse_tangent"), out.bind(value.cls, value.cls.__name__)
        if issubclass(value.cls, TensorSubclass):
            wrong = f"type({name}) is not {cls} or {name}._layout is not {out.bind(value.context, 'layout')}"
        else:
            flat = repr(list(inner for inner, _ in value.inner)), emit_constant(out, value.context)
            wrong = (
                f"type({name}) is not {cls} or tuple({name}.__tensor_flatten__()) != ({flat[0]}, {flat[1]})"
            )
        out.writeline(f"if {wrong}:")
        with out.indent():
            out.writeline(f"{refuse}({name}, {cls})")
        for inner, part in value.inner:
            inner_name = out.fresh_name(f"{name}_{inner}")
            out.writeline(f"{inner_name} = {name}.{inner}")
            self._emit_tangent(inner_name, part, items, companions)

    def _emit_restride(self, target: str, name: str, fake: Tensor) -> None:
        order = stride_order(fake)
        if order == tuple(range(fake.dim())):
            self.out.writeline(f"{target} = {name} if {name}.is_contiguous() else {name}.contiguous()")
        else:
            self.out.writeline(f"{target} = {self.out.bind(restride, 'restride')}({name}, {order})")

    def _emit_gradients(self, items: dict[int, str], arrived: dict[int, str] | None) -> None:
        out, parts = self.out, self.parts
        out.writeline("saved = ctx.saved_tensors")
        arguments = [
            items[source.index] if isinstance(source, FromTangent) else self.reads[source]
            for source in self.partitioned.backward_inputs
        ]
        gradients = [out.fresh_name(f"grad{n}") for n in range(len(self.partitioned.depends))]
        assert parts.backward is not None
        call = f"{out.bind(parts.backward, 'compiled_backward')}([{', '.join(arguments)}])"
        _emit_call(out, parts, f"({', '.join(gradients)},) = {call}")
        returned = ["None", "None"]
        for number, value in parts.traced.grads:
            if value is None:
                continue
            leaf = emit_value(out, value, lambda slot: gradients[slot], f"d{number}")
            needs = frozenset().union(*(self.partitioned.depends[slot] for slot, _ in paths_of(value)))
            if arrived is not None and needs:
                flags = sorted({arrived[slot] for slot in needs})
                leaf = f"{leaf} if {' or '.join(flags)} else None"
            returned.append(leaf)
        out.writeline(f"return {', '.join(returned)}")


# ------------------------------------------------------------------------------------------------- helpers


def _graph_outputs(partitioned: Partitioned) -> list[Any]:
    from desugar.partition import output_nodes

    return output_nodes(partitioned.forward)


def _first_paths(values: Sequence[Value]) -> dict[int, tuple[int, tuple[str, ...]]]:
    """Slot -> (leaf, attribute path) of its first occurrence."""
    found: dict[int, tuple[int, tuple[str, ...]]] = {}
    for leaf, value in enumerate(values):
        for slot, path in paths_of(value):
            found.setdefault(slot, (leaf, path))
    return found


def _companions(value: Value, path: tuple[str, ...] = ()) -> Any:
    """(value, path) of the non-differentiable inner tensors that a tangent shares with its output."""
    match value:
        case Constant():
            yield value, path
        case Wrapper(inner=inner):
            for name, part in inner:
                yield from _companions(part, (*path, name))
        case _:
            return


def stride_order(fake: Tensor) -> tuple[int, ...]:
    """Dimensions from the largest stride to the smallest."""
    hints = [extent.node.hint if isinstance(extent, SymInt) else extent for extent in fake.stride()]
    return tuple(sorted(range(fake.dim()), key=lambda dim: -hints[dim]))


__all__ = ["Parts", "emit_int", "emit_program", "requires_grad"]
