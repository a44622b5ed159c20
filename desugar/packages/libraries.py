"""Calls the libraries of a package: plain tensors and ints in, plain tensors and ints out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from desugar.backends.ahead_of_time import Calling, Computed, Known, Passed
from desugar.backends.base import CompiledGraph
from desugar.codegen.text import targets_of
from subclasses.codegen.build import build_functions
from subclasses.codegen.emitter import Emitter


def library_call(calling: Calling, run: Callable[[list[Any]], list[Any]]) -> CompiledGraph:
    """Returns the function of a graph's list of inputs.

    Args:
        calling: How the graph is called through its library.
        run: The library; it takes a list of tensors, and keeps none of them.
    """
    if calling.is_direct:
        return run
    out = Emitter()
    out.reserve("call", "items")
    out.writeline("def call(items):")
    with out.indent():
        arguments = [_argument(out, argument.index, is_int=argument.is_int) for argument in calling.arguments]
        computed = [output for output in calling.outputs if isinstance(output, Computed)]
        names = [f"r{output.index}" for output in computed]
        if arguments or names:
            target = f"{targets_of(names)} = " if names else ""
            out.writeline(f"{target}{out.bind(run, 'run')}([{', '.join(arguments)}])")
        out.writeline(f"return [{', '.join(map(_output, calling.outputs))}]")
    return build_functions(out.source, out.namespace, filename="<library of a desugar package>")["call"]


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
