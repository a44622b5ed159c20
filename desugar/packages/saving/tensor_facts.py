"""Numbers the symbols and the weights of a package, and describes tensors by them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from torch import SymInt, Tensor, nn

from desugar import _torch as private
from desugar.packages.manifest.expressions import Extent, from_sympy
from desugar.packages.manifest.records import Fact, SymbolRecord, TensorFacts
from desugar.store.pickling import known_values

# Words of Dynamo's names that say nothing to a user.
_OF_SOURCES = ("_modules", "_parameters", "_buffers")

# ------------------------------------------------------------------------------------------------- symbols


class Symbols:
    """Numbers the symbols of a program.

    Attributes:
        env: The shape environment; None to describe tensors that are no fakes, whose sizes are known.
    """

    def __init__(self, env: Any = None) -> None:
        self.env, self._constants = env, dict[Any, Any]()
        self._values = {} if env is None else known_values(env)
        self._numbers: dict[Any, int] = {}

    def hold(self, number: SymInt, value: int) -> None:
        """Makes an int that the function holds a constant."""
        import sympy

        if number.node.expr.is_symbol:
            self._constants[number.node.expr] = sympy.Integer(value)

    def extent(self, value: Any) -> Extent:
        """Returns a size, stride or int as data."""
        return self.expression(value.node.expr) if isinstance(value, SymInt) else int(value)

    def expression(self, expression: Any) -> Extent:
        """Returns an expression over the symbols as data."""
        expression = self.env.replace(expression).xreplace(self._constants)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol in self._values:
                self._numbers.setdefault(symbol, len(self._numbers))
        return from_sympy(expression, self._numbers)

    def extents(self, values: Iterable[Any]) -> tuple[Extent, ...]:
        """Returns sizes or strides as data."""
        return tuple(map(self.extent, values))

    def facts(self, tensor: Tensor) -> TensorFacts:
        """Returns what is known of a fake tensor."""
        size, stride = self.extents(tensor.size()), self.extents(tensor.stride())
        return TensorFacts(size, stride, self.extent(tensor.storage_offset()), tensor.dtype, tensor.device)

    def fact(self, item: Any) -> Fact:
        """Returns what is known of a fake tensor, or the expression of a number."""
        if isinstance(item, Tensor):
            return self.facts(item)
        return None if item is None else self.extent(item)

    def facts_of(self, items: Iterable[Any]) -> tuple[Fact, ...]:
        """Returns the facts of tensors and numbers."""
        return tuple(map(self.fact, items))

    def guards(self) -> tuple[Extent, ...]:
        """Returns what the compilation assumed of sizes."""
        made = [self.expression(guard.expr) for guard in self.env.guards]
        return tuple(dict.fromkeys(guard for guard in made if not isinstance(guard, int)))

    def records(self) -> tuple[SymbolRecord, ...]:
        """Returns what is known of each symbol."""
        return tuple(self._record(symbol) for symbol in self._numbers)

    def _record(self, symbol: Any) -> SymbolRecord:
        known = self.env.var_to_range.get(symbol)
        low = None if known is None or not known.lower.is_Integer else int(known.lower)
        high = (
            None
            if known is None or not known.upper.is_Integer or int(known.upper) >= 2**62
            else int(known.upper)
        )
        return SymbolRecord(int(self._values[symbol]), low, high)


# ------------------------------------------------------------------------------------------------- weights


class Weights:
    """The tensors that the functions of a package hold.

    Attributes:
        tensors: The tensors, in order.
        names: Their names.
        aliases: For each of them, the other names that modules have for it.
    """

    def __init__(self, fn: Any) -> None:
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.aliases: list[tuple[str, ...]] = []
        owner = getattr(fn, "__self__", fn)  # of a method
        self._is_named = isinstance(owner, nn.Module)
        self._known = _names_in("", owner) if isinstance(owner, nn.Module) else _names_held(owner)

    def index(self, tensor: Tensor, source: Any) -> int:
        """Returns the number of a tensor, added if it is new."""
        for number, known in enumerate(self.tensors):
            if known is tensor:
                return number
        known = self._known.get(id(tensor), [])
        name = known[0] if known and self._is_named else _clean(private.source_name(source))
        aliases = tuple(other for other in known if other != name)
        while name in self.names:
            name += "_"
        self.tensors.append(tensor)
        self.names.append(name)
        self.aliases.append(aliases)
        return len(self.tensors) - 1


def _names_in(prefix: str, module: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each buffer and parameter of a module, by the identity of the tensor."""
    found: dict[int, list[str]] = {}
    for named in (module.named_buffers, module.named_parameters):
        for name, tensor in named(prefix, remove_duplicate=False):
            found.setdefault(id(tensor), []).append(name)
    return found


def _names_held(fn: Any) -> dict[int, list[str]]:
    """Returns the names in the modules that a function closes over or has among its globals."""
    try:
        held = inspect.getclosurevars(inspect.unwrap(fn))
    except (TypeError, ValueError):  # it is no function of Python, or a cell is empty
        return {}
    found: dict[int, list[str]] = {}
    for name, value in {**held.globals, **held.nonlocals}.items():
        for tensor, names in _names_in(name, value).items() if isinstance(value, nn.Module) else ():
            found.setdefault(tensor, []).extend(names)
    return found


def _clean(name: str) -> str:
    words = re.findall(r"\w+", name)
    words = [
        word for n, word in enumerate(words) if word not in _OF_SOURCES and not (n == 0 and word in "LG")
    ]
    return ".".join(words) or "tensor"
