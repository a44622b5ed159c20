"""Compiles plain graphs to libraries that outlive the process, with AOTInductor.

AOTInductor's libraries take and return only tensors. So a library reads a symbol from a tensor that has it as a size.
Another int is passed as the size of an empty tensor. For an int that the graph returns, the library returns a tensor of
one number. An output that the graph does not compute (an input, None) is not a result of the library.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from desugar import _torch as torch_private
from desugar.backends.base import Backend, GraphKind
from desugar.backends.calling import Argument, Calling, Computed, Known, Passed
from desugar.backends.choose import inductor_backend
from desugar.backends.inductor_patches import tried_when_asked
from desugar.errors import PackageError
from desugar.ir.fx_utils import (
    Results,
    clone_aliased_results,
    copy_graph,
    fake_inputs,
    find_extent,
    input_storage_offsets,
    output_nodes,
)

log = logging.getLogger("desugar")


class Library:
    """A plain graph and the library that computes it; it cannot be called in this process.

    Attributes:
        graph: The plain graph.
        calling: The form of its call; where `is_direct`, the library takes all inputs of the graph in order.
        files: The files that AOTInductor made; empty if the graph computes nothing, or if only the graph is kept.
    """

    def __init__(self, graph: fx.GraphModule, calling: Calling, files: Sequence[Path] = ()) -> None:
        self.graph, self.calling, self.files = graph, calling, tuple(files)

    @property
    def is_computed(self) -> bool:
        """Whether the graph computes something."""
        return _computes(self.graph)

    def __call__(self, items: list[Any]) -> Any:
        """Raises, since a library is loaded from a package."""
        raise PackageError("this program was compiled for a package: load the package, and call it")


# ------------------------------------------------------------------------------------------------- backend


def library_backend(folder: Path | None, options: Mapping[str, Any] | None = None) -> Backend:
    """Returns a backend that compiles each graph to a library.

    Args:
        folder: The folder in which the libraries are built; None to keep only the graphs.
        options: Options of Inductor.
    """

    def compile_graph(graph: fx.GraphModule, inputs: list[Any], kind: GraphKind) -> Library:
        with plain.settings(), torch.no_grad():  # type: ignore[misc]
            return _compile(graph, kind, folder)

    plain = inductor_backend(None, options)
    return replace(plain, name="ahead of time", compile_graph=compile_graph, settings=None)


def _compile(graph: fx.GraphModule, kind: GraphKind, folder: Path | None) -> Library:
    original = copy_graph(graph)
    if any(not isinstance(start, int) or start != 0 for start in input_storage_offsets(graph)):
        raise PackageError("the function reads where in its storage a tensor begins: pass clones")
    if kind.role == "inference" and _computes(graph):
        before = Results.of(graph, kind.num_results)
        devices = torch_private.get_inputs_devices(fake_inputs(graph), graph)
        graph = torch_private.joint_graph_passes(graph, input_device=next(iter(devices)))
        clone_aliased_results(graph, before)
    calling = _take_tensors_only(graph)
    if not _computes(graph):
        return Library(original, Calling((), calling.outputs))
    if folder is None:
        return Library(original, calling)
    try:
        return Library(original, calling, _build(copy_graph(graph), kind, folder))
    except torch_private.InductorError as error:
        # Some lowerings need a guard on a size that may be 0 or 1.
        log.info("a library is compiled with guards on sizes 0 and 1: %s", str(error).partition("\n")[0])
        with torch_private.symbols_config.patch(backed_size_oblivious=False):
            return Library(original, calling, _build(graph, kind, folder))


@tried_when_asked()
def _build(graph: fx.GraphModule, kind: GraphKind, folder: Path) -> list[Path]:
    """Compiles a graph over tensors; returns the files of its library."""
    (output,) = graph.graph.find_nodes(op="output")
    # All strides are kept: the wrapper and the backward rely on the traced strides, and a library reports none.
    output.meta["user_visible_output_idxs"] = list(range(len(output_nodes(graph))))
    output_path = tempfile.mkdtemp(dir=folder)
    patches = {
        "cpp_wrapper": True,
        "aot_inductor.package": True,
        "aot_inductor.output_path": output_path,
        "size_asserts": False,
    }
    with torch_private.inductor_config.patch(patches), torch_private.V.set_aot_compilation(True):
        compiled = torch_private.compile_fx_inner(
            graph,
            fake_inputs(graph),
            cudagraphs=torch_private.BoxedBool(False),
            cpp_wrapper=True,
            is_inference=kind.role == "inference",
            is_backward=kind.role == "backward",
        )
    files = [Path(file) for file in compiled.filename if not str(file).endswith(".cpp")]
    _strip([file for file in files if file.suffix == ".so"])
    return files


def _strip(libraries: Sequence[Path]) -> None:
    """Removes the symbols that only a debugger reads (three quarters of a library), if `strip` is installed."""
    if (tool := shutil.which("strip")) is not None:
        subprocess.run([tool, "--strip-unneeded", *map(str, libraries)], check=False, capture_output=True)


def _computes(graph: fx.GraphModule) -> bool:
    return any(node.op == "call_function" for node in graph.graph.nodes)


# ------------------------------------------------------------------------------------------- tensors only


def _take_tensors_only(graph: fx.GraphModule) -> Calling:
    """Makes a graph take and return only tensors, in place; returns the form of its call."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    arguments = [
        Argument(n) if isinstance(node.meta["val"], Tensor) else _replace_int(graph, node, n, placeholders)
        for n, node in enumerate(placeholders)
    ]
    outputs, computed = [], []
    for node in output_nodes(graph):
        outputs.append(_output(node, placeholders, arguments, len(computed)))
        if isinstance(outputs[-1], Computed):
            computed.append(node)
    (output,) = graph.graph.find_nodes(op="output")
    output.args = (tuple(computed),)
    graph.recompile()
    return Calling(tuple(argument for argument in arguments if argument is not None), tuple(outputs))


def _replace_int(
    graph: fx.GraphModule, node: fx.Node, index: int, placeholders: Sequence[fx.Node]
) -> Argument | None:
    """Replaces an int input by a tensor's size; returns the argument that carries it, None if an input has the size."""
    value = node.meta["val"]
    extent = find_extent(value, placeholders)
    argument = None
    if extent is None:
        with graph.graph.inserting_before(node):
            carrier = graph.graph.placeholder(f"{node.name}_carrier")
        with torch_private.V.fake_mode:
            carrier.meta["val"] = torch.empty((value, 0))
        extent, argument = (carrier, 0), Argument(index, is_int=True)
    after = next(n for n in graph.graph.nodes if n.op != "placeholder")
    with graph.graph.inserting_before(after):
        size = graph.graph.call_function(torch.ops.aten.sym_size.int, extent)
    size.meta["val"] = value
    node.replace_all_uses_with(size)
    graph.graph.erase_node(node)
    return argument


def _output(
    node: Any, placeholders: Sequence[fx.Node], arguments: Sequence[Argument | None], position: int
) -> Computed | Passed | Known:
    if not isinstance(node, fx.Node):
        if node is not None and not isinstance(node, int):
            raise PackageError(f"a graph returns the constant {node!r}: return tensors and ints")
        return Known(node)
    if node in placeholders and arguments[placeholders.index(node)] == Argument(placeholders.index(node)):
        return Passed(placeholders.index(node))
    return Computed(position, is_int=isinstance(node.meta.get("val"), SymInt))
