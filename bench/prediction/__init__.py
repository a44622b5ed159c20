"""Predicts the kernels, bytes and time of a program on a GPU that is not there. No figure here is measured.

`predict` traces a call with fake tensors, which have sizes and no data. Inductor lowers the graphs, Triton compiles the
kernels for the device, and the generated code runs on fake tensors. So the kernels are known, and their fusions, bytes,
library calls and waits. `roofline` derives times from these. The patches of torch and Triton need torch 2.15.0 in its
CUDA build with triton 3.9.0, no driver and no GPU.

The tests of kernels for GPUs (`tests/bench/prediction/test_gpu_paths.py`), `bench.gpu_predicted` and
`bench.predictions` use this package; the library does not import it.

A prediction cannot give:

- A real time. Kernels reach a part of the bandwidth and of the peak. Inductor times its configurations to find the
  fastest; here the first one is compiled. The times are lower bounds: on an H100, measured times were 1.2 to 4.2 times
  as long.
- The number of kernels that a library runs for one call. A matrix product counts as one.
- Data that stays in a cache between two kernels. The counted bytes ignore it.
- The part of a table that a hand-written kernel reads through ids. The whole of each argument counts.
- Whatever depends on values: the sizes of `nonzero`, the lengths of rows inside an attention, right results.
- The time of Python on the host: Dynamo's guards, the wrapper, the optimizer.
"""

from bench.prediction.devices import DEVICES, Device, find_device
from bench.prediction.fake import FakeDevice, fake_device
from bench.prediction.predicting import predict
from bench.prediction.records import Kernel, Prediction, Stage, Way

__all__ = [
    "DEVICES",
    "Device",
    "FakeDevice",
    "Kernel",
    "Prediction",
    "Stage",
    "Way",
    "fake_device",
    "find_device",
    "predict",
]
