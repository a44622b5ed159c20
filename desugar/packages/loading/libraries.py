"""Calls the libraries of a package: plain tensors and ints in, plain tensors and ints out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from desugar.backends.base import CompiledGraph
from desugar.ir.calling import Calling, Computed, Known, Passed


def library_call(calling: Calling, run: Callable[[list[Any]], list[Any]]) -> CompiledGraph:
    """Returns the function of a graph's list of inputs.

    One thread runs a library at a time. A second one would wait inside of PyTorch's loader, with Python's lock held,
    for the first, which may need that lock to delete a tensor.

    Args:
        calling: How the graph is called through its library.
        run: The library; it takes a list of tensors, and keeps none of them.
    """
    lock, empty = threading.Lock(), torch.empty
    places = [(argument.index, argument.is_int) for argument in calling.arguments]

    def call_directly(items: list[Any]) -> list[Any]:
        with lock:
            return run(items)

    def call(items: list[Any]) -> list[Any]:
        arguments = [empty((items[index], 0)) if is_int else items[index] for index, is_int in places]
        with lock:
            results = run(arguments)
        return [_output(output, items, results) for output in calling.outputs]

    return call_directly if calling.is_direct else call


def _output(output: Computed | Passed | Known, items: Sequence[Any], results: Sequence[Any]) -> Any:
    match output:
        case Computed(index, is_int):
            return results[index].item() if is_int else results[index]
        case Passed(index):
            return items[index]
        case Known(value):
            return value
