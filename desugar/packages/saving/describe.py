"""Describes a captured call as a record of a manifest, with numbers for its symbols and its weights."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import SymInt, Tensor, nn

from desugar import _torch as torch_private
from desugar.errors import PackageError
from desugar.ir.stages import Origin
from desugar.ir.storage import base_of
from desugar.ir.values import (
    Constant,
    Flat,
    Same,
    Slot,
    Value,
    View,
    Wrapper,
    dynamic_names,
    inner_names,
    is_wrapper,
    unwrap_value,
)
from desugar.packages.manifest.expressions import Expression, Extent, Symbol, from_sympy, symbols_in
from desugar.packages.manifest.records import (
    Fact,
    FromWeight,
    GraphRecord,
    Leaf,
    ProgramRecord,
    Restrided,
    Result,
    Source,
    SymbolRecord,
    TensorFacts,
    Unused,
    rebuilt,
)
from desugar.packages.manifest.structure import flatten, names_of
from desugar.packages.saving.capture import Captured, Placeholder, as_expression
from desugar.store.pickling import known_values
from desugar.tracing.views import InnerReplay, ViewReplay, return_base

# Words of Dynamo's names that a user's name leaves out.
_OF_SOURCES = ("_modules", "_parameters", "_buffers")

# ------------------------------------------------------------------------------------------------- symbols


class Symbols:
    """Numbers the symbols of a program.

    Attributes:
        env: The shape environment; None to describe real tensors, whose sizes are ints.
    """

    def __init__(self, env: Any = None) -> None:
        self.env, self._constants, self._held = env, dict[Any, Any](), list[Any]()
        self._values = {} if env is None else known_values(env)
        self._numbers: dict[Any, int] = {}

    def hold(self, number: Any, value: int) -> None:
        """Makes a symbolic int a constant, since the function holds it or reads it in Python."""
        import sympy

        if isinstance(number, SymInt) and number.node.expr.is_symbol:
            self._constants[number.node.expr] = sympy.Integer(value)
        elif isinstance(number, SymInt):
            self._held.append(sympy.Eq(number.node.expr, value))

    def fact(self, item: Any) -> Any:
        """Returns a fake tensor or a symbolic number as data."""
        if isinstance(item, Tensor):
            size, stride = (tuple(map(self.fact, extents)) for extents in (item.size(), item.stride()))
            return TensorFacts(size, stride, self.fact(item.storage_offset()), item.dtype, item.device)
        return self._expression(item.node.expr) if isinstance(item, SymInt) else int(item)

    def _expression(self, expression: Any) -> Extent:
        expression = self.env.replace(expression).xreplace(self._constants)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol in self._values:
                self._numbers.setdefault(symbol, len(self._numbers))
        return from_sympy(expression, self._numbers)

    def guards(self) -> tuple[Extent, ...]:
        """Returns the conditions on sizes that the compilation assumed."""
        assumed = [*(guard.expr for guard in self.env.guards), *self._held]
        made = map(self._expression, assumed)
        return tuple(dict.fromkeys(guard for guard in made if not isinstance(guard, int)))

    def records(self) -> Iterator[SymbolRecord]:
        """Yields the value and the range of each symbol."""
        for symbol in self._numbers:
            known = self.env.var_to_range.get(symbol)
            low, high = (None, None) if known is None else (_finite(known.lower), _finite(known.upper))
            yield SymbolRecord(int(self._values[symbol]), low, high)


def _finite(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer and int(bound) < 2**62 else None


# ------------------------------------------------------------------------------------------------- weights


class Weights:
    """The tensors that the functions of a package hold.

    Attributes:
        entries: The tensors in order, each with its name and the other names that modules have for it.
    """

    def __init__(self, fn: Any) -> None:
        self.entries: list[tuple[Tensor, str, tuple[str, ...]]] = []
        owner = getattr(fn, "__self__", fn)  # of a method
        self._known = _names_in("", owner) if isinstance(owner, nn.Module) else _names_in_closure(owner)

    def index(self, tensor: Tensor, source: Any) -> int:
        """Returns the number of a tensor, added if it is new."""
        for number, (known, _, _) in enumerate(self.entries):
            if known is tensor:
                return number
        names = self._known.get(id(tensor), [])
        name = names[0] if names else _clean(torch_private.source_name(source))
        aliases = tuple(other for other in names if other != name)
        while any(name == other for _, other, _ in self.entries):
            name += "_"
        self.entries.append((tensor, name, aliases))
        return len(self.entries) - 1


def _names_in(prefix: str, module: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each buffer and parameter of a module, by the identity of the tensor."""
    names_by_tensor: dict[int, list[str]] = {}
    for named in (module.named_buffers, module.named_parameters):
        for name, tensor in named(prefix, remove_duplicate=False):
            names_by_tensor.setdefault(id(tensor), []).append(name)
    return names_by_tensor


