"""Numbers the symbols and the weights of a package, and describes tensors by them."""

from __future__ import annotations

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
    """

    def __init__(self, fn: Any) -> None:
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        owner = getattr(fn, "__self__", fn)  # of a method
        self._known = _names_in(owner) if isinstance(owner, nn.Module) else {}

    def index(self, tensor: Tensor, source: Any) -> int:
        """Returns the number of a tensor, added if it is new."""
        for number, known in enumerate(self.tensors):
            if known is tensor:
                return number
        name = self._known.get(id(tensor)) or _clean(private.source_name(source))
        while name in self.names:
            name += "_"
        self.tensors.append(tensor)
        self.names.append(name)
        return len(self.tensors) - 1


def _names_in(module: nn.Module) -> dict[int, str]:
    named = [*module.named_buffers(remove_duplicate=False), *module.named_parameters(remove_duplicate=False)]
    return {id(tensor): name for name, tensor in reversed(named)}


def _clean(name: str) -> str:
    words = re.findall(r"\w+", name)
    words = [
        word for n, word in enumerate(words) if word not in _OF_SOURCES and not (n == 0 and word in "LG")
    ]
    return ".".join(words) or "tensor"
