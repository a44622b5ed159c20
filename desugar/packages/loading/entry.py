"""Generates the entry of a package: a function with the saved function's parameters, which checks and runs a call.

:class:`Conditions` collects the conditions on the calls of a program. Two functions are generated from them. The entry
tests the usual call: one C++ call for all plain tensors, an identity test for each layout, and the conditions on sizes.
A call that fails runs the second function, which is generated when it is first needed. It tests each condition by
itself, and raises `SignatureError` for the first that does not hold. It accepts calls that differ in a detail that the
program does not read, such as the stride of a dimension of size 1.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as torch_private
from desugar.codegen.build_values import emit_constant
from desugar.codegen.text import block, tuple_of
from desugar.errors import SignatureError
from desugar.ir.stages import Origin
from desugar.ir.values import Constant, Plain, Same, Slot, Wrapper, is_wrapper
from desugar.packages.loading.assemble import FILE, Assembled
from desugar.packages.loading.guards import Guards, WeightGuards
from desugar.packages.manifest.expressions import Extent, Symbol, symbols_in, text_of
from desugar.packages.manifest.records import (
    FromWeight,
    Leaf,
    ProgramRecord,
    Result,
    TensorFacts,
    Tree,
    Unused,
    WeightRecord,
)
from desugar.packages.manifest.structure import LEFT, container, part_names
from subclasses.errors import one_of
from subclasses.layout import Layout, describe_metadata, field_name
from subclasses.source_text.build import build_functions
from subclasses.source_text.emitter import Emitter
from subclasses.spec.values import PLAIN

# ---------------------------------------------------------------------------------------------- conditions


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a call.

    Attributes:
        text: The Python expression of the condition.
        error: The expressions of the arguments of the `SignatureError` for a call that does not meet it.
        is_implied: Whether other conditions imply it, so that only its error is needed.
    """

    text: str
    error: str
    is_implied: bool = False


