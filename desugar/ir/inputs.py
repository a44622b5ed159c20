"""The description of a program's inputs: their values, their plain tensors and ints, and where a call finds these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from desugar.ir.values import Plain, Value, Wrapper


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of an input slot at run time.

    Attributes:
        leaf: Index of the input leaf.
        path: Attribute path from the leaf to the plain tensor or int.
        method: For a symbol, the tensor method that returns it: "size" or "stride"; empty if the path leads to the int
            itself. None for a tensor.
        dim: The argument of the method; None if it has none.
    """

    leaf: int
    path: tuple[str, ...] = ()
    method: str | None = None
    dim: int | None = None

    @property
    def is_symbol(self) -> bool:
        """Whether the slot holds an int."""
        return self.method is not None

    def expression(self, *names: str) -> str:
        """Returns the expression that reads the input (`a0.values.size(0)`).

        Args:
            *names: A name of the leaf, and of each attribute on the path.
        """
        dim = "" if self.dim is None else self.dim
        return ".".join([*names, *([f"{self.method}({dim})"] if self.method else [])])

    def integer(self, method: str = "", dim: int | None = None) -> Origin:
        """Returns the origin of an int of this tensor, or of this object as an int."""
        return replace(self, method=method, dim=dim)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The inputs of a program.

    Attributes:
        values: One value per input leaf: argument leaves first, then captured tensors. Their slots are input slots.
        items: Input slot -> fake tensor or symbolic int.
        origins: Input slot -> its source at run time.
        num_arguments: The number of argument leaves in `values`.
        parameters: Indices of the argument leaves that are an `nn.Parameter`.
        inference: The places of the leaves and plain tensors that were made in inference mode.
        static: Slots of tensors that keep their addresses from call to call: parameters, buffers, captured tensors.
    """

    values: tuple[Value, ...]
    items: tuple[Any, ...]
    origins: tuple[Origin, ...]
    num_arguments: int
    parameters: frozenset[int]
    inference: frozenset[Origin]
    static: tuple[int, ...]

    @property
    def has_symbols(self) -> bool:
        """Whether a size, stride or int is a symbol."""
        return any(origin.is_symbol for origin in self.origins)

    @property
    def tensor_leaves(self) -> list[int]:
        """The input leaves that are tensors."""
        return [n for n, value in enumerate(self.values) if isinstance(value, Plain | Wrapper)]

    @property
    def tensor_slots(self) -> list[int]:
        """The input slots that hold tensors."""
        return [slot for slot, item in enumerate(self.items) if isinstance(item, Tensor)]
