"""Where a program finds its inputs at run time: in its argument leaves, their attributes and their sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