class Conditions:
    """Collects the conditions on the arguments of a program, or on a weight.

    Attributes:
        out: Binds the objects in the texts.
        listed: The conditions so far, without the conditions on dynamic sizes.
        plain: The expressions of the plain tensors so far.
        names: Symbol -> the variable that holds it.
    """

    def __init__(self, out: Emitter, facts: Sequence[Any]) -> None:
        self.out, self._facts = out, facts
        self.listed: list[Condition] = []
        self.plain: list[str] = []
        self.names: dict[int, str] = {}
        self._reads: dict[int, tuple[str, str]] = {}  # symbol -> its expression in the text, and in errors
        self._extents: list[tuple[Extent, str, str, str, bool]] = []
        # A parameter of the saved function may have the name of a builtin.
        self._type, self._len, self._str = (out.bind(one, one.__name__) for one in (type, len, str))
        self._describe = out.bind(_describe, "describe")

    def need(self, text: str, where: str, expected: str, got: str, *, is_implied: bool = False) -> None:
        """Adds a condition; `got` is an expression, `where` and `expected` are text of its error."""
        self.listed.append(Condition(text, f"{where!r}, {expected!r}, {got}", is_implied))

    def open(self, tree: Tree, code: str, where: str, *, in_order: bool = True) -> Iterator[tuple[str, str]]:
        """Adds the conditions of a structure; yields the expression of each leaf in the text, and in errors."""
        if tree is None:
            yield code, where
            return
        out, cls, count = self.out, tree.cls, len(tree.children)
        got_type = f"{out.bind(one_of, 'one_of')}({self._type}({code}))"
        self.need(f"{self._type}({code}) is {out.bind(cls, cls.__name__)}", where, one_of(cls), got_type)
        if cls is dict:
            keys = f"[*{code}]" if in_order else f"{out.bind(sorted, 'sorted')}({code})"
            same = f"{keys} == {out.bind(tree.context, 'keys')}"
            self.need(same, where, f"the keys {tree.context!r:.80}", f"{self._str}({keys})")
        elif cls in (tuple, list):
            length = f"{self._len}({code})"
            self.need(f"{length} == {count}", where, f"{count} items", f"{self._str}({length})")
        else:
            parts, take_apart = out.fresh_name("parts"), out.bind(_take_apart, "take_apart")
            taken = f"({parts} := {take_apart}({code}, {out.bind(tree, 'structure')})) is not None"
            self.need(taken, where, f"{count} parts with {tree.context!r:.80}", repr("others"))
            code = parts
        for name, child in zip(part_names(cls, tree.context, count), tree.children, strict=True):
            yield from self.open(child, f"{code}[{name!r}]", f"{where}[{name!r}]")

    def equal(self, code: str, where: str, constant: object, expected: str) -> None:
        """Adds the condition that an argument equals a constant and has its type."""
        kind, said = self.out.bind(type(constant), type(constant).__name__), f"{self._describe}({code})"
        if constant is None or isinstance(constant, bool):
            text = f"{code} is {constant!r}"
        elif isinstance(constant, float) and not abs(constant) > 0:  # -0.0 == 0.0, and nan != nan
            text = f"{self._type}({code}) is {kind} and {self.out.bind(repr, 'repr')}({code}) == {repr(constant)!r}"
        else:
            text = f"{self._type}({code}) is {kind} and {code} == {emit_constant(self.out, constant)}"
        self.need(text, where, expected, said)

    def leaf(self, leaf: Leaf, number: int, names: Sequence[tuple[str, str]]) -> None:
        """Adds the conditions of an argument leaf; `names` has each leaf's expression in the text, and in errors."""
        (code, where), said = names[number], f"{self._describe}({names[number][0]})"
        match leaf:
            case Plain() | Wrapper():
                self.tensor(leaf, code, where)
            case Constant(_, int(index)):
                self.need(f"{self._type}({code}) is int", where, "an int", said)
                self._size(self._facts[index], code, where)
            case Constant(constant):
                self.equal(code, where, constant, f"{constant!r:.80}, a constant of this program")
            case Same(_, index):
                first, name = names[index]
                self.need(f"{code} is {first}", where, f"the same object as {name}", repr("another one"))
            case Unused():
                is_tensor = (
                    f"{self.out.bind(isinstance, 'isinstance')}({code}, {self.out.bind(Tensor, 'Tensor')})"
                )
                self.need(is_tensor, where, "a tensor", said)

    def distinct(self, names: Sequence[tuple[str, str]]) -> None:
        """Adds the condition that no two of these arguments are the same object."""
        if len(names) > 1:
            codes, wheres = zip(*names, strict=True)
            repeated = f"{self.out.bind(_find_repeated, 'find_repeated')}({wheres!r}, {', '.join(codes)})"
            text = " is not ".join(codes) if len(codes) == 2 else f"{repeated} is None"
            self.listed.append(Condition(text, f"*{repeated}"))

    # ................................................................................................ tensors

    def tensor(self, value: Any, code: str, where: str, *, is_weight: bool = False) -> None:
        """Adds the conditions of a tensor; `requires_grad` of a weight is not checked."""
        is_plain = isinstance(value, Plain)
        if is_plain:
            self._plain(self._facts[value.index], code, where)
        else:
            self._wrapper(value, code, where, is_weight=is_weight)
        if is_weight:
            return
        text, wanted, got = f"{code}.requires_grad", "a tensor that requires grad", "one that does not"
        if not value.requires_grad:
            text, wanted = f"not {text}", "a tensor that does not require grad"
            got = "one that does: pass its detach(), or save a call with it"
        self.need(text, where, wanted, repr(got), is_implied=is_plain)

    def _plain(self, facts: TensorFacts, code: str, where: str) -> None:
        out = self.out
        misfit, find = out.fresh_name("misfit"), out.bind(find_misfit, "find_misfit")
        fits = f"({misfit} := {find}({code}, {out.bind(facts, 'facts')}, {where!r})) is None"
        self.listed.append(Condition(fits, f"*{misfit}", is_implied=True))
        self.plain.append(code)
        for method, extents in (("size", facts.size), ("stride", facts.stride)):
            for dim, extent in enumerate(extents):
                unless = f"{code}.size({dim}) < 2 or not {code}.numel()" if method == "stride" else ""
                if not isinstance(extent, int):
                    self._size(extent, f"{code}.{method}({dim})", f"{where}.{method}({dim})", unless)

    def _wrapper(self, value: Wrapper, code: str, where: str, *, is_weight: bool) -> None:
        out, cls = self.out, value.cls
        is_declared = isinstance(value.context, Layout)
        said = f"{self._describe}({code})"
        self.need(f"{self._type}({code}) is {out.bind(cls, cls.__name__)}", where, one_of(cls), said)
        expected = out.bind(value.context, "layout")
        if is_declared:
            got = f"{out.bind(describe_metadata, 'describe_metadata')}({code}._layout)"
            self.need(f"{code}._layout is {expected}", where, describe_metadata(value.context), got)
        else:
            names, flattened = [name for name, _ in value.inner], f"{code}.__tensor_flatten__()"
            same = f"{flattened} == ({names!r}, {expected}) and {code}.dim() == {len(value.size)}"
            got = f"{self._str}({flattened})"
            self.need(same, where, f"{cls.__name__} with {names} and {value.context!r:.100}", got)
        # The dtype and the other sizes of a declared class follow from its layout and its inner tensors.
        dtype, got = out.bind(value.dtype, str(value.dtype)[6:]), f"{self._str}({code}.dtype)"
        self.need(f"{code}.dtype is {dtype}", where, str(value.dtype), got, is_implied=is_declared)
        for name, dynamic in value.dynamics:
            self._size(self._extent(dynamic), f"{code}.{name}", f"{where}.{name}")
        for method, extents in (("size", value.size), ("stride", value.stride)):
            for dim, extent in enumerate(map(self._extent, extents)):
                is_read = isinstance(extent, Symbol) and extent.index not in self._reads
                names_of_it = f"{code}.{method}({dim})", f"{where}.{method}({dim})"
                is_implied = is_declared and not isinstance(extent, Symbol)
                if method == "size" or is_read:
                    self._size(extent, *names_of_it, is_implied=is_implied)
        for attribute, part in value.inner:
            inner, name = out.fresh_name(attribute.strip("_")), f"{where}.{field_name(attribute)}"
            self.need(f"({inner} := {code}.{attribute}) is not None", name, "a tensor", repr("None"))
            self.tensor(part, inner, name, is_weight=is_weight)

    def _extent(self, extent: int | Slot) -> Extent:
        return self._facts[extent.index] if isinstance(extent, Slot) else extent  # type: ignore[no-any-return]

    # .................................................................................................. sizes

    def _size(
        self, extent: Extent, code: str, where: str, unless: str = "", *, is_implied: bool = False
    ) -> None:
        """Adds the condition on a size, stride or int; its first occurrence reads a symbol instead."""
        if isinstance(extent, int):
            self.need(
                f"{code} == {extent}", where, str(extent), f"{self._str}({code})", is_implied=is_implied
            )
        elif isinstance(extent, Symbol) and extent.index not in self._reads:
            self._reads[extent.index] = code, where
        else:
            self._extents.append((extent, code, where, unless, is_implied))

    def emit_reads(self) -> None:
        """Writes the lines that read symbols."""
        for index, (code, _) in self._reads.items():
            self.names[index] = self.out.fresh_name(f"s{index}")
            self.out.writeline(f"{self.names[index]} = {code}")

    def on_sizes(self, record: ProgramRecord) -> Iterator[Condition]:
        """Yields the conditions on dynamic sizes, over the variables that `emit_reads` assigned."""
        names, wheres = self.names, {index: where for index, (_, where) in self._reads.items()}
        for index, symbol in enumerate(record.symbols):
            advice = " (save a call with a smaller size too)" if symbol.low else ""
            limits = (
                (">=", symbol.low, f"at least {symbol.low}{advice}"),
                ("<=", symbol.high, f"at most {symbol.high}"),
            )
            for sign, limit, expected in limits:
                if limit is not None:
                    error = f"{wheres[index]!r}, {expected!r}, {self._str}({names[index]})"
                    yield Condition(f"{names[index]} {sign} {limit}", error)
        for guard in record.guards:
            used = sorted(symbols_in(guard))
            got = " + ', ' + ".join(f"{wheres[n] + ' = '!r} + {self._str}({names[n]})" for n in used)
            error = f"{wheres[used[0]]!r}, {'sizes with ' + text_of(guard, wheres)!r}, {got}"
            yield Condition(text_of(guard, names), error)
        for extent, code, where, unless, is_implied in self._extents:
            value, shown = text_of(extent, names), text_of(extent, wheres)
            expected = f"{shown + ' = '!r} + {self._str}({value})"
            text = f"({code} == {value} or {unless})" if unless else f"{code} == {value}"
            yield Condition(text, f"{where!r}, {expected}, {self._str}({code})", is_implied)


