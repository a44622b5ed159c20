"""What each stage makes of a function: the traced graph, and the two graphs that it is split into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from desugar.ir.fx_utils import output_nodes
from desugar.ir.outputs import Outputs
from desugar.ir.values import Value

LeafFunction = Callable[[list[Any]], Any]  # takes the argument leaves of a call

# -------------------------------------------------------------------------------------------------- traced


@dataclass(frozen=True, slots=True)
class GradientCall:
    """A call of an autograd function's `backward`: of what each gradient is made.

    Attributes:
        arriving: Per gradient that it got.
        given: Per gradient that it gave.
    """

    arriving: tuple[Any, ...]
    given: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced function: the graph and how its arguments and results map to the outside.

    Attributes:
        graph: Plain-tensor graph; takes the inputs' slots, then the tangents.
        outputs: The forward's results.
        num_forward: How many of the graph's outputs are the forward's.
        tangents: Per tangent value: (output leaf, value); its slots index the graph's tangent inputs.
        tangent_items: Fake tangents, by slot.
        grads: One value per input leaf that requires grad (None where it gets no gradient); slots index the
            graph's outputs after the forward's.
        calls: Of backwards of autograd functions, where there are several results.
    """

    graph: fx.GraphModule
    outputs: Outputs
    num_forward: int
    tangents: tuple[tuple[int, Value], ...] = ()
    tangent_items: tuple[Tensor, ...] = ()
    grads: tuple[tuple[int, Value | None], ...] = ()
    calls: tuple[GradientCall, ...] = ()

    @property
    def is_training(self) -> bool:
        """Whether there is a backward."""
        return bool(self.tangents)


# --------------------------------------------------------------------------------------------- partitioned


@dataclass(frozen=True, slots=True)
class FromInput:
    """A backward input that is input slot `index` of the forward."""

    index: int


@dataclass(frozen=True, slots=True)
class FromForward:
    """A backward input that is output `index` of the forward graph (a result or a saved value)."""

    index: int


@dataclass(frozen=True, slots=True)
class FromTangent:
    """A backward input that is tangent slot `index`."""

    index: int


BackwardInput = FromInput | FromForward | FromTangent


@dataclass(frozen=True, slots=True)
class Partitioned:
    """Forward and backward graphs.

    Attributes:
        forward: Takes all input slots; returns `num_forward` results, then the saved values.
        backward: Takes `backward_inputs`; returns the gradients.
        backward_inputs: Where each comes from.
        depends: Per gradient output, the tangent slots that it depends on.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_forward: int
    backward_inputs: tuple[BackwardInput, ...]
    depends: tuple[frozenset[int], ...]

    @property
    def saved_bytes(self) -> int | None:
        """Bytes of the intermediates saved for the backward; None if a size is symbolic."""
        total = 0
        for node in output_nodes(self.forward)[self.num_forward :]:
            value = node.meta["val"]
            if isinstance(value, Tensor):
                numel = value.numel()
                if not isinstance(numel, int):
                    return None
                total += numel * value.element_size()
        return total
