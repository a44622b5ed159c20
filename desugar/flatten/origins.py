"""Where a program finds its inputs at run time: in its argument leaves, their attributes and their sizes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of an input slot at run time.

    Attributes:
        leaf: Index of the input leaf; -1 where the slot holds the base of overlapping tensors.
        path: Attribute path from the leaf to the plain tensor or int.
        method: For a symbol, the method of the tensor there that returns it: "size", "stride" or "storage_offset";
            empty for an int that is there itself. None for a tensor.
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

    @property
    def name(self) -> str:
        """The leaf and its attribute path as text, with the name that a program gives its argument (`a0.values`)."""
        return ".".join([f"a{self.leaf}", *self.path])

    def expression(self, *names: str) -> str:
        """Returns the expression that reads the input (`a0.values.size(0)`).

        Args:
            *names: A name of the leaf, and of each attribute on the path.
        """
        dim = "" if self.dim is None else self.dim
        return ".".join([*names, *([f"{self.method}({dim})"] if self.method else [])])

    def field(self, name: str) -> Origin:
        """Returns the origin of an attribute of this object."""
        return Origin(self.leaf, (*self.path, name))

    def integer(self, method: str = "", dim: int | None = None) -> Origin:
        """Returns the origin of an int of this tensor, or of this object as an int."""
        return replace(self, method=method, dim=dim)

    def find(self, leaves: Sequence[Any]) -> Any:
        """Returns the tensor or object at this origin, from the argument leaves of a call."""
        return functools.reduce(getattr, self.path, leaves[self.leaf])
