"""The description of a program, and the results of the stages: traced, partitioned and compiled graphs.

The passes work on the graphs. The runtime wrapper is written from one description of a program (`ProgramSpec`), which
the store and packages write to files. So a program from a file needs no graph: its graphs are loaded on first use
(`Graphs`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from desugar.ir.fx_utils import fake_inputs, find_random_op, output_items, output_nodes
from desugar.ir.values import Plain, Value, View, Wrapper, slots_of

LeafFunction = Callable[[list[Any]], Any]  # a function of the list of argument leaves

# -------------------------------------------------------------------------------------------------- inputs


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


# ------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class Outputs:
    """The results and the mutations of a function.

    Attributes:
        num_visible: The number of result leaves.
        values: One value per result leaf, then one per hidden result: bases of views, new values of mutated inputs,
            replaced inner tensors.
        items: Fake tensors and symbolic ints, by output slot.
        inputs: Output slot -> input slot, for each output that is an input itself.
        writes: (input leaf, index in `values`) of each mutated input whose write autograd recorded. The runtime wrapper
            copies the value into the input after the call.
        stores: (input slot, output slot) of each other mutated input tensor. The graph stores the output in it.
        stored_views: (output slot, input slot) of each computed inner tensor in the memory of an input in `stores`.
        versions: (input leaf, attribute path, increase of the version counter) of each mutated tensor.
        assigns: (input leaf, name, index in `values`) of each inner tensor that the function replaced.
        tokens: Output slots of the last effect tokens.
    """

    num_visible: int
    values: tuple[Value, ...]
    items: tuple[Any, ...]
    inputs: Mapping[int, int]
    writes: tuple[tuple[int, int], ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    versions: tuple[tuple[int, tuple[str, ...], int], ...] = ()
    assigns: tuple[tuple[int, str, int], ...] = ()
    tokens: tuple[int, ...] = ()
    stored_views: tuple[tuple[int, int], ...] = ()

    @property
    def positions(self) -> dict[int, int]:
        """Output slot -> index among the graph's outputs, for each output that the graph computes, in their order."""
        returned = (slot for slot in range(len(self.items)) if slot not in self.inputs)
        return {slot: n for n, slot in enumerate(returned)}

    @property
    def store_positions(self) -> dict[int, int]:
        """Input slot -> index of the graph output that the graph stores in it."""
        positions = self.positions
        return {slot: positions[value] for slot, value in self.stores}

    @property
    def token_positions(self) -> list[int]:
        """The indices of the graph outputs that are effect tokens."""
        return [n for slot, n in self.positions.items() if slot in self.tokens]

    @property
    def unread_positions(self) -> set[int]:
        """The indices of the graph outputs that the runtime wrapper does not read: stored outputs and effect tokens."""
        return {*self.store_positions.values(), *self.token_positions}

    @property
    def visible(self) -> tuple[Value, ...]:
        """The values of the result leaves, without the hidden results."""
        return self.values[: self.num_visible]

    @property
    def has_effects(self) -> bool:
        """Whether the function mutates its inputs or assigns to their inner tensors."""
        return bool(self.versions or self.assigns)

    def with_views_of(self, earlier: Outputs) -> Outputs:
        """Returns a copy with the :class:`View` values of an earlier run of the same function."""
        pairs = zip(self.values, earlier.values, strict=True)
        return replace(self, values=tuple(old if isinstance(old, View) else new for new, old in pairs))

    def written_slots(self, values: Sequence[Value]) -> set[int]:
        """Returns the input slots whose memory the program changes, in the graph or after it.

        Args:
            values: One value per input leaf.
        """
        written = (values[leaf] for leaf, _ in self.writes)
        return {slot for slot, _ in self.stores}.union(*map(slots_of, written))


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
class Interface:
    """How the inputs and outputs of a traced graph map to argument and result leaves.

    Attributes:
        outputs: The forward's results and mutations.
        num_forward: How many of the graph's outputs are the forward's.
        tangents: (index in `outputs.values`, tangent value) per tangent; the value's slots are tangent slots.
        tangent_items: Fake tangents, by tangent slot.
        grads: (input leaf, value) per input leaf that requires grad; the value is None for a leaf without a gradient.
            Its slots index the graph's outputs after the forward's.
        calls: Calls of `backward` of autograd functions; empty unless several results require grad.
        offsets_matter: Whether the graph depends on storage offsets of the inputs.
    """

    outputs: Outputs
    num_forward: int
    tangents: tuple[tuple[int, Value], ...] = ()
    tangent_items: tuple[Tensor, ...] = ()
    grads: tuple[tuple[int, Value | None], ...] = ()
    calls: tuple[GradientCall, ...] = ()
    offsets_matter: bool = False


