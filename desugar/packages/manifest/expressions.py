"""Expressions of sizes: sympy expressions while a package is saved, data in its manifest, text in generated code.

The ops are a closed set. An expression with another op raises `PackageError` when it is written or read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from desugar import _torch as torch_private
from desugar.errors import PackageError

# ------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dynamic size or int: number `index` among the symbols of a program."""

    index: int


@dataclass(frozen=True, slots=True)
class Expression:
    """An op of :data:`OPS` and its operands."""

    op: str
    operands: tuple[Extent, ...]

    def __post_init__(self) -> None:
        known, count = OPS.get(self.op), len(self.operands)
        if known is None or (count == 0 if known.between else count != known.text.count("{")):
            raise PackageError(
                f"a size is computed by {self.op} of {count} sizes, which a package cannot hold"
            )
        if self.op == "Pow" and self.operands[1] not in range(9):
            raise PackageError("a size is a power above 8, or no constant one, which a package cannot hold")


Extent = int | Symbol | Expression


@dataclass(frozen=True, slots=True)
class _Op:
    """An op of sizes.

    Attributes:
        compute: Computes the op from its operands.
        text: The template of its text: `{0}` and `{1}` are operands; `{}` is all operands, if the op takes any number.
        between: The text between operands, if the op takes any number of them.
    """

    compute: Callable[..., Any]
    text: str
    between: str = ""


# Op -> its meaning, by the names of sympy's classes and of PyTorch's functions for sympy.
OPS: Mapping[str, _Op] = {
    "Add": _Op(lambda *terms: sum(terms), "({})", " + "),
    "Mul": _Op(lambda *factors: math.prod(factors), "({})", " * "),
    "And": _Op(lambda *terms: all(terms), "({})", " and "),
    "Or": _Op(lambda *terms: any(terms), "({})", " or "),
    "Max": _Op(lambda *terms: max(terms), "max(({},))", ", "),
    "Min": _Op(lambda *terms: min(terms), "min(({},))", ", "),
    "Not": _Op(operator.not_, "(not {0})"),
    "FloorDiv": _Op(operator.floordiv, "({0} // {1})"),
    "CleanDiv": _Op(operator.floordiv, "({0} // {1})"),
    "Mod": _Op(operator.mod, "({0} % {1})"),
    "PythonMod": _Op(operator.mod, "({0} % {1})"),
    "Pow": _Op(operator.pow, "({0} ** {1})"),
    "Equality": _Op(operator.eq, "({0} == {1})"),
    "Unequality": _Op(operator.ne, "({0} != {1})"),
    "StrictLessThan": _Op(operator.lt, "({0} < {1})"),
    "LessThan": _Op(operator.le, "({0} <= {1})"),
    "StrictGreaterThan": _Op(operator.gt, "({0} > {1})"),
    "GreaterThan": _Op(operator.ge, "({0} >= {1})"),
}

# --------------------------------------------------------------------------------------------- conversions


def from_sympy(expression: Any, numbers: Mapping[Any, int]) -> Extent:
    """Returns a sympy expression as data.

    Args:
        expression: The expression, an int or a bool.
        numbers: sympy's symbol -> its number.

    Raises:
        PackageError: The expression depends on data, or has an op outside :data:`OPS`.
    """
    if isinstance(expression, int) or getattr(expression, "is_Integer", False):
        return int(expression)
    if expression.is_Symbol:
        if expression not in numbers:
            raise PackageError(f"a size depends on data, or on no argument ({expression})")
        return Symbol(numbers[expression])
    if expression.is_Boolean and not expression.args:
        return int(bool(expression))
    return Expression(type(expression).__name__, tuple(from_sympy(part, numbers) for part in expression.args))


def to_sympy(extent: Extent, symbols: Sequence[Any]) -> Any:
    """Returns an extent as a sympy expression; `symbols` are sympy's symbols, by number."""
    import sympy

    match extent:
        case Symbol(index):
            return symbols[index]
        case Expression(op, operands):
            make = getattr(torch_private.size_functions, op, None) or getattr(sympy, op)
            return make(*(to_sympy(operand, symbols) for operand in operands))
    return sympy.Integer(extent)


def text_of(extent: Extent, names: Mapping[int, str]) -> str:
    """Returns the Python text of an expression; `names` are the texts of its symbols."""
    match extent:
        case Symbol(index):
            return names[index]
        case Expression(op, operands):
            texts, known = [text_of(operand, names) for operand in operands], OPS[op]
            return (
                known.text.format(known.between.join(texts)) if known.between else known.text.format(*texts)
            )
    return str(int(extent))


def value_of(extent: Extent, values: Sequence[int] | Mapping[int, int]) -> int:
    """Returns the value of an expression for the given values of its symbols.

    Raises:
        ZeroDivisionError: The expression divides by a size that is 0.
    """
    match extent:
        case Symbol(index):
            return values[index]
        case Expression(op, operands):
            return int(OPS[op].compute(*(value_of(operand, values) for operand in operands)))
    return int(extent)


def symbols_in(extent: Extent) -> set[int]:
    """Returns the numbers of the symbols in an expression."""
    match extent:
        case Symbol(index):
            return {index}
        case Expression(_, operands):
            return set().union(*map(symbols_in, operands))
    return set()
