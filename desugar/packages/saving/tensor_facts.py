"""Numbers the symbols and the weights of a package, and describes tensors by them."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import SymInt, Tensor, nn

from desugar import _torch as private
from desugar.packages.manifest.expressions import Extent, from_sympy
from desugar.packages.manifest.records import SymbolRecord, TensorFacts
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
        self.env, self._constants, self._held = env, dict[Any, Any](), list[Any]()
        self._values = {} if env is None else known_values(env)
        self._numbers: dict[Any, int] = {}

    def hold(self, number: Any, value: int) -> None:
        """Makes an int that the function holds, or reads in Python, a constant."""
        import sympy

        if not isinstance(number, SymInt):
            return
        if number.node.expr.is_symbol:
            self._constants[number.node.expr] = sympy.Integer(value)
        else:
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

    def records(self) -> tuple[SymbolRecord, ...]:
        """Returns the value and the range of each symbol."""
        return tuple(map(self._record, self._numbers))

    def _record(self, symbol: Any) -> SymbolRecord:
        known = self.env.var_to_range.get(symbol)
        low, high = (None, None) if known is None else (_finite(known.lower), _finite(known.upper))
        return SymbolRecord(int(self._values[symbol]), low, high)


def _finite(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer and int(bound) < 2**62 else None


# ------------------------------------------------------------------------------------------------- weights


class Weights:
    """The tensors that the functions of a package hold.

    Attributes:
        found: The tensors in order, each with its name and the other names that modules have for it.
    """

    def __init__(self, fn: Any) -> None:
        self.found: list[tuple[Tensor, str, tuple[str, ...]]] = []
        owner = getattr(fn, "__self__", fn)  # of a method
        self._known = _names_in("", owner) if isinstance(owner, nn.Module) else _names_held(owner)

    def index(self, tensor: Tensor, source: Any) -> int:
        """Returns the number of a tensor, added if it is new."""
        for number, (known, _, _) in enumerate(self.found):
            if known is tensor:
                return number
        names = self._known.get(id(tensor), [])
        name = names[0] if names else _clean(private.source_name(source))
        aliases = tuple(other for other in names if other != name)
        while any(name == other for _, other, _ in self.found):
            name += "_"
        self.found.append((tensor, name, aliases))
        return len(self.found) - 1


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
