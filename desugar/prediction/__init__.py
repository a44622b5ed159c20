"""A device that is not there: what a program would run on it, found by lowering and compiling it without running it."""

from desugar.prediction.devices import DEVICES, Device, find_device
from desugar.prediction.fake import FakeDevice, fake_device
from desugar.prediction.predicting import predict
from desugar.prediction.records import Kernel, Prediction, Stage, Way

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
