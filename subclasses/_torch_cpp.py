"""Private torch names for building C++, each with the reason; see `_torch.py`."""

from __future__ import annotations


def build_library(source: str, folder: str, name: str, flags: list[str]) -> None:
    """Builds ``folder/name.so`` from a C++ file, for this processor and with the OpenMP that torch uses.

    Raises:
        RuntimeError: No compiler was found, or it failed.
    """
    # Inductor's own way to its compiler: cpp_extension needs ninja, and compiles all of PyTorch's headers.
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import (
        invalid_vec_isa,
    )  # no further flags for vectors: -march=native has them

    options = CppTorchOptions(vec_isa=invalid_vec_isa, include_pytorch=False, extra_flags=flags)
    CppBuilder(name, source, options, folder).build()
