"""Every private name of torch that either package uses, and why.

Nothing else in the repository imports a name that starts with an underscore from torch, so a new release
of PyTorch is read against this one file. ``tests/subclasses/test_torch_names.py`` names each of them.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import (
    # Is a tensor or type of the kind that PyTorch can take apart with __tensor_flatten__?
    is_traceable_wrapper_subclass,
    # Gives a view made below autograd its base's storage and returns the mutated argument of an in-place op.
    return_and_correct_aliasing,
)

# ---- making wrappers ---------------------------------------------------------------------------------------

# The only way to make a tensor without storage whose Python class is a given one.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

# Switches __torch_function__ off for a class with no rule above autograd, in C++ and known to Dynamo.
disabled_torch_function_impl = torch._C._disabled_torch_function_impl

__all__ = [
    "disabled_torch_function_impl",
    "is_traceable_wrapper_subclass",
    "make_wrapper_subclass",
    "return_and_correct_aliasing",
]
