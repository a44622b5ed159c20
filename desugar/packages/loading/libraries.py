"""Calls the libraries of a package: plain tensors and ints in, plain tensors and ints out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from desugar.backends.base import CompiledGraph
from desugar.codegen.text import targets_of
from desugar.ir.calling import Calling, Computed, Known, Passed
from subclasses.codegen.build import build_functions
from subclasses.codegen.emitter import Emitter


def library_call(calling: Calling, run: Callable[[list[Any]], list[Any]]) -> CompiledGraph:
    """Returns the function of a graph's list of inputs.

    One thread runs a library at a time. A second one would wait inside of PyTorch's loader, with Python's lock held,
    for the first, which may need that lock to delete a tensor.

    Args:
        calling: How the graph is called through its library.
        run: The library; it takes a list of tensors, and keeps none of them.
    """
    out = Emitter()
    out.reserve("call", "items", "results")
    lock = out.bind(threading.Lock(), "lock")
    out.writeline("def call(items):")
    with out.indent():
        arguments = [_argument(out, argument.index, is_int=argument.is_int) for argument in calling.arguments]
        computed = [output for output in calling.outputs if isinstance(output, Computed)]
        names = [f"r{output.index}" for output in computed]
        taken = "items" if calling.is_direct else f"[{', '.join(arguments)}]"
        if arguments or names:
            out.writeline(f"with {lock}:")
            with out.indent():
                out.writeline(f"results = {out.bind(run, 'run')}({taken})")
        if calling.is_direct:
            out.writeline("return results")
            return _build(out)
        if names:
            out.writeline(f"{targets_of(names)} = results")
        out.writeline(f"return [{', '.join(map(_output, calling.outputs))}]")
    return _build(out)


def _build(out: Emitter) -> CompiledGraph:
    return build_functions(out.source, out.namespace, filename="<library of a desugar package>")["call"]  # type: ignore[return-value]


def _argument(out: Emitter, index: int, *, is_int: bool) -> str:
    return f"{out.bind(torch.empty, 'empty')}((items[{index}], 0))" if is_int else f"items[{index}]"


def _output(output: Computed | Passed | Known) -> str:
    match output:
        case Computed(index, is_int):
            return f"r{index}.item()" if is_int else f"r{index}"
        case Passed(index):
            return f"items[{index}]"
        case Known(value):
            return repr(value)
