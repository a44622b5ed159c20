"""The parts from which the text of one program is generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from desugar.backends.base import CompiledGraph
from desugar.flatten.inputs import Inputs
from desugar.ir.stages import Interface, Split


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts from which the text of one program is generated.

    Attributes:
        inputs, traced: The inputs and the traced function.
        forward: The compiled forward.
        otherwise: Runs the calls whose arguments share memory, have other storage offsets, or are DTensors of other
            sizes, where the program depends on these.
        partitioned: The forward and backward graphs; None in inference.
        autocast: Whether autocast is on for some device.
    """

    inputs: Inputs
    traced: Interface
    forward: CompiledGraph
    otherwise: Callable[..., Any]
    partitioned: Split | None = None
    autocast: bool = False
