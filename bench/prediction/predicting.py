"""Predicts one call of a function on a device: desugared, compiled by stock `torch.compile`, and op by op."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from bench.prediction import _torch as private
from bench.prediction.devices import Device
from bench.prediction.fake import FakeDevice, fake_device, move
from bench.prediction.lower import recording_backend, recording_stock
from bench.prediction.records import Prediction, Stage, Way
from bench.prediction.roofline import predict_program
from desugar.api import capture
from desugar.backends.base import Backend
from desugar.backends.choose import choose_backend
from desugar.errors import DesugarError

OURS, STOCK, EAGER = "desugar.compile", "torch.compile", "op by op"


def predict(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    device: str | Device = "h100",
    dynamic: bool | None = None,
    ways: tuple[str, ...] = (OURS, STOCK, EAGER),
) -> Prediction:
    """Predicts the kernels of one call on a device; neither the call nor a kernel is run.

    The tensors of the arguments, of modules and of closures are replaced by fake tensors on the device, so they may be
    anywhere. If a result requires grad, the backward for all gradients is predicted, too.

    Args:
        fn: A function or module.
        args: The positional arguments; they are not changed.
        kwargs: The keyword arguments.
        device: A device, or the name of one in `bench.prediction.DEVICES`.
        dynamic: Which sizes are symbolic, as for `torch.compile`; the figures are for the sizes of this call.
        ways: The names of the ways to predict. "op by op" runs each op of the desugared graph as a kernel of its own.

    Returns:
        The kernels, bytes and predicted times of each way. A way that does not work has an `error`.

    Raises:
        ValueError: The table has no such device.
        RuntimeError: PyTorch's CUDA build with Triton is not installed, or is of a release that does not fit.
    """
    with fake_device(device) as fake:
        moved = move(fake, fn, args, kwargs or {})
        return predict_moved(fake, *moved, dynamic=dynamic, ways=ways)


def predict_moved(
    fake: FakeDevice,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic: bool | None = None,
    ways: tuple[str, ...] = (OURS, STOCK, EAGER),
) -> Prediction:
    """Predicts one call whose tensors are fake tensors of an open `fake_device`, as :func:`predict`."""
    backends = {OURS: lambda: choose_backend("inductor"), EAGER: _op_by_op}

    def compile(way: str, stages: list[Stage]) -> None:
        if way == STOCK:
            stock: Any = recording_stock(fake, stages)
            capture(fn, args, kwargs, stock, dynamic=dynamic, compile_graph=_call)
            return
        backend = recording_backend(fake, backends[way](), stages)
        program = capture(fn, args, kwargs, backend, dynamic=dynamic)
        if program.variants is not None:
            del stages[1:]  # a backward for the expected gradients, which may be fewer than all
            program.variants.compile_ahead((True,) * len(program.variants.interface.tangents))

    names = (getattr(fn, "__qualname__", ""), type(fn).__name__)
    return Prediction(
        next(filter(None, names)),
        fake.device.title,
        fake.device.bandwidth,
        fake.device.source,
        (("torch", torch.__version__), ("triton", importlib.metadata.version("triton"))),
        tuple(_predict_way(name, partial(compile, name)) for name in ways),
    )


def _call(graph: Any, inputs: list[Any], backend: Callable[..., Any]) -> Any:
    return backend(graph, inputs)


def _op_by_op() -> Backend:
    """Returns a backend that runs each op of a graph on its own."""

    def compile_graph(graph: fx.GraphModule, inputs: list[Any], kind: Any) -> Any:
        return lambda items: fx.Interpreter(graph).run(*items)

    return replace(choose_backend("eager"), name="op by op", compile_graph=compile_graph)


def _predict_way(name: str, compile: Callable[[list[Stage]], Any]) -> Way:
    stages: list[Stage] = []
    try:
        compile(stages)
    except (DesugarError, private.TorchDynamoException, private.InductorError, RuntimeError) as error:
        return Way(name, error=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    seconds, graphed = predict_program(stages)
    return Way(name, tuple(stages), seconds, graphed)
