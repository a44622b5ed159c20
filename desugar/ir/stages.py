"""Results of the stages: the traced joint graph, and the forward and backward graphs that it is split into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from desugar.ir.fx_utils import output_nodes
from desugar.ir.outputs import Outputs
from desugar.ir.values import Value

LeafFunction = Callable[[list[Any]], Any]  # a function of the list of argument leaves

# -------------------------------------------------------------------------------------------------- traced


@dataclass(frozen=True, slots=True)
class GradientCall:
    """One call of the `backward` of a `torch.autograd.Function`.

    While the graph is recorded, an entry is the list of plain tensors in one gradient. In a :class:`Traced`, an entry
    is the set of tangent slots that this gradient depends on. A gradient that is None has no entry.

    Attributes:
        received: One entry per gradient that `backward` received; empty where `backward` is known to be linear.
        returned: One entry per gradient that `backward` returned.
    """

    received: tuple[Any, ...]
    returned: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced function: the joint graph, and how its inputs and outputs map to argument and result leaves.

    Attributes:
        graph: Graph over plain tensors; takes the input slots, then the tangent slots.
        outputs: The forward's results and mutations.
        num_forward: How many of the graph's outputs are the forward's.
        tangents: (index in `outputs.values`, tangent value) per tangent; the value's slots are tangent slots.
        tangent_items: Fake tangents, by tangent slot.
        grads: (input leaf, value) per input leaf that requires grad; the value is None for a leaf without a gradient.
            Its slots index the graph's outputs after the forward's.
        calls: Calls of `backward` of autograd functions; empty unless several results require grad.
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
        """Whether the graph has a backward."""
        return bool(self.tangents)


# --------------------------------------------------------------------------------------------- partitioned


@dataclass(frozen=True, slots=True)
class FromInput:
    """A backward input: input slot `index` of the forward."""

    index: int


@dataclass(frozen=True, slots=True)
class FromForward:
    """A backward input: output `index` of the forward graph (a result or a saved value)."""

    index: int


@dataclass(frozen=True, slots=True)
class FromTangent:
    """A backward input: tangent slot `index`."""

    index: int


BackwardInput = FromInput | FromForward | FromTangent


@dataclass(frozen=True, slots=True)
class Partitioned:
    """Forward and backward graphs.

    Attributes:
        forward: Takes all input slots; returns `num_forward` results, then the saved values.
        backward: Takes `backward_inputs`; returns the gradients.
        num_forward: How many outputs of the forward graph are results.
        backward_inputs: The source of each input of the backward graph.
        depends: Per gradient output, the tangent slots that it depends on.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_forward: int
    backward_inputs: tuple[BackwardInput, ...]
    depends: tuple[frozenset[int], ...]

    @property
    def saved_bytes(self) -> int | None:
        """Bytes of the intermediate values saved for the backward; None if a size is symbolic."""
        total = 0
        for node in output_nodes(self.forward)[self.num_forward :]:
            value = node.meta["val"]
            if isinstance(value, Tensor):
                numel = value.numel()
                if not isinstance(numel, int):
                    return None
                total += numel * value.element_size()
        return total
