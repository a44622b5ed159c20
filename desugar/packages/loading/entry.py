"""Writes the entry of a package: a function with the parameters of the saved one, which checks a call and runs it.

The check of a call is one C++ call for all plain tensors, an identity test for each layout, and the conditions that the
program's sizes have to meet. A call that passes runs its program; all others are looked at one by one
(:mod:`desugar.packages.loading.checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as private
from desugar.codegen.build_values import emit_constant
from desugar.codegen.text import tuple_of
from desugar.packages.loading.assemble import FILE, Assembled, layout_of_record
from desugar.packages.loading.guards import Guards, WeightGuards, are_distinct
from desugar.packages.manifest.expressions import Extent, Symbol, text_of
from desugar.packages.manifest.records import (
    ConstantLeaf,
    FromLeaf,
    FromNumber,
    FromSize,
    FromWeight,
    IntLeaf,
    LayoutRecord,
    Leaf,
    LeafOf,
    Left,
    Node,
    Parameter,
    ProgramRecord,
    Result,
    SameLeaf,
    TensorFacts,
    TensorLeaf,
    Tree,
    UnusedLeaf,
    WrapperLeaf,
)
from desugar.packages.manifest.structure import BUILTIN, build, part_names, registered_parts
from subclasses.codegen.build import build_functions
from subclasses.codegen.emitter import Emitter


@dataclass(frozen=True, slots=True)
class Callee:
    """A program, as the entry calls it.

    Attributes:
        record: The program.
        assembled: Its function.
        guards: The check of its plain tensors.
        weights: The weights of the package, and the check of them.
        reads_grad_mode: Whether a weight requires grad that the program does not differentiate.
    """

    record: ProgramRecord
    assembled: Assembled
    guards: Guards
    weights: WeightGuards
    reads_grad_mode: bool


# ---------------------------------------------------------------------------------------------------- text


def build_entry(
    parameters: Sequence[Parameter], callees: Sequence[Callee], otherwise: Callable[..., Any]
) -> tuple[Callable[..., Any], str]:
    """Builds the function of a package, and one for each program.

    Args:
        parameters: The parameters of the saved function.
        callees: The programs.
        otherwise: Takes all calls that do not pass the entry's check, with the arguments by name.

    Returns:
        The function, and its text.
    """
    out = Emitter()
    out.reserve("call", *(parameter.name for parameter in parameters))
    out.writeline(f"def call({_parameters(out, parameters)}):")
    with out.indent():
        for callee in callees:
            _Text(out, callee).emit()
        passed = ", ".join(parameter.name for parameter in parameters)
        out.writeline(f"return {out.bind(otherwise, 'otherwise')}({passed})")
    return build_functions(out.source, out.namespace, filename=FILE)["call"], out.source


def build_runner(callee: Callee) -> Callable[..., Any]:
    """Builds the function that runs a program on the leaves of a call that is known to fit."""
    out = Emitter()
    leaves = [out.fresh_name(f"x{n}") for n in range(len(callee.record.leaves))]
    out.reserve("run_leaves")
    out.writeline(f"def run_leaves({', '.join(leaves)}):")
    with out.indent():
        _Text(out, callee).emit_run(leaves)
    return build_functions(out.source, out.namespace, filename=FILE)["run_leaves"]


def _parameters(out: Emitter, parameters: Sequence[Parameter]) -> str:
    texts: list[str] = []
    for position, parameter in enumerate(parameters):
        if parameter.kind == "keyword" and not any(text.startswith("*") for text in texts):
            texts.append("*")
        prefix = {"rest": "*", "keywords": "**"}.get(parameter.kind, "")
        default = f"={_default(out, parameter)}" if parameter.is_optional else ""
        texts.append(f"{prefix}{parameter.name}{default}")
        following = parameters[position + 1].kind if position + 1 < len(parameters) else ""
        if parameter.kind == "positional" and following != "positional":
            texts.append("/")
    return ", ".join(texts)


def _default(out: Emitter, parameter: Parameter) -> str:
    if isinstance(parameter.default, Left):
        return out.bind(LEFT, "left_out")
    return emit_constant(out, parameter.default)


LEFT = type("LeftOut", (), {"__repr__": lambda self: "nothing"})()  # stands for an argument that was left out


class _Text:
    """Writes the check and the call of one program."""

    def __init__(self, out: Emitter, callee: Callee) -> None:
        self.out, self.callee, self.record = out, callee, callee.record
        self._conditions: list[str] = []
        self._plain: list[str] = []
        self._reads: dict[int, str] = {}
        self._equal: list[tuple[Extent, str]] = []
        self._read_already: dict[str, str] = {}  # expression of a size -> the name that holds it
        # A parameter may be called as a function of Python is.
        self._type, self._len = out.bind(type, "type"), out.bind(len, "len")

    def emit(self) -> None:
        """Writes `if <the arguments fit>: return <the result>`."""
        out, record = self.out, self.record
        leaves: list[str] = [""] * len(record.leaves)
        passed = dict(record.arguments)
        for parameter in record.parameters:
            if parameter.name in passed:
                self._open(passed[parameter.name], parameter.name, leaves)
            elif parameter.is_optional:
                self._conditions.append(self._is_default(parameter))
            else:
                self._conditions.append(f"not {parameter.name}")  # *args or **kwargs
        for number, leaf in enumerate(record.leaves):
            self._check(leaf, leaves[number], leaves)
        leaves_of = zip(leaves, record.leaves, strict=True)
        self._check_distinct([name for name, leaf in leaves_of if isinstance(leaf, TensorLeaf | WrapperLeaf)])
        if self._plain:
            plain, guards = ", ".join(self._plain), self.callee.guards
            check = f"{out.bind(guards.check.check, 'same_tensors')}({plain})"
            others = f"{out.bind(guards.check_others, 'other_tensors')}({plain})"
            self._conditions.append(f"({check} or {others})")
        self._check_state()
        out.writeline(f"if {' and '.join(self._conditions)}:")
        with out.indent():
            sizes = self._emit_sizes()
            if sizes:
                out.writeline(f"if {' and '.join(sizes)}:")
                with out.indent():
                    self.emit_run(leaves)
            else:
                self.emit_run(leaves)

    def _is_default(self, parameter: Parameter) -> str:
        if isinstance(parameter.default, Left):
            return f"{parameter.name} is {self.out.bind(LEFT, 'left_out')}"
        return self._equals(parameter.name, parameter.default)

    def _equals(self, name: str, constant: object) -> str:
        if constant is None or isinstance(constant, bool):
            return f"{name} is {constant!r}"
        kind = self.out.bind(type(constant), type(constant).__name__)
        if isinstance(constant, float) and (
            constant == 0 or constant != constant
        ):  # -0.0 == 0.0, and nan != nan
            return f"{self._type}({name}) is {kind} and {self.out.bind(repr, 'repr')}({name}) == {repr(constant)!r}"
        return f"{self._type}({name}) is {kind} and {name} == {emit_constant(self.out, constant)}"

    def _check_distinct(self, tensors: Sequence[str]) -> None:
        if len(tensors) == 2:
            self._conditions.append(f"{tensors[0]} is not {tensors[1]}")
        elif len(tensors) > 2:
            self._conditions.append(f"{self.out.bind(are_distinct, 'are_distinct')}({', '.join(tensors)})")

    def _check_state(self) -> None:
        """Adds the conditions on what is no argument: weights, autocast, and the mode of gradients."""
        out, callee = self.out, self.callee
        if callee.weights.weights:
            self._conditions.append(self._same_weights(callee.weights))
        self._conditions.append(
            f"not {out.bind(private.is_any_autocast_enabled, 'is_any_autocast_enabled')}()"
        )
        if callee.reads_grad_mode:
            self._conditions.append(f"not {out.bind(torch.is_grad_enabled, 'is_grad_enabled')}()")

    def _same_weights(self, guards: WeightGuards) -> str:
        out = self.out
        inner = [f", {out.bind(guards.weights[number], 'weight')}.{path}" for number, path in guards.inner]
        check = f"{out.bind(guards.check, 'same_weights')}(*{out.bind(guards.weights, 'weights')}{''.join(inner)})"
        handed_out = out.bind(guards.handed_out, "handed_out")
        return f"(not {handed_out} or {check} or {out.bind(guards.check_others, 'other_weights')}())"

    def _open(self, tree: Tree, name: str, leaves: list[str]) -> None:
        """Adds the conditions of a structure, and the expressions of its leaves."""
        out = self.out
        if isinstance(tree, LeafOf):
            leaves[tree.index] = name
            return
        if tree.kind == "registered":
            parts = out.fresh_name("parts")
            read, cls, keys = (
                out.bind(_take_apart, "take_apart"),
                out.bind(tree.cls, "cls"),
                out.bind(tree.keys, "keys"),
            )
            count = len(tree.children)
            self._conditions.append(f"({parts} := {read}({name}, {cls}, {keys}, {count})) is not None")
            for position, child in enumerate(tree.children):
                self._open(child, f"{parts}[{position}]", leaves)
            return
        cls = tree.cls or BUILTIN[tree.kind]
        self._conditions.append(f"{self._type}({name}) is {out.bind(cls, tree.kind)}")
        if tree.kind == "keywords":
            self._conditions.append(f"{name}.keys() == {out.bind(frozenset(tree.keys), 'keys')}")
        elif tree.kind == "dict":
            self._conditions.append(f"(*{name},) == {out.bind(tree.keys, 'keys')}")
        else:
            self._conditions.append(f"{self._len}({name}) == {len(tree.children)}")
        for key, child in zip(part_names(tree), tree.children, strict=True):
            self._open(child, f"{name}[{key!r}]", leaves)

    def _check(self, leaf: Leaf, name: str, leaves: Sequence[str]) -> None:
        out = self.out
        match leaf:
            case TensorLeaf() | WrapperLeaf():
                self._check_tensor(leaf, name)
            case IntLeaf(extent):
                self._conditions.append(f"{self._type}({name}) is int")
                self._read(extent, name)
            case ConstantLeaf(constant):
                self._conditions.append(self._equals(name, constant))
            case SameLeaf(index):
                self._conditions.append(f"{name} is {leaves[index]}")
            case UnusedLeaf():
                self._conditions.append(
                    f"{out.bind(isinstance, 'isinstance')}({name}, {out.bind(Tensor, 'Tensor')})"
                )

    def _check_tensor(self, leaf: TensorLeaf | WrapperLeaf, name: str) -> None:
        if isinstance(leaf, TensorLeaf):
            self._plain.append(name)
            self._read_facts(leaf.facts, name)
            return
        out, cls = self.out, self.out.bind(leaf.cls, leaf.cls.__name__)
        self._conditions.append(f"{self._type}({name}) is {cls}")
        expected = out.bind(layout_of_record(leaf.context), "layout")
        if isinstance(leaf.context, LayoutRecord):
            self._conditions.append(f"{name}._layout is {expected}")
        else:
            names = tuple(attribute for attribute, _ in leaf.inner)
            self._conditions.append(f"{name}.__tensor_flatten__() == ({list(names)!r}, {expected})")
            # That of a declared class follows from its layout and its inner tensors.
            self._conditions.append(f"{name}.dtype is {out.bind(leaf.dtype, str(leaf.dtype)[6:])}")
        if leaf.requires_grad:
            self._conditions.append(f"{name}.requires_grad")
        else:
            self._conditions.append(f"not {name}.requires_grad")
        for dim, extent in enumerate(leaf.size):
            if isinstance(extent, Symbol) or not isinstance(leaf.context, LayoutRecord):
                self._read(extent, f"{name}.size({dim})")  # a declared class computes the others from these
        for dynamic, extent in leaf.dynamics:
            self._read(extent, f"{name}.{dynamic}")
        for attribute, part in leaf.inner:
            inner = out.fresh_name(attribute.strip("_"))
            self._conditions.append(f"({inner} := {name}.{attribute}) is not None")
            self._check_tensor(part, inner)

    # .................................................................................................. sizes

    def _read_facts(self, facts: TensorFacts, name: str) -> None:
        for method, extents in (("size", facts.size), ("stride", facts.stride)):
            for dim, extent in enumerate(extents):
                if not isinstance(extent, int):
                    self._read(extent, f"{name}.{method}({dim})")

    def _read(self, extent: Extent, text: str) -> None:
        if isinstance(extent, Symbol) and extent.index not in self._reads:
            self._reads[extent.index] = text
        else:
            self._equal.append((extent, text))

    def _emit_sizes(self) -> list[str]:
        """Writes the lines that read sizes; returns the conditions on them."""
        names = {index: self.out.fresh_name(f"s{index}") for index in self._reads}
        for index, text in self._reads.items():
            self.out.writeline(f"{names[index]} = {text}")
            self._read_already[text] = names[index]
        conditions = []
        for index, symbol in enumerate(self.record.symbols):
            if symbol.low is not None and (symbol.low > 0 or not self._is_size(index)):
                conditions.append(f"{names[index]} >= {symbol.low}")
            if symbol.high is not None:
                conditions.append(f"{names[index]} <= {symbol.high}")
        conditions += [text_of(guard, names.__getitem__) for guard in self.record.guards]
        known: set[tuple[Extent, str]] = set()
        for extent, text in self._equal:
            if (extent, text) not in known:
                known.add((extent, text))
                conditions.append(f"{text} == {text_of(extent, names.__getitem__)}")
        return conditions

    def _is_size(self, index: int) -> bool:
        """Whether a symbol is a size or stride, which is never negative."""
        return "(" in self._reads[index]

    # ................................................................................................ running

    def emit_run(self, leaves: Sequence[str]) -> None:
        """Writes the call of the program and the return of its result."""
        out, record = self.out, self.record
        inputs = ", ".join(self._input(source, leaves) for source in record.sources)
        call = f"{out.bind(self.callee.assembled.run, 'run')}({inputs})"
        is_one = isinstance(record.result, LeafOf) and record.outputs.num_visible == 1
        if is_one and record.results == (Result(0),):
            out.writeline(f"return {call}[0]")
            return
        results = out.fresh_name("results")
        out.writeline(f"{results} = {call}")
        texts = [self._result(one, results, leaves) for one in record.results]
        out.writeline(f"return {self._built(record.result, texts)}")

    def _input(self, source: Any, leaves: Sequence[str]) -> str:
        match source:
            case FromLeaf(index, path):
                return ".".join([leaves[index], *path])
            case FromSize(index, path, method, dim):
                text = f"{'.'.join([leaves[index], *path])}.{method}({dim})"
                return self._read_already.get(text, text)
            case FromWeight(index):
                return self.out.bind(self.callee.weights.weights[index], "weight")
            case FromNumber(value):
                return repr(value)
        raise AssertionError(source)

    def _result(self, result: Any, results: str, leaves: Sequence[str]) -> str:
        match result:
            case Result(index):
                return f"{results}[{index}]"
            case ConstantLeaf(constant):
                return emit_constant(self.out, constant)
        return self._input(result, leaves)

    def _built(self, tree: Tree, texts: Sequence[str]) -> str:
        if isinstance(tree, LeafOf):
            return texts[tree.index]
        parts = [self._built(child, texts) for child in tree.children]
        match tree.kind:
            case "tuple":
                return tuple_of(parts)
            case "list":
                return f"[{', '.join(parts)}]"
            case "dict":
                return (
                    f"{{{', '.join(f'{key!r}: {part}' for key, part in zip(tree.keys, parts, strict=True))}}}"
                )
        if tree.kind == "size":
            return f"{self.out.bind(torch.Size, 'Size')}({tuple_of(parts)})"
        if tree.kind == "named":
            return f"{self.out.bind(tree.cls, 'named')}({', '.join(parts)})"
        flat = Node(tree.kind, tree.cls, tree.keys, tuple(LeafOf(n) for n in range(len(parts))))
        return f"{self.out.bind(build, 'build')}({self.out.bind(flat, 'structure')}, [{', '.join(parts)}])"


def _take_apart(value: Any, cls: type, keys: Any, count: int) -> list[Any] | None:
    """Returns the parts of a registered container; None if it is another one."""
    if type(value) is not cls:
        return None
    parts, context = registered_parts(value)
    return parts if context == keys and len(parts) == count else None
