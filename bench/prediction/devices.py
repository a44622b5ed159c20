"""The devices that can be predicted: figures of their data sheets, for dense operands (without sparsity)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

_TERA, _GIBI, _KIBI = 1e12, 2**30, 2**10


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU.

    Attributes:
        name: By which `device=` finds it, in lower case.
        title: The product.
        capability: The compute capability.
        multiprocessors: The number of streaming multiprocessors.
        memory: Bytes.
        bandwidth: Bytes a second between memory and chip.
        cache: Bytes of the cache that all multiprocessors share.
        shared_memory: Bytes that one block may use.
        threads: The threads that one multiprocessor holds.
        flops: Operations a second by dtype, with matrix units where these exist. `vector` is float32 without them.
        vector: Operations a second in float32 outside of matrix units.
        source: Where the figures are from.
    """

    name: str
    title: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    bandwidth: float
    cache: int
    shared_memory: int
    threads: int
    flops: dict[torch.dtype, float]
    vector: float
    source: str

    @property
    def properties(self) -> SimpleNamespace:
        """The properties as `torch.cuda.get_device_properties` returns them."""
        return SimpleNamespace(
            name=self.title,
            major=self.capability[0],
            minor=self.capability[1],
            total_memory=self.memory,
            multi_processor_count=self.multiprocessors,
            L2_cache_size=self.cache,
            shared_memory_per_block=48 * _KIBI,
            shared_memory_per_block_optin=self.shared_memory,
            shared_memory_per_multiprocessor=self.shared_memory + _KIBI,
            max_threads_per_multi_processor=self.threads,
            max_threads_per_block=1024,
            regs_per_multiprocessor=65536,  # of each architecture from Volta on
            warp_size=32,
            is_integrated=False,
            gcnArchName="",
        )


def _flops(half: float, tf32: float, single: float, double: float, int8: float, fp8: float) -> dict:
    """Returns operations a second by dtype from tera-operations; float32 counts without TF32, PyTorch's default."""
    del tf32  # kept beside the others, since data sheets list it; nothing here turns it on
    return {
        torch.bfloat16: half * _TERA,
        torch.float16: half * _TERA,
        torch.float32: single * _TERA,
        torch.float64: double * _TERA,
        torch.int8: int8 * _TERA,
        **(dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), fp8 * _TERA) if fp8 else {}),
    }


_HOPPER = _flops(half=989.4, tf32=494.7, single=66.9, double=66.9, int8=1978.9, fp8=1978.9)
_ALL = (
    Device(
        "h100", "NVIDIA H100 SXM5 80GB", (9, 0), 132, 80 * _GIBI, 3.35e12, 50 * 2**20, 227 * _KIBI, 2048,
        _HOPPER, 66.9 * _TERA,
        "NVIDIA H100 Tensor Core GPU Architecture, tables 2 and 3; H100 data sheet (bandwidth)",
    ),
    Device(
        "h200", "NVIDIA H200 SXM 141GB", (9, 0), 132, 141 * 10**9, 4.8e12, 50 * 2**20, 227 * _KIBI, 2048,
        _HOPPER, 66.9 * _TERA,
        "NVIDIA H200 Tensor Core GPU data sheet",
    ),
    Device(
        "a100", "NVIDIA A100 SXM4 80GB", (8, 0), 108, 80 * _GIBI, 2.039e12, 40 * 2**20, 163 * _KIBI, 2048,
        _flops(half=312.0, tf32=156.0, single=19.5, double=19.5, int8=624.0, fp8=0.0), 19.5 * _TERA,
        "NVIDIA A100 Tensor Core GPU data sheet; NVIDIA A100 Tensor Core GPU Architecture, table 1",
    ),
    Device(
        "l4", "NVIDIA L4 24GB", (8, 9), 58, 24 * _GIBI, 300e9, 48 * 2**20, 99 * _KIBI, 1536,
        _flops(half=121.0, tf32=60.0, single=30.3, double=0.49, int8=242.5, fp8=242.5), 30.3 * _TERA,
        "NVIDIA L4 Tensor Core GPU data sheet, half of the figures that it gives with sparsity",
    ),
    Device(
        "b200", "NVIDIA B200 SXM 180GB", (10, 0), 148, 180 * 10**9, 8.0e12, 126 * 2**20, 227 * _KIBI, 2048,
        _flops(half=2250.0, tf32=1100.0, single=75.0, double=37.0, int8=4500.0, fp8=4500.0), 75.0 * _TERA,
        "NVIDIA HGX B200 data sheet, an eighth of the figures of eight GPUs",
    ),
)  # fmt: skip

DEVICES: dict[str, Device] = {device.name: device for device in _ALL}


def find_device(name: str | Device) -> Device:
    """Returns a device by its name, in any case.

    Raises:
        ValueError: The table has no such device.
    """
    if isinstance(name, Device):
        return name
    if name.lower() not in DEVICES:
        known = ", ".join(DEVICES)
        raise ValueError(
            f"expected a device of the table ({known}), got {name!r}; pass one of these names or a "
            "bench.prediction.Device"
        )
    return DEVICES[name.lower()]
