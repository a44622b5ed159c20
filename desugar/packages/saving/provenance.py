"""Finds out where the numbers and objects in a result come from, by running Dynamo's code on probes.

The code that Dynamo makes of a function takes the arguments apart, calls the graph, and builds the result. A size in
the result may be an output of the graph, a constant, or read from an argument by this code. So the code is run once
with probes in place of the arguments: they answer as the arguments do, and the ints that they return know where they
were read. No guard is checked, and the graph is not run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as private
from desugar.errors import PackageError
from desugar.ir.values import dynamic_names, inner_names, is_wrapper
from desugar.packages.manifest.records import FromLeaf, FromSize
from desugar.packages.manifest.structure import Flattened, build


class ProbeInt(int):
    """An int that knows where it was read."""

    source: FromLeaf | FromSize


class Probe:
    """Stands for a tensor of an argument.

    Attributes:
        source: Where it is in the arguments.
    """

    def __init__(self, real: Tensor, source: FromLeaf) -> None:
        self.source, self._real = source, real

    def __getattr__(self, name: str) -> Any:
        if name == "shape":
            return self.size()
        value = getattr(self._real, name)
        known = (*inner_names(self._real), *dynamic_names(type(self._real))) if is_wrapper(self._real) else ()
        if name in known:
            return probe(value, FromLeaf(self.source.index, (*self.source.path, name)))
        if callable(value) or isinstance(value, Tensor):
            raise PackageError(f"the result is built with .{name} of an argument, outside of the graph")
        return value

    def size(self, dim: int | None = None) -> Any:
        """Returns the size, or that of one dimension, as probes."""
        return self._extents("size", self._real.size(), dim)

    def stride(self, dim: int | None = None) -> Any:
        """Returns the stride, or that of one dimension, as probes."""
        return self._extents("stride", self._real.stride(), dim)

    def _extents(self, method: str, extents: Sequence[int], dim: int | None) -> Any:
        read = [_probe_int(n, FromSize(*self._place(), method, d)) for d, n in enumerate(extents)]
        return (torch.Size(read) if method == "size" else tuple(read)) if dim is None else read[dim]

    def _place(self) -> tuple[int, tuple[str, ...]]:
        return self.source.index, self.source.path


def probe(value: Any, source: FromLeaf) -> Any:
    """Returns the probe of a tensor or an int; anything else, which is a constant of the program, unchanged."""
    if isinstance(value, Tensor):
        return Probe(value, source)
    return _probe_int(value, source) if type(value) is int else value


def _probe_int(value: int, source: FromLeaf | FromSize) -> ProbeInt:
    made = ProbeInt(value)
    made.source = source
    return made


def run_on_probes(function: Callable[..., Any], bound: tuple[Any, ...], flattened: Flattened) -> Any:
    """Runs the code that Dynamo made of a function on probes of the arguments, and returns the result.

    Raises:
        PackageError: There is no such code, or it does more than to build the result.
    """
    made = [entry.code for entry in private.cache_entries(function.__code__)]
    made = [code for code in made if any(name.startswith("__compiled_fn") for name in code.co_names)]
    if len(made) != 1:
        raise PackageError(f"expected one graph of the function, Dynamo made {len(made)}")
    code = types.FunctionType(
        made[0], function.__globals__, "probed", function.__defaults__, function.__closure__
    )
    code.__kwdefaults__ = function.__kwdefaults__
    probes: list[Any] = []
    for number, leaf in enumerate(flattened.leaves):
        first = next(n for n, other in enumerate(flattened.leaves) if other is leaf)
        is_same = first < number and isinstance(leaf, Tensor)
        probes.append(probes[first] if is_same else probe(leaf, FromLeaf(number, ())))
    arguments = {name: build(tree, probes) for name, tree in flattened.arguments}
    args, kwargs = flattened.arrange(arguments)
    try:
        return code(*bound, *args, **kwargs)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise PackageError(f"the result is built by Python that a package cannot hold: {error}") from error
