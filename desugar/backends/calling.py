"""How a plain graph is called through a library that was compiled ahead of time; imports no compiler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a library: item `index` of the graph's inputs; an int is the first size of an empty tensor."""

    index: int
    is_int: bool = False


@dataclass(frozen=True, slots=True)
class Computed:
    """An output of a graph that is result `index` of its library; an int is a tensor of one number there."""

    index: int
    is_int: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """An output of a graph that is one of its inputs."""

    index: int


@dataclass(frozen=True, slots=True)
class Known:
    """An output of a graph that is a number, or None."""

    value: int | None


@dataclass(frozen=True, slots=True)
class Calling:
    """How a graph is called through its library.

    Attributes:
        arguments: The arguments of the library.
        outputs: One entry per output of the graph.
    """

    arguments: tuple[Argument, ...]
    outputs: tuple[Computed | Passed | Known, ...]

    @property
    def is_direct(self) -> bool:
        """Whether the library takes the graph's inputs in their order and returns its outputs."""
        in_order = all(a == Argument(n) for n, a in enumerate(self.arguments))
        return in_order and all(o == Computed(n) for n, o in enumerate(self.outputs))