def _names_in_closure(fn: Any) -> dict[int, list[str]]:
    """Returns the names in the modules that a function closes over or has among its globals."""
    try:
        closure_vars = inspect.getclosurevars(inspect.unwrap(fn))
    except (TypeError, ValueError):  # it is not a function of Python, or a cell is empty
        return {}
    names_by_tensor: dict[int, list[str]] = {}
    for name, value in {**closure_vars.globals, **closure_vars.nonlocals}.items():
        for tensor, names in _names_in(name, value).items() if isinstance(value, nn.Module) else ():
            names_by_tensor.setdefault(tensor, []).extend(names)
    return names_by_tensor


def _clean(name: str) -> str:
    words = re.findall(r"\w+", name)
    words = [
        word for n, word in enumerate(words) if word not in _OF_SOURCES and not (n == 0 and word in "LG")
    ]
    return ".".join(words) or "tensor"


# ---------------------------------------------------------------------------------------------- the program


class Description:
    """Describes one captured call."""

    def __init__(self, captured: Captured, weights: Weights, grads: bool) -> None:
        cache = captured.cache
        if cache.stored is None or cache.inputs is None:
            raise PackageError("the graph was not compiled by this library, so there is nothing to save")
        self.captured, self.weights, self.grads = captured, weights, grads
        self.stored, self.inputs = cache.stored, cache.inputs
        self.symbols = Symbols(self.inputs.mode.shape_env)
        self._leaves, self._fakes = captured.flattened.leaves, captured.fake_leaves

    def record(self, graphs: dict[int, GraphRecord]) -> ProgramRecord:
        """Returns the record.

        Args:
            graphs: id of a library -> its record.

        Raises:
            PackageError: A part of the program cannot be described.
        """
        captured = self.captured
        if self.stored.captured or self.inputs.generators:
            raise PackageError("the function uses generators")
        self._check_identities()
        self._hold_numbers()
        pairs = zip(captured.sources, captured.examples, strict=True)
        sources = tuple(self._source(source, example) for source, example in pairs)
        flat = Flat()
        result: list[Any] = []
        tree = flatten(captured.result, result, "the result", (SymInt,))
        live = ProgramRecord(
            arguments=captured.flattened.arguments,
            leaves=tuple(self._leaf(number, flat) for number in range(len(self._leaves))),
            leaf_facts=tuple(flat.items),
            symbols=(),
            guards=(),
            sources=sources,
            spec=self.stored.spec,
            forward=graphs[id(self.stored.forward)],
            backwards=tuple(
                replace(captured.program.variants.describe(present, None), compiled=graphs[id(compiled)])  # type: ignore[union-attr, arg-type]
                for present, compiled in captured.cache.backwards.items()
            ),
            result=tree,
            results=tuple(map(self._result_leaf, result)),
        )
        return self._finish(rebuilt(live, self._as_data))

    def _as_data(self, part: Any) -> Any:
        match part:
            case Tensor() | SymInt():
                return self.symbols.fact(part)
            case View():
                return replace(part, replay=self._restrided(part.replay), ints=())
            case Wrapper() if any(isinstance(extent, SymInt) for extent in (*part.size, *part.stride)):
                # The inner tensors determine a symbolic size or stride of a wrapper, and nothing reads it: any slot
                # will do.
                size, stride = (
                    tuple(Slot(0) if isinstance(extent, SymInt) else extent for extent in extents)
                    for extents in (part.size, part.stride)
                )
                return rebuilt(replace(part, size=size, stride=stride), self._as_data)
        return NotImplemented

    def _hold_numbers(self) -> None:
        """Makes the ints of wrappers that the function reads in Python constants of the program.

        Raises:
            PackageError: The function reads an attribute of an argument that the package does not check in calls.
        """
        for text in self.captured.facts:
            number, path = self.captured.locate(text) or (0, ())
            if not path:
                continue
            leaf = self._leaves[number]
            owner = functools.reduce(lambda of, name: getattr(of, name, None), path[:-1], leaf)
            if self._is_dynamic(number, path):
                fake = functools.reduce(getattr, path, self.captured.fakes[number])
                self.symbols.hold(fake, int(getattr(owner, path[-1])))
            elif path[-1] in getattr(owner, "__dict__", {}) and path[-1] not in _declared_names(owner):
                raise _reads_attribute(text)

    def _is_dynamic(self, number: int, path: tuple[str, ...]) -> bool:
        """Whether attributes lead from an argument leaf, through inner tensors alone, to a dynamic int of a class."""
        leaf = self._leaves[number]
        owner = {(): leaf, **dict(_inner_tensors(leaf))}.get(path[:-1])
        return is_wrapper(owner) and path[-1] in dynamic_names(type(owner))

    def _check_identities(self) -> None:
        """Raises `PackageError` if a tensor of an argument is another part of the call, or held by the function."""
        names = names_of(self.captured.flattened.arguments)
        leaves = {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, Tensor)}
        inner = Counter(id(part) for leaf in leaves.values() for _, part in _inner_tensors(leaf))
        same = [names[n] for n, leaf in enumerate(self._leaves) if id(leaf) in inner]
        same += sorted(self.captured.duplicated)
        for source, example in zip(self.captured.sources, self.captured.examples, strict=True):
            is_own = self.captured.is_of_argument(source)
            if inner[id(example)] > is_own or (id(example) in leaves and not is_own):
                same.append(torch_private.source_name(source))
        if same:
            raise PackageError(
                f"{as_expression(same[0])} is the same object as another part of the call, or as an object that the "
                "function holds: save a call with a clone of it"
            )

    def _finish(self, record: ProgramRecord) -> ProgramRecord:
        """Adds the guards and symbols; raises `PackageError` for a symbol that is not a size or int of an argument."""
        guards, symbols = self.symbols.guards(), tuple(self.symbols.records())
        read = {extent.index for extent in _extents_in(record.leaf_facts) if isinstance(extent, Symbol)}
        if missing := set(range(len(symbols))) - read:
            raise PackageError(
                f"{len(missing)} sizes of the program are not sizes of its arguments; pass dynamic=False, or mark "
                "sizes that change with torch._dynamo.mark_dynamic"
            )
        return replace(record, guards=guards, symbols=symbols)

    # .............................................................................................. arguments

    def _leaf(self, number: int, flat: Flat) -> Leaf:
        leaf, fake = self._leaves[number], self._fakes[number]
        first = next(n for n, other in enumerate(self._leaves) if other is leaf)
        if not isinstance(leaf, Tensor):
            return unwrap_value(fake, flat)  # type: ignore[return-value]
        if first != number:
            return Same("input", first)
        if number not in self.captured.fakes:
            return Unused()
        value = unwrap_value(fake, flat)
        return value if self.grads else _without_grad(value)  # type: ignore[return-value]

    # ................................................................................................. inputs

    def _source(self, source: Any, example: Any) -> Source:
        if isinstance(example, Tensor):
            if (tensor_source := _find_tensor(example, self._leaves)) is not None:
                return tensor_source
            self._refuse_attribute(source)
            return FromWeight(self.weights.index(example, source))
        is_size = isinstance(source, torch_private.TensorPropertySource)
        location = self.captured.locate(torch_private.source_name(source.base if is_size else source))
        if location is not None and (is_size or not location[1] or self._is_dynamic(*location)):
            return self._number(example)
        self._refuse_attribute(source)
        value = example.node.hint if isinstance(example, SymInt) else example
        if type(value) is not int:
            raise PackageError(
                f"the function holds {value!r:.80}, which is neither a tensor nor an int: pass it as an argument"
            )
        self.symbols.hold(example, value)
        return Constant(value)

    def _number(self, number: Any) -> Constant | Symbol | Expression:
        """Returns a symbolic number as data; any other object is a constant."""
        known = self.symbols.fact(number) if isinstance(number, SymInt) else number
        return known if isinstance(known, Symbol | Expression) else Constant(known)

    def _refuse_attribute(self, source: Any) -> None:
        """Raises `PackageError` for an attribute of an argument, and for a random number that Python draws."""
        if type(torch_private.source_root(source)).__name__ == "RandomValueSource":
            raise PackageError("the function draws random numbers in Python: draw them with torch")
        if self.captured.is_of_argument(source):
            raise _reads_attribute(torch_private.source_name(source))

    # ................................................................................................ results

    def _restrided(self, replay: Any) -> Restrided:
        path, is_unwrapped = (), False
        if isinstance(replay, InnerReplay):
            path, is_unwrapped, replay = replay.path, replay.differentiable, replay.replay
        if replay is return_base:
            return Restrided(path, is_unwrapped)
        extents = replay.extents() if isinstance(replay, ViewReplay) else None
        if extents is not None:
            size, stride = (tuple(map(self.symbols.fact, part)) for part in extents[:2])
            start, base = self.symbols.fact(extents[2]), self.symbols.fact(base_of(replay.traced))
            needed = set().union(*map(symbols_in, (*size, *stride, start)))
            base_extents = {
                extent.index: (extent.index, method, dim)
                for method, kind in (("stride", base.stride), ("size", base.size))
                for dim, extent in enumerate(kind)
                if isinstance(extent, Symbol) and extent.index in needed
            }
            if base_extents.keys() == needed:
                return Restrided(path, is_unwrapped, size, stride, start, tuple(base_extents.values()))  # type: ignore[arg-type]
        raise PackageError(
            "a result is a view of an argument or of another result, of another dtype, of a wrapper, or with sizes "
            "not its own: return a clone()"
        )

    def _result_leaf(self, leaf: Any) -> Result | Constant | Origin | Symbol | Expression:
        for number, known in enumerate(self.captured.standins):
            if leaf is known and isinstance(leaf, Tensor | Placeholder):
                return Result(number)
        if not isinstance(leaf, Tensor):
            return self._number(leaf)
        if (tensor_source := _find_tensor(leaf, self._fakes)) is not None:
            return tensor_source
        raise PackageError(
            "the result holds a tensor that is neither computed nor an argument (a parameter, or an attribute of "
            "an argument): return a clone of it"
        )


