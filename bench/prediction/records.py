"""The records of a prediction: frozen, of text and numbers, nothing live.

All times are *predicted*: nothing here was measured on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from desugar.recording.record_base import Record, find_named


@dataclass(frozen=True, slots=True)
class Kernel(Record):
    """One kernel of a program, or one call of a library, at one size.

    Attributes:
        name: Of the kernel that Inductor wrote, or of the op that a library runs.
        kind: "triton", "library" (cuBLAS, flash attention and the like, also PyTorch's own kernels), "copy" (between
            host and device), "host" (runs on the CPU).
        fuses: The ops whose work it does, in the graph's order.
        launches: How often the program runs it.
        reads: Bytes of memory that one launch reads at least: each buffer once.
        writes: Bytes that one launch writes.
        reads_by_dtype: The same bytes by the dtype of the buffers.
        writes_by_dtype: The same bytes by the dtype of the buffers.
        flops: Arithmetic operations of one launch.
        seconds: Predicted time of one launch: the longer of bytes / bandwidth and flops / peak.
        bound: The reason of that time: "memory" or "compute".
        registers: Of a thread, from the compiled code; None for a library's kernel.
        shared_memory: Bytes of a block, from the compiled code; None for a library's kernel.
        spills: Bytes of a thread's stack, from the compiled code; None for a library's kernel.
        configurations: How many configurations Inductor would time on a device; the first one was compiled.
    """

    name: str
    kind: str
    fuses: tuple[str, ...]
    launches: int
    reads: int
    writes: int
    reads_by_dtype: tuple[tuple[str, int], ...] = ()
    writes_by_dtype: tuple[tuple[str, int], ...] = ()
    flops: int = 0
    seconds: float = 0.0
    bound: str = "memory"
    registers: int | None = None
    shared_memory: int | None = None
    spills: int | None = None
    configurations: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that one launch moves."""
        return self.reads + self.writes

    @property
    def on_device(self) -> bool:
        """Whether it runs on the device."""
        return self.kind != "host"


@dataclass(frozen=True, slots=True)
class Stage(Record):
    """One graph of a program.

    Attributes:
        name: "inference", "forward" or "backward".
        kernels: In the order of their first launch.
        synchronizations: Ops at which the host waits for the device.
        copies: Ops that copy between host and device.
        no_cuda_graph: Why the graph cannot be recorded as a CUDA graph, with the op that forbids it; empty if it can.
        sizes: The symbolic sizes in the graph, with the values that the figures are for. A CUDA graph is for one value.
        code: The code that Inductor generated.
    """

    name: str
    kernels: tuple[Kernel, ...]
    synchronizations: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    no_cuda_graph: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    code: str = ""

    @property
    def launches(self) -> int:
        """Kernels launched on the device by one run."""
        return sum(kernel.launches for kernel in self.kernels if kernel.on_device)

    @property
    def bytes(self) -> int:
        """Bytes that one run moves, at least."""
        return sum(kernel.bytes * kernel.launches for kernel in self.kernels if kernel.on_device)

    @property
    def flops(self) -> int:
        """Arithmetic operations of one run."""
        return sum(kernel.flops * kernel.launches for kernel in self.kernels if kernel.on_device)

    @property
    def roofline(self) -> float:
        """Predicted seconds of the kernels alone."""
        return sum(kernel.seconds * kernel.launches for kernel in self.kernels if kernel.on_device)


@dataclass(frozen=True, slots=True)
class Way(Record):
    """One way to run a function.

    Attributes:
        name: "desugar.compile", "torch.compile" or "op by op".
        stages: Its graphs: one for inference, two for training.
        seconds: Predicted time: of the kernels, or of the host that launches them one by one if that takes longer.
        graphed_seconds: Predicted time in CUDA graphs; None if a stage cannot be recorded.
        error: Why it cannot be predicted, if it cannot.
    """

    name: str
    stages: tuple[Stage, ...] = ()
    seconds: float = 0.0
    graphed_seconds: float | None = None
    error: str = ""

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of all stages."""
        return tuple(kernel for stage in self.stages for kernel in stage.kernels)

    @property
    def launches(self) -> int:
        """Kernels launched by one run of all stages."""
        return sum(stage.launches for stage in self.stages)

    @property
    def bytes(self) -> int:
        """Bytes that one run of all stages moves, at least."""
        return sum(stage.bytes for stage in self.stages)

    @property
    def flops(self) -> int:
        """Arithmetic operations of one run of all stages."""
        return sum(stage.flops for stage in self.stages)

    @property
    def roofline(self) -> float:
        """Predicted seconds of the kernels alone."""
        return sum(stage.roofline for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Prediction(Record):
    """The kernels that one call of a function would run on a device, in each way; nothing of it was measured.

    Attributes:
        name: The function.
        device: The title of the device.
        bandwidth: Bytes a second of the device.
        source: Where the figures of the device are from.
        versions: Of PyTorch and Triton, which made the kernels.
        ways: The ways, ours first.
    """

    name: str
    device: str
    bandwidth: float
    source: str
    versions: tuple[tuple[str, str], ...]
    ways: tuple[Way, ...]

    def way(self, name: str) -> Way:
        """Returns a way by its name.

        Raises:
            KeyError: There is no such way.
        """
        return find_named(self.ways, name)  # type: ignore[no-any-return]
