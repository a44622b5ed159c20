"""Records the calls that generated code would make: Inductor's kernels by name, and every op.

The code runs on fake tensors of the device. An object that notes each launch replaces a kernel of Inductor. All other
ops pass a dispatch mode, which notes library calls, copies, and ops for which the host waits.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.prediction import _torch as private
from bench.prediction.traffic import Traffic, count_call, count_kernel, nbytes, tensors_in

# Ops whose result is a value or a size that the host needs.
_WAITING = frozenset(
    f"aten::{name}"
    for name in "_local_scalar_dense item nonzero masked_select equal is_nonzero _unique2 unique_dim "
    "unique_consecutive repeat_interleave bincount".split()
)
# Ops that make a tensor without a kernel.
_ALLOCATING = frozenset(
    f"aten::{name}"
    for name in "empty empty_strided empty_like new_empty new_empty_strided lift_fresh detach resize_ set_ alias "
    "_unsafe_view view_as_real view_as_complex".split()
)


@dataclass(frozen=True)
class Compiled:
    """The facts that Triton's compiler reports about a kernel.

    Attributes:
        registers: Of a thread.
        shared_memory: Bytes of a block.
        spills: Bytes of a thread's stack.
        configurations: How many Inductor would time.
        target: The compiled kernel's architecture, such as 90.
        texts: The compiler's outputs, by name: "ttir", "ptx", "cubin" and others.
    """

    registers: int | None
    shared_memory: int
    spills: int | None
    configurations: int
    target: int
    texts: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Call:
    """One thing that generated code did: a launch, a library call, a copy, or work on the host."""

    name: str
    kind: str
    traffic: Traffic
    dtype: torch.dtype | None = None
    waits: bool = False
    touches_host: bool = False


class Recorder:
    """Notes about one graph: its compiled kernels, and the calls that ran.

    Attributes:
        traffic: By the name of a kernel, the bytes and arithmetic of the nodes that Inductor fused in it.
        compiled: By the name of a kernel, the facts from Triton's compiler.
        sources: By the name of a kernel, its source.
        calls: The launches and calls of ops, in order.
    """

    def __init__(self) -> None:
        self.traffic: dict[str, Traffic] = {}
        self.compiled: dict[str, Compiled] = {}
        self.calls: list[Call] = []

    # ---- while Inductor compiles

    def define(self, name: str, nodes: Sequence[Any], kernel: Any) -> None:
        """Notes which of the scheduler's nodes a kernel fuses."""
        parts = getattr(kernel, "sub_kernels", None) or [kernel]
        traffic = count_kernel(nodes, [part.args for part in parts])
        known = self.traffic.get(name)  # the same source, for other nodes
        ops = traffic.ops if known is None else tuple(dict.fromkeys((*known.ops, *traffic.ops)))
        self.traffic[name] = Traffic(ops, traffic.reads, traffic.writes, traffic.flops)

    def triton(self, name: str, kernel: Any) -> _Launcher:
        """Notes a compiled kernel."""
        if name not in self.compiled:
            self.compiled[name] = _read_compiled(kernel)
        return _Launcher(self, name, "triton", kernel)

    def host(self, source: str) -> _Launcher:
        """Notes a C++ kernel, which is not built."""
        name = next(iter(re.findall(r"kernel\w*", source)), "kernel")
        return _Launcher(self, f"host {name}", "host")

    # ---- while the code runs

    @contextmanager
    def watching(self, mode: Any) -> Iterator[None]:
        """Runs code on fake tensors of a mode, and notes every op that it calls."""
        with torch.no_grad(), mode, _mode_of(self):
            yield


class _Launcher:
    """Replaces a kernel in generated code."""

    def __init__(self, recorder: Recorder, name: str, kind: str, kernel: Any = None) -> None:
        self.recorder, self.name, self.kind, self.kernel = recorder, name, kind, kernel

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Notes a launch."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        traffic = self.recorder.traffic.get(self.name) or _of_arguments(self.name, self.kernel, args)
        on_host = any(x.device.type == "cpu" for x in tensors)
        self.recorder.calls.append(Call(self.name, self.kind, traffic, touches_host=on_host))

    __call__ = run


def _of_arguments(name: str, kernel: Any, args: Sequence[Any]) -> Traffic:
    """Traffic of a kernel that Inductor did not write: it reads or writes the whole of each argument."""
    if kernel is None:
        return Traffic((name,))
    meta = kernel.triton_meta
    names = (parameter for parameter, kind in meta["signature"].items() if kind != "constexpr")
    named = dict(zip(names, args, strict=False))  # constants are compiled in; the size of the grid follows
    accesses = private.identify_accessed_tensors(kernel.fn, named | meta["constants"], {}).read_writes
    reads, writes = ([named[dep.name] for dep in deps] for deps in (accesses.reads, accesses.writes))
    return Traffic((name,), _bytes_by_dtype(reads), _bytes_by_dtype(writes))


