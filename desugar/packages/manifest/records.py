"""The records of a package's manifest. Their annotations are its schema (:mod:`desugar.packages.manifest.codec`).

The records of other stages (`ProgramSpec`, `Variant` and the records in them) are written as they are. A fake
tensor in them becomes a :class:`TensorFacts`, and a symbolic number becomes an expression.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from desugar.backends.calling import Argument, Calling, Computed, Known, Passed
from desugar.backward.emit import Variant
from desugar.errors import PackageError
from desugar.ir.stages import (
    FromForward,
    FromInput,
    FromTangent,
    GradientCall,
    InputSpec,
    Interface,
    Origin,
    Outputs,
    PartitionSpec,
    ProgramSpec,
)
from desugar.ir.values import Constant, Plain, Same, Slot, View, Wrapper
from desugar.packages.manifest.expressions import Expression, Extent, Symbol, value_of
from subclasses import TensorSubclass
from subclasses.autograd.construct import unwrap_one

FORMAT = 3  # of the manifest; `load` accepts no other format

Word = Annotated[str, "word"]  # any identifier; a `str` is an identifier without a leading `__`
Text = Annotated[str, "text"]  # any text, which is never part of generated code
Method = Literal["", "size", "stride"]

# ------------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The size, stride, offset, dtype and device that a program assumes of a plain tensor."""

    size: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    offset: Extent
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        """Raises `PackageError` if sizes and strides differ in number, since a C++ check would read past the end."""
        if len(self.size) != len(self.stride):
            raise PackageError(
                f"a tensor of {len(self.size)} dimensions has {len(self.stride)} strides in the manifest"
            )


Fact = TensorFacts | int | Symbol | Expression | None  # of a tensor or a number

# ------------------------------------------------------------------------------------------------ structure


@dataclass(frozen=True, slots=True)
class Node:
    """A container in a structure: its class, the constant that rebuilds it (the context of a pytree), and its parts."""

    cls: type
    context: Any
    children: tuple[Node | None, ...]


Tree = Node | None  # None is a leaf; leaves are numbered in order


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the function.

    Attributes:
        name, kind: As in `inspect.Parameter`, the kind as an int.
        default: None if a call has to pass it; (default,) if the default is a constant; else an empty tuple.
    """

    name: Word
    kind: int
    default: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class Unused:
    """An argument leaf: a tensor that the function does not use."""


Leaf = Plain | Wrapper | Constant | Same | Unused

# ------------------------------------------------------------------------------------- inputs and results


@dataclass(frozen=True, slots=True)
class FromWeight:
    """A program input: weight `index`."""

    index: int


Source = Origin | FromWeight | Constant | Symbol | Expression


@dataclass(frozen=True, slots=True)
class Result:
    """A leaf of the function's result: result `index` of the program."""

    index: int


@dataclass(frozen=True, slots=True)
class Restrided:
    """Takes a view of a tensor, or of an inner tensor, by its size, stride and offset.

    Attributes:
        path, is_unwrapped: The attributes that lead to the inner tensor; whether `unwrap_one` reads them, which
            autograd records.
        size, stride, start: The size and stride of the view, and its offset from the tensor's; `start` is None for the
            whole tensor.
        reads: (symbol, method, dim) of each symbol in these extents; the symbols are sizes and strides of the tensor.
    """

    path: tuple[str, ...]
    is_unwrapped: bool
    size: tuple[Extent, ...] = ()
    stride: tuple[Extent, ...] = ()
    start: int | Symbol | Expression | None = None
    reads: tuple[tuple[int, Method, int], ...] = ()

    def __call__(self, base: Any, ints: Any) -> Tensor:
        """Returns the view of `base`."""
        for name in self.path:
            is_unwrapped = self.is_unwrapped and isinstance(base, TensorSubclass)
            base = unwrap_one(base, name) if is_unwrapped else getattr(base, name)
        if self.start is None:
            return base  # type: ignore[no-any-return]
        symbols = {symbol: getattr(base, method)(dim) for symbol, method, dim in self.reads}
        size, stride = ([value_of(n, symbols) for n in extents] for extents in (self.size, self.stride))
        return base.as_strided(size, stride, base.storage_offset() + value_of(self.start, symbols))  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """A plain graph: its name, whether a library of that name computes it, and how the library is called."""

    name: str
    is_computed: bool
    calling: Calling


