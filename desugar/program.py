"""A program: the plain graphs, values and runtime wrapper of one Dynamo graph, and the function that runs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from desugar.backward.variants import BackwardVariants
from desugar.codegen.direct_calls import call_directly
from desugar.ir.abstract_values import hint
from desugar.ir.stages import Graphs, ProgramSpec
from desugar.ir.values import Value, describe, kind_of


@dataclass(eq=False)
class Program:
    """The compiled form of a function for one signature.

    Attributes:
        spec: The description of the program.
        graphs: The plain graphs; `forward`, `backward` and `joint` return them.
        wrapper: The text of the runtime wrapper.
        variants: The backward variants; None if no result requires grad.
        run: Takes the argument leaves and returns a tuple. It checks no guards; its caller has checked them.
        is_whole: Whether the graph covers the whole function: no graph break ended it.
        names: The user's names for the arguments.
        is_stored: Whether the program was loaded from the store of programs.
    """

    spec: ProgramSpec
    graphs: Graphs
    wrapper: str
    variants: BackwardVariants | None
    run: Callable[..., tuple[Any, ...]] = field(init=False)
    is_whole: bool = True
    names: tuple[str, ...] = ()
    is_stored: bool = False

    @property
    def inputs(self) -> tuple[Value, ...]:
        """One value per input leaf: arguments, then captured tensors."""
        return self.spec.inputs.values

    @property
    def outputs(self) -> tuple[Value, ...]:
        """One value per result leaf."""
        return self.spec.outputs.visible

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for the backward besides inputs and results, at the sizes of the traced call."""
        split = self.spec.split
        saved = () if split is None else split.forward_outputs[split.num_forward :]
        return sum(hint(item.nbytes) for item in saved if isinstance(item, Tensor))

    @property
    def is_dynamic(self) -> bool:
        """Whether a size or an int of the inputs is a symbol."""
        return self.spec.inputs.has_symbols

    @property
    def origin(self) -> str:
        """The origin of the program: "compiled", or "loaded" from the store."""
        return "loaded" if self.is_stored else "compiled"

    @property
    def forward(self) -> fx.GraphModule:
        """The graph over plain tensors; returns the results, then the values saved for the backward."""
        return self.graphs().forward

    @property
    def backward(self) -> fx.GraphModule | None:
        """The graph over plain tensors that computes the gradients; None if no result requires grad."""
        return self.graphs().backward

    @property
    def joint(self) -> fx.GraphModule:
        """The graph before the partition (in inference, `forward` without effect sinks and stores into inputs)."""
        return self.graphs().joint

    def call_directly(self) -> None:
        """Makes the program call the code inside its compiled graphs; its caller then has to check for profilers."""
        call_directly(inspect.unwrap(self.run))
        if self.variants is not None:
            self.variants.call_directly()

    @property
    def source(self) -> str:
        """The text of all functions generated so far: the runtime wrapper, then each backward variant."""
        return "\n\n".join([self.wrapper, *(self.variants.texts if self.variants else ())])

    def __repr__(self) -> str:
        """Returns one line: the arguments and results, where the program comes from, and whether it has a backward."""
        kinds = [*map(kind_of, self.inputs)]
        takes = [f"{name}: {kind}" for name, kind in zip(self.names, kinds, strict=False)]
        takes += kinds[len(takes) :]  # captured tensors have no name
        facts = [self.origin, "training" if self.variants is not None else "inference"]
        facts += ["dynamic sizes"] * self.is_dynamic + ["part of the function"] * (not self.is_whole)
        shown = f"{_shortened(takes)} -> {_shortened([*map(kind_of, self.outputs)])}"
        return f"<Program {shown}; {', '.join(facts)}>"

    def __str__(self) -> str:
        lines = ["inputs:"] + [describe(value, "  ") for value in self.inputs]
        lines += ["outputs:"] + [describe(value, "  ") for value in self.outputs]
        lines += ["forward:", self.forward.print_readable(print_output=False)]
        if self.backward is not None:
            lines += ["backward:", self.backward.print_readable(print_output=False)]
        return "\n".join([*lines, "wrapper:", self.source])


def _shortened(parts: list[str]) -> str:
    """Returns a list as text, without all but the first four of many."""
    rest = len(parts) - 4
    return ", ".join(parts) if rest < 2 else f"{', '.join(parts[:4])} and {rest} more"