def _take_apart(value: Any, tree: Any) -> list[Any] | None:
    """Returns the parts of a container; None if their number or its context differs from the structure's."""
    parts, context = container(tree.cls).flatten_fn(value)
    return [*parts] if context == tree.context and len(parts) == len(tree.children) else None


def _find_repeated(names: Sequence[str], *tensors: object) -> tuple[str, str, str] | None:
    """Returns the arguments of the `SignatureError` for a tensor that is given twice; None if each is given once."""
    first = dict(zip(map(id, reversed(tensors)), reversed(names), strict=True))
    pairs = zip(names, tensors, strict=True) if len(first) < len(names) else ()
    repeated = ((name, first[id(tensor)]) for name, tensor in pairs if first[id(tensor)] != name)
    return next(((name, f"another object than {known}", "the same object") for name, known in repeated), None)


def find_misfit(value: Any, facts: TensorFacts, name: str) -> tuple[str, str, str] | None:
    """Returns None for a plain tensor with these constant facts, else the arguments of the `SignatureError`."""
    words = f"{facts.dtype} with {len(facts.size)} dimensions on {facts.device.type}"
    if type(value) not in PLAIN or torch_private.is_functorch_wrapped_tensor(value) or value.is_neg():
        return name, f"a plain tensor of {words}", _describe(value)
    is_alike = value.dtype == facts.dtype and value.dim() == len(facts.size)
    if not is_alike or value.layout is not torch.strided or value.is_conj():
        return name, f"a tensor of {words}", _describe(value)
    if value.device.type != facts.device.type:
        return name, f"a tensor on {facts.device}", f"one on {value.device}"
    for dim, extent in enumerate(facts.size):
        if isinstance(extent, int) and value.size(dim) != extent:
            return f"{name}.size({dim})", str(extent), str(value.size(dim))
    for dim, extent in enumerate(facts.stride):
        matters = value.size(dim) > 1 and value.numel() > 0
        if isinstance(extent, int) and matters and value.stride(dim) != extent:
            return f"{name}.stride({dim})", str(extent), str(value.stride(dim))
    return None


