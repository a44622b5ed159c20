"""The user's names for the arguments, results, tensors and sizes of one compilation."""

from __future__ import annotations

import re

from torch import fx

from desugar import _torch as torch_private
from desugar.ir.values import Same, Value, View, paths_of
from desugar.recording.listeners import Recording
from subclasses.layout import field_name

_EXTENT = re.compile(r"\.(size|stride)\(\d+\)$")


class Names:
    """The user's names for one compilation.

    Attributes:
        inputs, outputs: The compiler's records of arguments and results.
        mode: The fake mode of the arguments.
        places: Input slot of a plain tensor -> the user's expressions of it.
    """

    def __init__(self, recording: Recording) -> None:
        spec = recording.program.spec
        self.inputs, self.outputs, self.mode = spec.inputs, spec.outputs, recording.mode
        self._graph, arguments = recording.graph, recording.program.names
        more, results = len(self.inputs.values) - len(arguments), len(self.outputs.visible)
        self._names = {
            "input": [*arguments, *(f"tensor {n} of a rule" for n in range(1, more + 1))],
            "output": ["result"] if results == 1 else [f"result {n}" for n in range(1, results + 1)],
        }
        self.places: dict[int, list[str]] = {}
        for number, value in enumerate(self.inputs.values):
            for slot, path in paths_of(value):
                self.places.setdefault(slot, []).append(self.of("input", number, *path))

    def of(self, kind: str, number: int, *path: str) -> str:
        """Returns the name of an input or result leaf, or of its attribute; a hidden result has only its number."""
        names = self._names[kind]
        return ".".join(
            [names[number] if number < len(names) else f"{kind} {number}", *map(field_name, path)]
        )

    def of_source(self, value: Same | View) -> str:
        """Returns the name of the leaf that another leaf is the same object as, or a view of."""
        return self.of(value.of, value.index)

    def place(self, slot: int, default: str) -> str:
        """Returns the user's first expression of the plain tensor in an input slot."""
        return self.places.get(slot, [default])[0]

    def slots(self) -> list[str]:
        """Returns the source of each flat input: the attribute path of a tensor, the expression that reads an int."""
        return [
            origin.expression(self.of("input", origin.leaf, *origin.path)) for origin in self.inputs.origins
        ]

    def arguments(self, *, captured: bool) -> dict[str, Value]:
        """Returns input leaves by name: parameters, or the leaves captured by modules, closures, globals and rules.

        The sizes that Dynamo passes beside their tensors are in neither.
        """
        named = [(n, self.of("input", n), value) for n, value in enumerate(self.inputs.values)]
        return {
            name: value
            for n, name, value in named
            if not _EXTENT.search(name) and _is_captured(self._graph, n, name) == captured
        }

    def results(self) -> dict[str, Value]:
        """Returns result leaves by name."""
        return {self.of("output", n): value for n, value in enumerate(self.outputs.visible)}


def _is_captured(graph: fx.GraphModule, number: int, name: str) -> bool:
    """Whether a graph input is not an argument of the function, or belongs to a module."""
    nodes = graph.graph.find_nodes(op="placeholder")
    if number >= len(nodes):
        return not name.startswith("gradient")
    dynamos = torch_private.source_names(graph)[number]
    is_modules = name.startswith("self.") or "._parameters[" in dynamos or "._buffers[" in dynamos
    return is_modules or not torch_private.is_argument(nodes[number])
