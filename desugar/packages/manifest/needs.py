"""The needs of a package: the classes that the loading process has to find, and the machine that runs its code."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from desugar.errors import PackageError
from desugar.packages.manifest.records import Machine
from subclasses import TensorSubclass
from subclasses.errors import full_name

# ------------------------------------------------------------------------------------------------- classes

# Classes that ship with this library, which `load` finds without its argument `classes`: name -> module.
_SHIPPED = {
    "PaddedTensor": "subclasses.ragged",
    "JaggedTensor": "subclasses.ragged",
    "Int8Tensor": "subclasses.int8",
    "KeyedJaggedTensor": "subclasses.keyed",
}


def fingerprint(cls: type) -> str:
    """Returns a digest of the parts of a class that a package relies on: its fields, and their kinds.

    Rules are not part of the digest, since a package holds their traced ops and calls no rule.
    """
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    said: Any = [*getattr(cls, "_fields", ()), *(field.name for field in fields)]
    if issubclass(cls, TensorSubclass):
        spec = cls.__spec__
        inners = [[field.name, field.attribute, field.optional] for field in spec.inners]
        said = [inners, [field.name for field in spec.statics], [field.name for field in spec.dynamics]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def find_classes(fingerprints: Mapping[str, str], given: Iterable[type]) -> dict[str, type]:
    """Returns the class of each name in a manifest. No name of the file is imported.

    Args:
        fingerprints: Name in the manifest -> the class's fingerprint.
        given: The classes that the caller passes.

    Raises:
        PackageError: A class is missing, or its declaration has changed.
        TypeError: A given object is not a class.
    """
    known: dict[str, type] = {}
    for cls in given:
        if not isinstance(cls, type):
            raise TypeError(f"expected classes, got {cls!r:.100}")
        # The script that saved the package may have declared the class.
        known |= {f"__main__.{cls.__qualname__}": cls, full_name(cls): cls}
    classes = {}
    for name, digest in fingerprints.items():
        short = name.rpartition(".")[2]
        cls = known.get(name) or _shipped(name, short)  # type: ignore[assignment]
        if cls is None:
            raise PackageError(
                f"this package takes or returns a {name}, which it may not import: pass classes=[{short}]"
            )
        if fingerprint(cls) != digest:
            raise PackageError(
                f"{name} is declared differently than when this package was saved: save it again"
            )
        classes[name] = cls
    return classes


def _shipped(name: str, short: str) -> type | None:
    if short not in _SHIPPED or not name.startswith("subclasses."):
        return None
    cls = getattr(importlib.import_module(_SHIPPED[short]), short)
    return cls if full_name(cls) == name else None


# ------------------------------------------------------------------------------------------------- machine

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
    problem = next((text for text, is_there in problems.items() if is_there), None)
    if problem is not None:
        raise PackageError(
            f"the machine code of this package does not run here: {problem}. Load it with native=False, which compiles "
            "its graphs on this machine, or save it again on a machine like this one"
        )
