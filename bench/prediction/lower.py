"""Lowers plain graphs for the fake device, compiles their kernels, and runs the generated code on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from bench.prediction import _torch as private
from bench.prediction.devices import Device
from bench.prediction.fake import FakeDevice
from bench.prediction.recorder import Call, Compiled as CompiledKernel, Recorder
from bench.prediction.records import Kernel, Stage
from bench.prediction.roofline import predict_kernel
from desugar.backends.base import Backend, GraphKind
from desugar.ir.abstract_values import hint
from desugar.ir.fx_utils import fake_inputs

Compiled = Callable[[list[Any]], Any]

# ------------------------------------------------------------------------------------------------ one graph


def lower(
    fake: FakeDevice, graph: fx.GraphModule, inputs: Sequence[Any], name: str, compile: Callable[[], Any]
) -> tuple[Any, Stage]:
    """Compiles a graph and runs the result on fake tensors.

    Args:
        fake: The device.
        graph: The graph, over plain tensors.
        inputs: Its inputs, fake tensors and ints, maybe of symbolic sizes.
        name: "inference", "forward" or "backward".
        compile: Compiles the graph.

    Returns:
        The compiled graph, and the record of the kernels that it would run.
    """
    against = _first_node_against_cuda_graphs(graph)
    sizes = _sizes(inputs)
    with fake.recording() as recorder:
        compiled = compile()
        stopped = _run(fake, recorder, compiled, [_concrete(fake, x) for x in inputs])
    stage = Stage(
        name,
        describe_calls(fake, recorder),
        tuple(dict.fromkeys(call.name for call in recorder.calls if call.waits))
        + ((stopped,) if stopped else ()),
        tuple(call.name for call in recorder.calls if call.kind == "copy"),
        _reasons(recorder, against, stopped),
        sizes,
        getattr(compiled, "source_code", "") or "",
    )
    return compiled, stage


def _run(fake: FakeDevice, recorder: Recorder, compiled: Any, inputs: list[Any]) -> str:
    """Runs generated code on fake tensors; returns the op at which it needs data, if there is one."""
    run = getattr(compiled, "current_callable", None) or compiled
    try:
        with recorder.watching(fake.mode):
            run(inputs)
    except (private.DataDependentOutputException, private.DynamicOutputShapeException) as error:
        return f"{error.func} needs data; the ops after it are not counted"
    return ""


def _concrete(fake: FakeDevice, value: Any) -> Any:
    """Returns an input with the sizes of the traced call."""
    if isinstance(value, SymInt):
        return hint(value)
    if not isinstance(value, Tensor):
        return value
    size, stride = ([hint(extent) for extent in extents] for extents in (value.shape, value.stride()))
    with fake.mode:
        return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


def _sizes(inputs: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """Returns the symbols in the sizes of inputs, and their values."""
    sizes: dict[str, int] = {}
    for value in inputs:
        for extent in (value,) if isinstance(value, SymInt) else getattr(value, "shape", ()):
            if isinstance(extent, SymInt) and not isinstance(extent, int):
                sizes[str(extent)] = hint(extent)
    return tuple(sorted(sizes.items()))


def _first_node_against_cuda_graphs(graph: fx.GraphModule) -> str:
    node = private.first_node_against_cuda_graphs(graph)
    return "" if node is None else f"{node.name}: {node.target}"


def _reasons(recorder: Recorder, node: str, stopped: str) -> tuple[str, ...]:
    """Returns why a CUDA graph cannot be recorded."""
    reasons = [node, stopped]
    for call in recorder.calls:
        if call.waits:
            reasons.append(f"{call.name} makes the host wait for the device")
        elif call.touches_host or call.kind == "host":
            reasons.append(f"{call.name} uses a tensor of the host")
    return tuple(dict.fromkeys(filter(None, reasons)))


# ------------------------------------------------------------------------------------------------ calls as records


def describe_calls(fake: FakeDevice, recorder: Recorder) -> tuple[Kernel, ...]:
    """Returns the kernels behind calls; equal calls are one kernel that is launched several times."""
    counts: dict[Kernel, int] = {}
    for call in recorder.calls:
        kernel = _describe(fake, recorder, call)
        counts[kernel] = counts.get(kernel, 0) + 1
    return tuple(replace(kernel, launches=number) for kernel, number in counts.items())


def _describe(fake: FakeDevice, recorder: Recorder, call: Call) -> Kernel:
    traffic, compiled = call.traffic, recorder.compiled.get(call.name)
    if compiled is not None:
        _check_shared_memory(fake.device, call.name, compiled)
    reads, writes = sum(traffic.reads.values()), sum(traffic.writes.values())
    seconds, bound = predict_kernel(
        fake.device, reads + writes, traffic.flops, call.dtype, on_matrix_units=call.kind == "library"
    )
    return Kernel(
        call.name,
        call.kind,
        traffic.ops,
        1,
        reads,
        writes,
        _by_name(traffic.reads),
        _by_name(traffic.writes),
        traffic.flops,
        seconds,
        bound,
        compiled and compiled.registers,
        compiled and compiled.shared_memory,
        compiled and compiled.spills,
        0 if compiled is None else compiled.configurations,
    )


def _check_shared_memory(device: Device, name: str, compiled: CompiledKernel) -> None:
    """Raises a RuntimeError for a kernel that the device cannot start; of several configurations, others may fit."""
    if compiled.configurations <= 1 and compiled.shared_memory > device.shared_memory:
        raise RuntimeError(
            f"expected kernels of at most {device.shared_memory} bytes of shared memory, the limit of a block on "
            f"{device.title}, got {name} with {compiled.shared_memory}: give it smaller blocks or fewer stages"
        )


def _by_name(by_dtype: dict[torch.dtype, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((str(dtype).removeprefix("torch."), number) for dtype, number in by_dtype.items()))


# ------------------------------------------------------------------------------------------------ backends


def recording_backend(fake: FakeDevice, backend: Backend, stages: list[Stage]) -> Backend:
    """Returns a backend of `desugar.compile` that appends the record of each graph that it compiles."""

    def compile_graph(graph: fx.GraphModule, inputs: list[Any], kind: GraphKind) -> Any:
        taken = fake_inputs(graph)  # Inductor may change the list
        compiled, stage = lower(
            fake, graph, taken, kind.role, lambda: backend.compile_graph(graph, inputs, kind)
        )
        stages.append(stage)
        return compiled

    return replace(backend, compile_graph=compile_graph)


def recording_stock(fake: FakeDevice, stages: list[Stage]) -> Callable[..., Any]:
    """Returns a backend of Dynamo that is stock `torch.compile` and appends the record of each graph."""

    def compile_graph(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        name = (
            "backward"
            if options.get("is_backward")
            else "inference"
            if options.get("is_inference")
            else "forward"
        )
        taken = fake_inputs(graph)
        compiled, stage = lower(
            fake, graph, taken, name, lambda: private.compile_fx_inner(graph, inputs, **options)
        )
        stages.append(stage)
        return compiled

    def backend(graph: Any, inputs: list[Any]) -> Any:
        with private.functorch_config.patch(force_non_lazy_backward_lowering=True):
            return private.compile_fx(graph, inputs, inner_compile=compile_graph)

    return backend
