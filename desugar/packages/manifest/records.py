"""The records of a package's manifest. Their annotations are its schema (:mod:`desugar.packages.manifest.codec`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from desugar.ir.calling import Calling
from desugar.ir.stages import BackwardInput
from desugar.ir.values import Constant, Plain, Same, Value, Wrapper
from desugar.packages.manifest.expressions import Expression, Extent, Symbol

FORMAT = 1  # of the manifest; a reader takes its own alone

# ------------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a program assumes of a plain tensor."""

    size: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    offset: Extent
    dtype: torch.dtype
    device: torch.device


Fact = TensorFacts | int | Symbol | Expression | None  # of a tensor or a number


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """A layout of a declared class: `subclasses.layout.Layout` as data."""

    cls: type
    statics: tuple[Any, ...]
    present: tuple[str, ...]
    nested: tuple[tuple[str, LayoutRecord], ...]
    cotangent: bool


# ------------------------------------------------------------------------------------------------ arguments


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """An argument, or an inner tensor of one, that is a plain tensor."""

    facts: TensorFacts
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class WrapperLeaf:
    """An argument, or an inner tensor of one, that is a wrapper.

    Attributes:
        cls: Its class.
        context: What rebuilds it around other inner tensors: a layout, or the constant of a handwritten class.
        inner, dynamics: (attribute, tensor) per inner tensor; (field, int) per dynamic int.
        size, stride, dtype, requires_grad: Those of the outer tensor.
    """

    cls: type
    context: Any
    inner: tuple[tuple[str, TensorLeaf | WrapperLeaf], ...]
    dynamics: tuple[tuple[str, Extent], ...]
    size: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class IntLeaf:
    """An int that may change from call to call."""

    value: Extent


@dataclass(frozen=True, slots=True)
class ConstantLeaf:
    """An object that is a constant of the program."""

    value: Any


@dataclass(frozen=True, slots=True)
class SameLeaf:
    """The same object as an earlier leaf."""

    index: int


@dataclass(frozen=True, slots=True)
class UnusedLeaf:
    """A tensor that the function does not use."""


Leaf = TensorLeaf | WrapperLeaf | IntLeaf | ConstantLeaf | SameLeaf | UnusedLeaf

# ------------------------------------------------------------------------------------------------ structure


@dataclass(frozen=True, slots=True)
class LeafOf:
    """Leaf number `index` of a structure."""

    index: int


@dataclass(frozen=True, slots=True)
class Node:
    """A container in a structure.

    Attributes:
        kind: "tuple", "list", "dict", "size", "keywords" (a dict in any order), "named" (a named tuple), or
            "registered": a class that PyTorch's pytrees know.
        cls: The class of a registered container.
        keys: The keys of a dict, or the constant that rebuilds a registered container.
        children: Its parts.
    """

    kind: str
    cls: type | None
    keys: Any
    children: tuple[Node | LeafOf, ...]


Tree = Node | LeafOf


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the function.

    Attributes:
        name: Its name.
        kind: "positional", "either", "rest" (`*args`), "keyword" or "keywords" (`**kwargs`).
        is_optional, default: Whether a call may leave it out, and what it then is; :class:`Left` for no constant.
    """

    name: str
    kind: str
    is_optional: bool
    default: Any


@dataclass(frozen=True, slots=True)
class Left:
    """Stands for an argument that was left out."""


# ------------------------------------------------------------------------------------- inputs and results


@dataclass(frozen=True, slots=True)
class FromLeaf:
    """An input of a program that is an argument leaf, or an attribute of one."""

    index: int
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FromSize:
    """An input of a program that is a size or stride of an argument leaf, or of an attribute of one."""

    index: int
    path: tuple[str, ...]
    method: str
    dim: int


@dataclass(frozen=True, slots=True)
class FromWeight:
    """An input of a program that is a weight."""

    index: int


@dataclass(frozen=True, slots=True)
class FromNumber:
    """An input of a program that is an int which the function holds."""

    value: int


Source = FromLeaf | FromSize | FromWeight | FromNumber


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a program reads the int of an input slot: from input `leaf`, or a size of an inner tensor of it."""

    slot: int
    leaf: int
    path: tuple[str, ...]
    method: str
    dim: int


@dataclass(frozen=True, slots=True)
class Result:
    """A leaf of the result that is result `index` of the program."""

    index: int


@dataclass(frozen=True, slots=True)
class StridedView:
    """A result that is a view of an input or of another result, or of a tensor inside of an input.

    Attributes:
        of, index: The input or result.
        path, is_unwrapped: What leads to the tensor inside of it; whether by `unwrap()`, so that it has a gradient.
        view, reads: Size, stride and offset, if not all of it; (symbol, "size" or "stride", dim) of their symbols.
        detached, no_grad: As of `desugar.ir.values.View`.
    """

    of: str
    index: int
    path: tuple[str, ...]
    is_unwrapped: bool
    view: tuple[tuple[Extent, ...], tuple[Extent, ...], Extent] | None
    reads: tuple[tuple[int, str, int], ...]
    detached: bool
    no_grad: bool