@dataclass(frozen=True, slots=True)
class SymbolRecord:
    """A dynamic size or int: its value in the saved call, and its bounds (None: unbounded)."""

    hint: int
    low: int | None
    high: int | None


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """One program of a package.

    Attributes:
        arguments: (parameter, structure) of each argument that was passed.
        leaves, leaf_facts: The leaves of the arguments; the tensors and numbers that their slots refer to.
        symbols, guards: Dynamic sizes and ints; the conditions on them.
        sources: The source of each input of the program.
        spec: The description of the program.
        forward, backwards: The graphs.
        result, results: The structure of the result, and its leaves.
    """

    arguments: tuple[tuple[Word, Node | None], ...]
    leaves: tuple[Leaf, ...]
    leaf_facts: tuple[Fact, ...]
    symbols: tuple[SymbolRecord, ...]
    guards: tuple[Extent, ...]
    sources: tuple[Source, ...]
    spec: ProgramSpec
    forward: GraphRecord
    backwards: tuple[Variant, ...]
    result: Node | None
    results: tuple[Result | Constant | Origin | Symbol | Expression, ...]

    @property
    def hints(self) -> list[int]:
        """The values of the symbols in the saved call."""
        return [symbol.hint for symbol in self.symbols]


# -------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """A parameter, buffer or other tensor that the function holds.

    Attributes:
        name, aliases: Its name in the module, or in the function; its other names there, if it is tied.
        value, facts: Its structure, and the plain tensors in it.
        is_parameter: Whether it is an `nn.Parameter`.
        data: The numbers of its plain tensors among the weights of the file; empty if `load` receives it as `state`.
    """

    name: Text
    aliases: tuple[Text, ...]
    value: Plain | Wrapper
    facts: tuple[TensorFacts, ...]
    is_parameter: bool
    data: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that runs machine code: the system, the processor and the instructions that compilers may use."""

    system: Text
    processor: Text
    instructions: frozenset[Text]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a package.

    Attributes:
        release: The release of PyTorch that wrote the package.
        machine: The machine that the machine code was compiled for; None without machine code.
        is_training: Whether the results have gradients.
        parameters: The parameters of the function.
        weights, programs: The weights and the programs.
    """

    release: Text
    machine: Machine | None
    is_training: bool
    parameters: tuple[Parameter, ...]
    weights: tuple[WeightRecord, ...]
    programs: tuple[ProgramRecord, ...]


# --------------------------------------------------------------------------------------------------- schema

# Fields of other stages' records whose types in a file differ from their types in a compilation.
_IN_FILES: dict[type, dict[str, Any]] = {
    Origin: {"method": Method | None},
    View: {"replay": Restrided},
    Outputs: {"items": tuple[Fact, ...]},
    InputSpec: {"items": tuple[Fact, ...]},
    GradientCall: dict.fromkeys(("received", "returned"), tuple[frozenset[int], ...]),
    Interface: {"tangent_items": tuple[TensorFacts, ...]},
    PartitionSpec: {
        "random_op": Text | None,  # type: ignore[operator]
        **dict.fromkeys(("forward_outputs", "backward_items", "gradients"), tuple[Fact, ...]),
    },
    Variant: {"items": tuple[Fact, ...], "gradients": tuple[Fact, ...], "compiled": GraphRecord},
}

# The classes of records, by the names that a file uses.
RECORDS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        TensorFacts, Symbol, Expression, Node, Parameter, Unused, FromWeight, Result, Restrided, GraphRecord,
        SymbolRecord, ProgramRecord, WeightRecord, Machine, Manifest, Origin, Calling, Argument, Computed, Passed,
        Known, Outputs, InputSpec, ProgramSpec, Interface, GradientCall, PartitionSpec, FromInput, FromForward,
        FromTangent, Constant, Plain, Same, Slot, View, Wrapper, Variant,
    )
}  # fmt: skip


@functools.cache
def fields_of(cls: Any) -> dict[str, Any] | None:
    """Returns the fields of a record with their annotations in a file; None for any other class."""
    if not hasattr(cls, "__dataclass_fields__"):
        return None
    hints = typing.get_type_hints(cls, include_extras=True) | _IN_FILES.get(cls, {})
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def rebuilt(part: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a copy of a record with parts replaced, at any depth; constants are unchanged.

    Args:
        part: The record.
        change: Returns the replacement of a part; `NotImplemented` to descend into the part.
    """
    if (changed := change(part)) is not NotImplemented:
        return changed
    if type(part) is tuple:
        return tuple([rebuilt(item, change) for item in part])
    if (fields := fields_of(type(part))) is None:
        return part
    parts = {name: getattr(part, name) for name, kind in fields.items() if kind is not Any}
    return dataclasses.replace(part, **{name: rebuilt(value, change) for name, value in parts.items()})
