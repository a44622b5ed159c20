"""One compiled graph: its plain graphs, its layouts, the text of its wrapper, and the function that runs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from desugar.ir.values import Value, describe
from desugar.wrapper.backward_variants import BackwardVariants
from desugar.wrapper.direct_calls import call_directly


@dataclass(eq=False)
class Program:
    """What one signature of a function was compiled to.

    Attributes:
        forward: Graph over plain tensors; returns results, then what is saved for the backward.
        backward: Graph over plain tensors, or None where nothing requires grad.
        joint: The graph before it was split (equal to `forward` in inference).
        inputs: One value per input leaf: arguments, then captured tensors.
        outputs: One value per leaf of the result.
        wrapper: The text of the generated wrapper.
        variants: The backwards, or None where nothing requires grad.
        saved_bytes: Bytes saved for the backward besides inputs and results; None if symbolic.
        run: Takes the argument leaves and returns a tuple; whoever calls it has proved that the call fits.
        is_whole: The graph is all of a function, which no graph break has ended.
        names: What the user calls the arguments.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    joint: fx.GraphModule
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    wrapper: str
    variants: BackwardVariants | None
    saved_bytes: int | None
    run: Callable[..., tuple[Any, ...]]
    is_dynamic: bool = False
    is_whole: bool = True
    names: tuple[str, ...] = ()

    def call_directly(self) -> None:
        """Has the program call the code inside its graphs; whoever calls it asks for profilers."""
        call_directly(inspect.unwrap(self.run))
        if self.variants is not None:
            self.variants.call_directly()

    @property
    def source(self) -> str:
        """The text of everything generated so far: the wrapper, then each backward that was needed."""
        return "\n\n".join([self.wrapper, *(self.variants.sources if self.variants else ())])

    def __str__(self) -> str:
        lines = ["inputs:"] + [describe(value, "  ") for value in self.inputs]
        lines += ["outputs:"] + [describe(value, "  ") for value in self.outputs]
        lines += ["forward:", self.forward.print_readable(print_output=False)]
        if self.backward is not None:
            lines += ["backward:", self.backward.print_readable(print_output=False)]
        return "\n".join([*lines, "wrapper:", self.source])