@dataclass(frozen=True, slots=True)
class Traced(Interface):
    """A traced function.

    Attributes:
        graph: Graph over plain tensors; takes the input slots, then the tangent slots.
    """

    graph: fx.GraphModule = field(kw_only=True)

    @property
    def interface(self) -> Interface:
        """The description, without the graph."""
        return Interface(*(getattr(self, one.name) for one in fields(Interface)))


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


# ---------------------------------------------------------------------------------------------- the program


class PlainGraphs(NamedTuple):
    """The plain graphs of a program; `backward` is None in inference."""

    joint: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule | None


Graphs = Callable[[], PlainGraphs]  # a stored program loads its graphs from the store on first use


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """Describes the forward and backward graphs.

    Attributes:
        num_forward, backward_inputs, depends: As in :class:`Partitioned`.
        forward_outputs: Per output of the forward, its fake tensor or symbolic number; None where it returns None.
        backward_items: Per input of the backward, its fake tensor or symbolic number.
        gradients: Per output of the backward, its fake tensor or symbolic number; None where it returns None.
        saved_from: Input slots from which a saved intermediate is computed.
        random_op: The name of the first op of the forward that draws random numbers; None if there is none.
    """

    num_forward: int
    backward_inputs: tuple[BackwardInput, ...]
    depends: tuple[frozenset[int], ...]
    forward_outputs: tuple[Any, ...]
    backward_items: tuple[Any, ...]
    gradients: tuple[Any, ...]
    saved_from: frozenset[int]
    random_op: str | None

    @staticmethod
    def of(partitioned: Partitioned) -> PartitionSpec:
        """Describes split graphs after all passes."""
        return PartitionSpec(
            partitioned.num_forward,
            partitioned.backward_inputs,
            partitioned.depends,
            output_items(partitioned.forward),
            tuple(fake_inputs(partitioned.backward)),
            output_items(partitioned.backward),
            _slots_behind_saved(partitioned),
            find_random_op(partitioned.forward),
        )


AutocastState = tuple[tuple[str, bool, torch.dtype], ...]  # (device type, whether enabled, dtype) for each


def autocast_state() -> AutocastState:
    """Returns (device type, whether autocast is enabled, autocast dtype) for the CPU and CUDA."""
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )


@contextlib.contextmanager
def restore_autocast(state: AutocastState) -> Iterator[None]:
    """Restores an autocast state inside the context.

    A device type that is off both in `state` and now is skipped.
    """
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in state:
            if enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """The description of a program: all that its generated text depends on, without a graph and without a real tensor.

    Attributes:
        inputs: The inputs.
        interface: The results and gradients.
        split: The forward and backward; None in inference.
        autocast: The state of autocast at compilation.
    """

    inputs: InputSpec
    interface: Interface
    split: PartitionSpec | None
    autocast: AutocastState

    @property
    def outputs(self) -> Outputs:
        """The results and mutations."""
        return self.interface.outputs

    @property
    def is_autocast(self) -> bool:
        """Whether autocast is enabled for a device type."""
        return any(enabled for _, enabled, _ in self.autocast)


@dataclass(frozen=True, slots=True)
class CompiledGraphs:
    """The result of all stages before the runtime wrapper.

    Attributes:
        spec: The description of the program.
        graphs: The plain graphs.
        forward: The compiled forward.
        captured: The captured tensors, which the program holds by reference.
    """

    spec: ProgramSpec
    graphs: Graphs
    forward: Callable[[list[Any]], Any]
    captured: tuple[Tensor, ...] = ()


def _slots_behind_saved(partitioned: Partitioned) -> frozenset[int]:
    """Returns the input slots from which a saved intermediate is computed."""
    outputs = output_nodes(partitioned.forward)
    seen: set[fx.Node] = {outputs[s.index] for s in partitioned.backward_inputs if isinstance(s, FromForward)}
    for node in reversed(partitioned.forward.graph.nodes):
        if node in seen:
            seen.update(node.all_input_nodes)
    placeholders = partitioned.forward.graph.find_nodes(op="placeholder")
    return frozenset(n for n, node in enumerate(placeholders) if node in seen)


def presence_bits(present: tuple[bool, ...]) -> str:
    """Returns which gradients arrive as text: `10` if only the first of two does."""
    return "".join("1" if is_present else "0" for is_present in present)
