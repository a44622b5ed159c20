"""A device that is not there: what a program would run on it, found by lowering and compiling it without running it."""

from desugar.device.devices import DEVICES, Device, find_device
from desugar.device.fake import FakeDevice, fake_device
from desugar.device.predicting import predict
from desugar.device.records import Kernel, Prediction, Stage, Way

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