def _describe(value: Any) -> str:
    if isinstance(value, Tensor) and type(value) in PLAIN:
        return f"one of {value.dtype} and size {tuple(value.shape)}"
    if is_wrapper(value):
        return f"{one_of(type(value))} of {value.dtype}"
    if value is LEFT:
        return "none"
    return f"{value!r:.80} of type {type(value).__name__}"


def _emit_errors(out: Emitter, conditions: Iterable[Condition]) -> None:
    """Writes the lines that raise the error of the first condition that does not hold."""
    for condition in conditions:
        out.writeline(f"if not ({condition.text}):")
        out.writeline(f"    raise {out.bind(SignatureError, 'SignatureError')}({condition.error})")


def check_weight(record: WeightRecord, tensor: Any) -> None:
    """Raises `SignatureError` if a tensor does not fit the record of a weight; `requires_grad` is not checked."""
    where = f"weight {record.name}"
    if isinstance(record.value, Plain):
        if (misfit := find_misfit(tensor, record.facts[record.value.index], where)) is not None:
            raise SignatureError(*misfit)
        return
    out = Emitter()
    conditions = Conditions(out, record.facts)
    conditions.tensor(record.value, "weight", where, is_weight=True)
    with block(out, "def check(weight):"):
        _emit_errors(out, conditions.listed)
    build_functions(out.source, out.namespace, filename=FILE)["check"](tensor)


