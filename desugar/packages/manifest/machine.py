"""The machines on which machine code runs."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch

from desugar.errors import PackageError
from desugar.packages.manifest.records import Machine

# Prefixes of the names of instruction sets that a C++ compiler may use on the processor of this machine.
_SETS = (
    "abm", "adx", "aes", "amx", "asimd", "avx", "bmi", "clflush", "clwb", "cmov", "cx16", "f16c", "fma", "fp16", "gfni",
    "lzcnt", "mmx", "movbe", "pclmul", "popcnt", "rdrand", "rdseed", "sha", "sse", "ssse", "sve", "vaes", "vpcl",
    "xsave",
)  # fmt: skip


@functools.cache
def this_machine() -> Machine:
    """Returns this machine; its machine code needs the same system, the same kernels, and all its instruction sets."""
    system = f"{platform.system()} {platform.machine()}"
    return Machine(system, torch.backends.cpu.get_cpu_capability(), _instructions())


def _instructions() -> frozenset[str]:
    """Returns the names of instruction sets that the system reports; an empty set if it reports none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flag for flag in flags.partition(":")[2].split() if flag.startswith(_SETS))


def check_machine(machine: Machine | None) -> None:
    """Raises `PackageError` unless a package has machine code that runs on this machine."""
    if machine is None:
        raise PackageError(
            "this package holds no machine code: load it with native=False, which compiles its graphs"
        )
    here = this_machine()
    missing = sorted(machine.instructions - here.instructions)
    problems = {
        f"it was saved on {machine.system}, and this is {here.system}": machine.system != here.system,
        f"it was saved on a processor that has {', '.join(missing[:6])}, which this one lacks": bool(missing),
        f"it was saved with {machine.processor} kernels, and PyTorch takes {here.processor} ones here": (
            machine.processor != here.processor
        ),
    }
    if any(problems.values()):
        problem = next(text for text, is_there in problems.items() if is_there)
        raise PackageError(
            f"the machine code of this package does not run here: {problem}. Load it with native=False, which compiles "
            "its graphs on this machine, or save it again on a machine like this one"
        )