OutputValue = Plain | Wrapper | Constant | Same | StridedView


@dataclass(frozen=True, slots=True)
class OutputsRecord:
    """`desugar.ir.outputs.Outputs` as data."""

    num_visible: int
    values: tuple[OutputValue, ...]
    items: tuple[Fact, ...]
    inputs: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    stores: tuple[tuple[int, int], ...]
    versions: tuple[tuple[int, tuple[str, ...], int], ...]
    assigns: tuple[tuple[int, str, int], ...]
    tokens: tuple[int, ...]


# ------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """A plain graph: its name, whether a library of that name computes it, and how that is called."""

    name: str
    is_computed: bool
    calling: Calling


@dataclass(frozen=True, slots=True)
class BackwardRecord:
    """The backward for the gradients that arrive."""

    present: tuple[bool, ...]
    sources: tuple[BackwardInput, ...]
    items: tuple[Fact, ...]
    gradients: tuple[Fact, ...]
    graph: GraphRecord


@dataclass(frozen=True, slots=True)
class SplitRecord:
    """`desugar.ir.stages.Split` as data, without its graphs; `fills_zeros` if a missing gradient counts as zeros."""

    num_forward: int
    backward_inputs: tuple[BackwardInput, ...]
    forward_outputs: tuple[Fact, ...]
    backward_items: tuple[Fact, ...]
    gradients: tuple[Fact, ...]
    saved_from: frozenset[int]
    depends: tuple[frozenset[int], ...]
    fills_zeros: bool
    random_op: str | None


@dataclass(frozen=True, slots=True)
class SymbolRecord:
    """A size or int that may change: its value in the saved call, its least and its greatest (None: any)."""

    hint: int
    low: int | None
    high: int | None


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """One program of a package.

    Attributes:
        parameters, arguments: Those of the function; (parameter, structure) of each argument that was passed.
        leaves: The leaves of the arguments.
        symbols, guards: Sizes and ints that may change, and what has to hold of them.
        sources: Where each input of the program comes from.
        values: Inputs, down to input slots.
        facts: What is known of each input slot.
        origins: Where the ints among the input slots are read.
        parameters_among: Inputs that are an `nn.Parameter`.
        inference: Input slots of tensors that were made in inference mode.
        offsets_matter: Whether the program depends on storage offsets.
        outputs, num_forward, tangents, tangent_items, grads: `desugar.ir.stages.Interface` as data.
        split: The forward and the backward; None in inference.
        forward: The forward.
        backwards: The backwards.
        result: The structure of the result.
        results: Its leaves.
    """

    parameters: tuple[Parameter, ...]
    arguments: tuple[tuple[str, Tree], ...]
    leaves: tuple[Leaf, ...]
    symbols: tuple[SymbolRecord, ...]
    guards: tuple[Extent, ...]
    sources: tuple[Source, ...]
    values: tuple[Value, ...]
    facts: tuple[Fact, ...]
    origins: tuple[Origin, ...]
    parameters_among: frozenset[int]
    inference: frozenset[int]
    offsets_matter: bool
    outputs: OutputsRecord
    num_forward: int
    tangents: tuple[tuple[int, Value], ...]
    tangent_items: tuple[TensorFacts, ...]
    grads: tuple[tuple[int, Value | None], ...]
    split: SplitRecord | None
    forward: GraphRecord
    backwards: tuple[BackwardRecord, ...]
    result: Tree
    results: tuple[Result | ConstantLeaf | FromLeaf | FromSize, ...]


# -------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """A parameter, buffer or other tensor that the function holds.

    Attributes:
        name, aliases: Its name in the module, or in the function; its other names there, if it is tied.
        leaf, is_parameter: What it is, with sizes that are constants; whether it is an `nn.Parameter`.
        data: Per plain tensor in it, its number among the weights of the file and the CRC-32 of its bytes; empty if it
            is supplied.
    """

    name: str
    aliases: tuple[str, ...]
    leaf: TensorLeaf | WrapperLeaf
    is_parameter: bool
    data: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What machine code runs on: the system, the processor and the instructions that the compiler could use."""

    system: str
    processor: str
    instructions: frozenset[str]


@dataclass(frozen=True, slots=True)
class ClassRecord:
    """A class of arguments, results or weights: its name, and a digest of its declaration."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a package says of itself.

    Attributes:
        release: The release of PyTorch that wrote it.
        machine, is_native: Where its machine code runs, and whether it has any.
        is_training: Whether its results have gradients.
        weights, programs: The weights and the programs.
    """

    release: str
    machine: Machine
    is_native: bool
    is_training: bool
    weights: tuple[WeightRecord, ...]
    programs: tuple[ProgramRecord, ...]