# ---------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Callee:
    """A program, as the entry calls it.

    Attributes:
        record: The program.
        signature: The signature of the package.
        assembled: The function of the program.
        guards: The check of its plain tensors.
        weights: The weights of the package, and their check.
        reads_grad_mode: Whether a weight requires grad that the program does not differentiate.
    """

    record: ProgramRecord
    signature: inspect.Signature
    assembled: Assembled
    guards: Guards
    weights: WeightGuards
    reads_grad_mode: bool

    @functools.cached_property
    def explain(self) -> Callable[..., Callable[[], Any]]:
        """A function of the arguments, in the order of the parameters.

        It returns a function that runs the program on them, and raises `SignatureError` for arguments that do not fit.
        """
        out = Emitter()
        out.reserve("explain", "run_program", *self.signature.parameters)
        with block(out, f"def explain({', '.join(self.signature.parameters)}):"):
            _Text(out, self).emit_explanation()
        return build_functions(out.source, out.namespace, filename=FILE)["explain"]  # type: ignore[no-any-return]


def build_entry(
    signature: inspect.Signature, callees: Sequence[Callee], on_mismatch: Callable[..., Any]
) -> tuple[Callable[..., Any], str]:
    """Builds the function of a package.

    Args:
        signature: The parameters of the saved function.
        callees: The programs.
        on_mismatch: Called with the arguments, in the order of the parameters, if they pass no program's check.

    Returns:
        The function, and its text.
    """
    out = Emitter()
    out.reserve("call", *signature.parameters)
    parameters = [_with_bound_default(out, one) for one in signature.parameters.values()]
    with block(out, f"def call{signature.replace(parameters=parameters)}:"):
        for callee in callees:
            _Text(out, callee).emit()
        out.writeline(f"return {out.bind(on_mismatch, 'on_mismatch')}({', '.join(signature.parameters)})")
    return build_functions(out.source, out.namespace, filename=FILE)["call"], out.source


def _with_bound_default(out: Emitter, parameter: inspect.Parameter) -> inspect.Parameter:
    """Returns a parameter whose default prints as the name of a bound constant."""
    if parameter.default is parameter.empty:
        return parameter
    name = emit_constant(out, parameter.default)
    return parameter.replace(default=type("Default", (), {"__repr__": lambda _: name})())