def _bytes_by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    for x in tensors:
        sizes[x.dtype] = sizes.get(x.dtype, 0) + nbytes(x)
    return sizes


# ------------------------------------------------------------------------------------------------ compiled code


def _read_compiled(kernel: Any) -> Compiled:
    """Reads the metadata of a kernel that Triton compiled, and the resources that its machine code declares."""
    (result,) = kernel.compile_results
    made, metadata = result.kernel.asm, result.kernel.metadata
    registers, spills = _read_resources(made["cubin"])
    return Compiled(
        registers,
        metadata.shared,
        spills,
        getattr(kernel, "num_configs", 1),
        metadata.target.arch,
        dict(made),
    )


def _read_resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Returns the registers and the bytes of stack that a cubin declares; None without the tool that reads them."""
    tool = _cuobjdump()
    if tool is None:
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=False
        )
    match = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else (None, None)


def _cuobjdump() -> str | None:
    """Returns the path of the tool that reads compiled kernels, which Triton comes with; None if it is missing."""
    try:
        return importlib.import_module("triton.knobs").nvidia.cuobjdump.path
    except RuntimeError:
        return None


# ------------------------------------------------------------------------------------------------ ops


def _mode_of(recorder: Recorder) -> Any:
    """Returns the mode that notes ops; its base class is imported on first use."""

    class Noting(private.TorchDispatchMode):
        supports_higher_order_operators = True  # a call of a Triton kernel is one

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return _note(recorder, func, args, kwargs or {})

    return Noting()


def _note(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an op on fake tensors and notes it, if a kernel would run."""
    if not hasattr(func, "_schema"):  # a higher-order op
        return _note_kernel(recorder, func, args, kwargs)
    operands = list(tensors_in((args, kwargs)))
    if any(x.is_cuda for x in operands):
        _note_waits_inside(recorder, func, args, kwargs)
    waits = func._schema.name in _WAITING and any(x.is_cuda for x in operands)
    if waits:  # noted first: the result may be unknown
        recorder.calls.append(Call(str(func), "library", Traffic((str(func),)), waits=True))
    result = func(*args, **kwargs)
    if not _has_kernel(func):
        return result
    devices = {x.device.type for x in (*operands, *tensors_in(result))}
    if waits:
        recorder.calls.pop()
    kind = "library" if "cuda" in devices else "host"
    traffic = count_call(func, args, kwargs, result)
    if _is_copy(func, args, kwargs, result):
        kind, waits = "copy", waits or not _stays(result)
    touches_host = "cpu" in devices and any(x.dim() and x.device.type == "cpu" for x in operands)
    dtype = next((x.dtype for x in operands if x.is_cuda), None)
    recorder.calls.append(Call(str(func), kind, traffic, dtype, waits, touches_host))
    return result


def _note_kernel(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Notes a Triton kernel that a graph calls without Inductor; it reads each tensor and writes each result."""
    result = func(*args, **kwargs)
    name = private.kernel_side_table.get_kernel(kwargs["kernel_idx"]).fn.__name__
    traffic = Traffic(
        (name,), _bytes_by_dtype(tensors_in(kwargs["kwargs"])), _bytes_by_dtype(tensors_in(result))
    )
    recorder.calls.append(Call(name, "triton", traffic))
    return result


def _note_waits_inside(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Notes the calls that wait for the device inside an op written in Python, by running its code."""
    name = func._schema.name
    if name not in private.OPDEFS or name in private.triton_ops_to_kernels:
        return
    inner = Recorder()
    try:
        with _mode_of(inner):
            private.OPDEFS[name]._init_fn(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the code need not take fake tensors; calls before the error are noted
        pass
    waits = dict.fromkeys(f"{call.name} in {func}" for call in inner.calls if call.waits)
    recorder.calls += [Call(wait, "library", Traffic((wait,)), waits=True) for wait in waits]


def _has_kernel(func: Any) -> bool:
    if func.namespace == "prim":  # reads the device of a tensor
        return False
    return not (func.is_view or func._schema.name in _ALLOCATING)


def _is_copy(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
    """Whether an op copies between the host and the device."""
    if func._schema.name not in ("aten::_to_copy", "aten::copy_", "aten::copy", "prims::device_put"):
        return False
    devices = {x.device.type for x in tensors_in((args, kwargs, result))}
    return len(devices) > 1


def _stays(result: Any) -> bool:
    """Whether a result is on the device: the host need not wait for it."""
    return all(x.is_cuda for x in tensors_in(result))
