"""A prediction as text: a table of the ways, then the kernels of each."""

from __future__ import annotations

from collections.abc import Iterator

from desugar.explain.text import bytes_text, count, duration
from desugar.prediction.records import Kernel, Prediction, Stage, Way

_MOST = 12  # kernels of a stage that a terminal is shown, those that take the longest
_OPS = 6  # ops of a kernel that are named


def render_prediction(prediction: Prediction) -> str:
    """Everything about one prediction."""
    return "\n".join(_lines(prediction)) + "\n"


def _lines(prediction: Prediction) -> Iterator[str]:
    made = ", ".join(f"{name} {version}" for name, version in prediction.versions)
    yield f"== predicted: {prediction.name} on {prediction.device} =="
    yield f"nothing was run or measured; {made}; figures of the device: {prediction.source}"
    for way in prediction.ways:
        yield _overview(way)
    for way in prediction.ways:
        for stage in way.stages:
            yield ""
            yield from _stage(way, stage)


def _overview(way: Way) -> str:
    if way.error:
        return f"{way.name}: not predicted: {way.error}"
    graphed = "" if way.graphed_seconds is None else f", {duration(way.graphed_seconds)} in CUDA graphs"
    return (
        f"{way.name}: predicted {duration(way.seconds)}{graphed} "
        f"({count(way.launches, 'launch', 'launches')}, {bytes_text(way.bytes)}, {way.flops:.3g} operations, "
        f"kernels alone {duration(way.roofline)})"
    )


def _stage(way: Way, stage: Stage) -> Iterator[str]:
    yield f"-- {way.name}, {stage.name} --"
    if stage.sizes:
        yield "symbolic sizes: " + ", ".join(f"{name} = {value} here" for name, value in stage.sizes)
    if stage.synchronizations:
        yield f"the host waits for the device at: {', '.join(stage.synchronizations)}"
    if stage.copies:
        yield f"copies between host and device: {', '.join(stage.copies)}"
    if stage.no_cuda_graph:
        yield f"no CUDA graph: {'; '.join(stage.no_cuda_graph)}"
    else:
        yield "can be a CUDA graph" + (", one for each size" if stage.sizes else "")
    slowest = sorted(stage.kernels, key=lambda kernel: -kernel.seconds * kernel.launches)[:_MOST]
    for kernel in (kernel for kernel in stage.kernels if kernel in slowest):
        yield from _kernel(kernel)
    if len(stage.kernels) > len(slowest):
        yield f"{len(stage.kernels) - len(slowest)} more, which take less time; to_dict has them all"


def _kernel(kernel: Kernel) -> Iterator[str]:
    times = f"{kernel.launches} x " if kernel.launches > 1 else ""
    yield (
        f"{kernel.name} ({kernel.kind}): predicted {times}{duration(kernel.seconds)}, for {kernel.bound}; "
        f"reads {_by_dtype(kernel.reads_by_dtype)}, writes {_by_dtype(kernel.writes_by_dtype)}"
    )
    if kernel.kind == "triton":
        more = f", and {len(kernel.fuses) - _OPS} more" if len(kernel.fuses) > _OPS else ""
        yield f"    fuses {', '.join(kernel.fuses[:_OPS])}{more}"
    if kernel.registers is not None:
        spills = f", {kernel.spills} bytes of stack a thread" if kernel.spills else ""
        yield (
            f"    {kernel.registers} registers a thread, {bytes_text(kernel.shared_memory or 0)} shared{spills}; "
            f"the first of {count(kernel.configurations, 'configuration')}"
        )


def _by_dtype(found: tuple[tuple[str, int], ...]) -> str:
    return " + ".join(f"{bytes_text(number)} {dtype}" for dtype, number in found if number) or "nothing"