class _Text:
    """Writes the check and the call of one program."""

    def __init__(self, out: Emitter, callee: Callee) -> None:
        self.out, self.callee, self.record = out, callee, callee.record
        self._conditions = conditions = Conditions(out, self.record.leaf_facts)
        names: list[tuple[str, str]] = []
        trees = dict(self.record.arguments)
        for name, parameter in callee.signature.parameters.items():
            in_order = parameter.kind is not parameter.VAR_KEYWORD
            if name in trees:
                names += conditions.open(trees[name], name, name, in_order=in_order)
                continue
            expected = "no such argument: the saved call left it out"
            if parameter.default is LEFT:
                left = f"{name} is {out.bind(LEFT, 'left_out')}"
                conditions.need(left, name, expected, f"{out.bind(_describe, 'describe')}({name})")
            elif parameter.default is parameter.empty:  # *args or **kwargs
                conditions.need(f"not {name}", name, expected, f"{out.bind(str, 'str')}({name})")
            else:
                conditions.equal(name, name, parameter.default, expected)
        for number, leaf in enumerate(self.record.leaves):
            conditions.leaf(leaf, number, names)
        leaves = zip(names, self.record.leaves, strict=True)
        conditions.distinct([name for name, leaf in leaves if isinstance(leaf, Plain | Wrapper)])
        self._leaves = [code for code, _ in names]

    def emit(self) -> None:
        """Writes `if <the arguments fit>: return <the result>`."""
        out, conditions = self.out, self._conditions
        texts = [one.text for one in conditions.listed if not one.is_implied]
        if plain := ", ".join(conditions.plain):
            check = f"{out.bind(self.callee.guards.check, 'same_tensors')}({plain})"
            texts.append(
                f"({check} or {out.bind(self.callee.guards.check_others, 'other_tensors')}({plain}))"
            )
        with block(out, f"if {' and '.join([*texts, *self._on_state()])}:"):
            conditions.emit_reads()
            sizes = [one.text for one in conditions.on_sizes(self.record) if not one.is_implied]
            if sizes:
                out.writeline(f"if {' and '.join(dict.fromkeys(sizes))}:")
            with out.indent() if sizes else contextlib.nullcontext():
                self._emit_run()

    def _on_state(self) -> Iterator[str]:
        """Yields the conditions on weights, autocast and grad mode."""
        out, guards = self.out, self.callee.weights
        if guards.weights:
            inner = [
                f", {out.bind(guards.weights[number], 'weight')}.{path}" for number, path in guards.inner
            ]
            given = f"*{out.bind(guards.weights, 'weights')}{''.join(inner)}"
            check = f"{out.bind(guards.check, 'same_weights')}({given})"
            others = f"{out.bind(guards.check_others, 'other_weights')}({given})"
            yield f"(not {out.bind(guards.handed_out, 'handed_out')} or {check} or {others})"
        yield f"not {out.bind(torch_private.is_any_autocast_enabled, 'is_any_autocast_enabled')}()"
        if self.callee.reads_grad_mode:
            yield f"not {out.bind(torch.is_grad_enabled, 'is_grad_enabled')}()"

    def emit_explanation(self) -> None:
        """Writes the lines that test each condition, and return a function that runs the program."""
        out, conditions = self.out, self._conditions
        _emit_errors(out, conditions.listed)
        conditions.emit_reads()
        _emit_errors(out, conditions.on_sizes(self.record))
        out.writeline(f"{out.bind(self.callee.guards.accept, 'accept')}([{', '.join(conditions.plain)}])")
        with block(out, "def run_program():"):
            self._emit_run()
        out.writeline("return run_program")

    # ................................................................................................ running

    def _emit_run(self) -> None:
        """Writes the call of the program and the return of its result."""
        out, record = self.out, self.record
        inputs = ", ".join(map(self._input, record.sources))
        results = out.fresh_name("results")
        out.writeline(f"{results} = {out.bind(self.callee.assembled.run, 'run')}({inputs})")
        texts = [self._input(one, results) for one in record.results]
        out.writeline(f"return {self._built(record.result, iter(texts))}")

    def _input(self, source: Any, results: str = "") -> str:
        match source:
            case Origin(leaf, path):
                return source.expression(self._leaves[leaf], *path)
            case FromWeight(index):
                return self.out.bind(self.callee.weights.weights[index], "weight")
            case Constant(constant):
                return emit_constant(self.out, constant)
            case Result(index):
                return f"{results}[{index}]"
        return text_of(source, self._conditions.names)

    def _built(self, tree: Tree, texts: Iterator[str]) -> str:
        if tree is None:
            return next(texts)
        parts = [self._built(child, texts) for child in tree.children]
        if tree.cls is tuple:
            return tuple_of(parts)
        make = self.out.bind(container(tree.cls).unflatten_fn, f"make_{tree.cls.__name__}")
        return f"{make}([{', '.join(parts)}], {self.out.bind(tree.context, 'context')})"
