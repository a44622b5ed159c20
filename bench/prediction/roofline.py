"""Predicts the time of a kernel and of a program: the roofline model and the time to launch.

A kernel has to move its bytes and to compute, and the model takes the longer of both times (S. Williams, A. Waterman,
D. Patterson: Roofline, CACM 52(4), 2009). A program takes at least the time of its kernels, and at least the time in
which the host launches them one by one. A CUDA graph is launched as one.

The two constants of launches are assumptions, not measurements of this project. On a V100, NVIDIA measured 3.8 µs
between kernels that a C++ program launches on a stream. A kernel in a CUDA graph had 0.5 µs of overhead (A. Gray,
Getting Started with CUDA Graphs, NVIDIA technical blog, 2019). Inductor's code launches from Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.prediction.devices import Device
from bench.prediction.records import Stage

LAUNCH = 5e-6  # seconds of the host for one kernel
IN_GRAPH = 0.5e-6  # seconds that a kernel in a CUDA graph takes longer than alone


def predict_kernel(
    device: Device, nbytes: int, flops: int, dtype: torch.dtype | None, *, on_matrix_units: bool
) -> tuple[float, str]:
    """Returns the predicted seconds of one launch, and "memory" or "compute", whichever takes longer.

    Args:
        device: The device.
        nbytes: Bytes that it moves.
        flops: Operations that it computes.
        dtype: Of its operands.
        on_matrix_units: Whether a library computes it, with matrix units where these take the dtype.
    """
    peak = device.vector
    if on_matrix_units and dtype is not None:
        peak = device.flops.get(dtype, device.vector)
    moving, computing = nbytes / device.bandwidth, flops / peak
    return (computing, "compute") if computing > moving else (moving, "memory")


def predict_program(stages: Sequence[Stage]) -> tuple[float, float | None]:
    """Returns the predicted seconds of a program, and those in CUDA graphs; None if a stage cannot be recorded."""
    seconds = sum(max(stage.roofline, stage.launches * LAUNCH) for stage in stages)
    if any(stage.no_cuda_graph for stage in stages):
        return seconds, None
    return seconds, sum(stage.roofline + stage.launches * IN_GRAPH for stage in stages)