# ------------------------------------------------------------------------------------------------- helpers


def _without_grad(value: Value) -> Value:
    if isinstance(value, Wrapper):
        value = replace(value, inner=tuple((name, _without_grad(part)) for name, part in value.inner))
    return replace(value, requires_grad=False)  # type: ignore[call-arg]


def _declared_names(owner: Any) -> tuple[str, ...]:
    """Returns the names of the attributes that a declared class keeps on its values."""
    spec = getattr(type(owner), "__spec__", None)
    return () if spec is None else (*spec.names, *spec.attributes, "_layout")


def _inner_tensors(leaf: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yields (attribute path, tensor) of the inner tensors of a leaf, at any depth."""
    if is_wrapper(leaf):
        for name in inner_names(leaf):
            inner = getattr(leaf, name)
            yield (*path, name), inner
            yield from _inner_tensors(inner, (*path, name))


def _find_tensor(tensor: Tensor, leaves: list[Any]) -> Origin | None:
    """Returns the origin of a tensor: the first leaf that is this tensor, else the first inner tensor; else None."""
    whole = [Origin(number) for number, leaf in enumerate(leaves) if leaf is tensor]
    parts = ((number, *part) for number, leaf in enumerate(leaves) for part in _inner_tensors(leaf))
    inside = [Origin(number, path) for number, path, inner in parts if inner is tensor]
    return next(iter([*whole, *inside]), None)


def _extents_in(facts: tuple[Fact, ...]) -> Iterator[Any]:
    for fact in facts:
        yield from (*fact.size, *fact.stride) if isinstance(fact, TensorFacts) else (fact,)


def _reads_attribute(name: str) -> PackageError:
    return PackageError(
        f"the function reads {as_expression(name)}, an attribute of an argument: pass it as an argument"
    )
