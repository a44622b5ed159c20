"""Pickles records and graphs that hold fake tensors and symbolic numbers.

A fake tensor is written as its size, stride, dtype and device, a symbolic number as its expression. Loading makes them
anew in the fake mode of the compilation in progress. Its symbols have the same names, which are part of the store's
key. The pickles lie in PyTorch's cache folder, and are trusted like PyTorch's own pickles there.
"""

from __future__ import annotations

import functools
import io
import pickle
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from desugar import _torch as torch_private

# Errors of unpickling a damaged file, or a file that names code which has changed.
DAMAGED = (
    pickle.PickleError, AttributeError, ImportError, LookupError, TypeError, ValueError, RuntimeError, EOFError,
)  # fmt: skip

# The metadata of a node that readers of the graph need; the rest is needed only while the graph is compiled.
_KEPT_METADATA = ("val", "stack_trace", "seq_nr")

# The most elements of a tensor in the records, such as a codebook over pairs of bytes. A larger tensor is data.
_LARGEST_CONSTANT = 1 << 16


class CannotStore(Exception):
    """Raised for a program with a part that another process could not read."""


def dump(value: Any) -> bytes:
    """Pickles records or graphs.

    Raises:
        CannotStore: A part cannot be pickled, or would not be the same in another process.
    """
    options = torch_private.GraphPicklerOptions(
        ops_filter=None, node_metadata_key_filter=_KEPT_METADATA.__contains__
    )
    try:
        with io.BytesIO() as stream:
            _pickler()(stream, options).dump(value)
            return stream.getvalue()
    except (*DAMAGED, NotImplementedError, AssertionError) as error:
        raise CannotStore(f"{type(error).__name__}: {error}") from error


def load(data: bytes, mode: Any) -> Any:
    """Loads the result of `dump`; fake tensors belong to a fake mode, symbolic numbers use the mode's symbols."""
    return torch_private.GraphPickler.loads(data, mode)


@functools.cache
def _pickler() -> type:
    """Returns the pickler's class; its base imports torch.fx and Inductor."""

    class Pickler(torch_private.GraphPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch_private.FakeTensor):
                return _make_fake, (_describe_fake(obj), self._unpickle_state)
            if isinstance(obj, SymInt | SymFloat | SymBool):
                return _make_number, (_describe_number(obj), self._unpickle_state)
            if _is_constant(obj):
                return _make_constant, (obj.dtype, tuple(obj.shape), obj.tolist())
            if isinstance(obj, Tensor):
                raise CannotStore(f"it holds a tensor of size {tuple(obj.shape)}")
            return super().reducer_override(obj)

    return Pickler


def _describe_fake(fake: Any) -> tuple[Any, ...]:
    if fake.layout is not torch.strided or fake.is_conj() or fake.is_neg():
        raise CannotStore("it holds a tensor that is sparse, or lazily conjugated or negated")
    extents = tuple(fake.size()), tuple(fake.stride()), fake.storage_offset()
    return *extents, fake.dtype, fake.device


def _make_fake(described: tuple[Any, ...], state: Any) -> Any:
    size, stride, offset, dtype, device = described
    with torch.no_grad():
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        meta = meta if type(offset) is int and offset == 0 else meta.as_strided(size, stride, offset)
        return torch_private.FakeTensor(state.fake_mode, meta, device)


def _is_constant(obj: Any) -> bool:
    """Whether an object is a small table of numbers that a rule made while it was traced, such as a codebook."""
    return (
        type(obj) is Tensor
        and obj.device.type == "cpu"
        and obj.layout is torch.strided
        and obj.is_contiguous()
        and not obj.requires_grad
        and obj.numel() <= _LARGEST_CONSTANT
    )


def _make_constant(dtype: torch.dtype, size: tuple[int, ...], numbers: Any) -> Tensor:
    with torch_private.disable_current_modes():
        return torch.tensor(numbers, dtype=dtype).reshape(size)


def _describe_number(number: Any) -> tuple[type, Any]:
    node = number.node
    env = node.shape_env
    if not node.expr.free_symbols <= known_values(env).keys():
        raise CannotStore("a size depends on data")
    return node.pytype, node.expr


def _make_number(described: tuple[type, Any], state: Any) -> Any:
    pytype, expression = described
    env = state.fake_mode.shape_env
    hint = pytype(expression.xreplace(known_values(env)))
    make = {int: env.create_symintnode, float: env.create_symfloatnode, bool: env.create_symboolnode}[pytype]
    return make(expression) if pytype is bool else make(expression, hint=hint)


def known_values(env: Any) -> dict[Any, Any]:
    """Returns the value that each symbol of a shape environment has in the present call."""
    return env.backed_var_to_val
