"""Checks of the arguments of a keyed tensor; each error names the expected value, the actual value and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch_tracing import is_compiling_here
from subclasses.errors import DispatchError, coded, one_of
from subclasses.ragged import JaggedTensor
from subclasses.ragged.checks import GREATEST_BOUND, check_bound
from subclasses.spec.load_checks import check_unwrapped, has_data

_NAME = "KeyedJaggedTensor"
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# ---- shapes ----------------------------------------------------------------------------------------------------


def check_keys(keys: Any) -> tuple[str, ...]:
    """Returns the keys as a tuple; raises unless they are one or more distinct strings."""
    if isinstance(keys, str) or not isinstance(keys, Sequence) or not all(isinstance(k, str) for k in keys):
        raise TypeError(f"{_NAME}.keys: expected a sequence of strings, got {keys!r}")
    if not keys:
        raise ValueError(f"{_NAME}.keys: expected at least one key, got none")
    if len(set(keys)) < len(keys):
        twice = next(k for k in keys if list(keys).count(k) > 1)
        raise ValueError(f"{_NAME}.keys: expected distinct keys, got {twice!r} more than once")
    return tuple(keys)


def check_parts(keys: tuple[str, ...], values: Any, lengths: Any, weights: Any) -> None:
    """Raises unless values, lengths and weights fit together in type, shape, dtype and device."""
    for name, t in (("values", values), ("lengths", lengths), ("weights", weights)):
        if not isinstance(t, Tensor) and not (name == "weights" and t is None):
            raise TypeError(f"{_NAME}.{name}: expected a Tensor, got {t!r} of type {type(t).__name__}")
    if values.dim() == 0:
        raise ValueError(f"{_NAME}.values: expected entries in a first dimension, got a scalar")
    if lengths.dim() != 1 or lengths.shape[0] % len(keys) or lengths.dtype not in INTEGERS:
        raise ValueError(
            f"{_NAME}.lengths: expected integers of shape [K * B], the B lengths of each of the {len(keys)} keys one "
            f"after the other, got {lengths.dtype} of shape {tuple(lengths.shape)}"
        )
    if lengths.device != values.device:
        raise ValueError(
            f"{_NAME}.lengths: expected device {values.device} as of values, got {lengths.device}"
        )
    if weights is not None and (weights.dim() != 1 or weights.shape[0] != values.shape[0]):
        raise ValueError(
            f"{_NAME}.weights: expected one for each of the {values.shape[0]} entries of values, got shape "
            f"{tuple(weights.shape)}"
        )
    if weights is not None and not weights.dtype.is_floating_point:
        raise ValueError(f"{_NAME}.weights: expected floating point weights, got {weights.dtype}")


# ---- data ------------------------------------------------------------------------------------------------------


def longest_row(values: Tensor, lengths: Tensor) -> int:
    """Returns the length of the longest row of all keys; reads the lengths, and checks them."""
    if is_compiling_here() or type(lengths) is not Tensor:
        raise ValueError(
            f"{_NAME}: in a compiled function the longest row is not known; give max_length=, or build it outside"
        )
    shortest, longest, total = (int(n) for n in _extremes(lengths))
    if shortest < 0:
        raise ValueError(f"{_NAME}.lengths: expected none below 0, got {shortest}")
    if total != values.shape[0]:
        raise ValueError(
            f"{_NAME}.lengths: expected a sum of {values.shape[0]}, the number of entries in values, got {total}"
        )
    return longest


def _extremes(lengths: Tensor) -> list[int]:
    if lengths.shape[0] == 0:
        return [0, 0, 0]
    return torch.stack([lengths.amin(), lengths.amax(), lengths.sum()]).tolist()


def check_given_bound(values: Tensor, max_length: Any) -> None:
    """Raises unless rows of these values can be as long as the longest row that a caller passes."""
    if type(max_length) is int and max_length > GREATEST_BOUND and not is_traced(values):
        check_bound(_NAME, max_length, 0, values.shape[0])


# ---- files -----------------------------------------------------------------------------------------------------


def check_loaded(values: Tensor, offsets: Tensor, weights: Tensor | None, keys: Any, max_length: Any) -> None:
    """Raises unless the fields of a keyed tensor describe rows of its values.

    The constructor checks the dtype of the offsets, and that the longest row is an int: its errors name the field.
    """
    if check_keys(keys) != keys:
        raise TypeError(f"{_NAME}.keys: expected a tuple, got {keys!r}")
    check_unwrapped(_NAME, "offsets", offsets)
    if offsets.dim() != 2 or offsets.shape[0] != len(keys) or offsets.shape[1] == 0:
        raise ValueError(
            f"{_NAME}.offsets: expected shape [{len(keys)}, B + 1], a row for each key, got {tuple(offsets.shape)}"
        )
    no_lengths = torch.empty(0, dtype=torch.int64, device=values.device)
    check_parts(keys, values, no_lengths, weights)
    if type(max_length) is not int or offsets.dtype is not torch.int64 or not has_data(offsets):
        return
    lengths, total = offsets.diff(dim=1), values.shape[0]
    shortest, longest = (int(n) for n in lengths.aminmax()) if lengths.numel() else (0, 0)
    if shortest < 0 or int(offsets[:, 0].min()) < 0 or int(offsets[:, -1].max()) > total:
        raise ValueError(
            f"{_NAME}.offsets: expected increasing offsets from 0 to at most {total}, the number of entries in values, "
            f"in each row, got {offsets.tolist()!r:.500}"
        )
    check_bound(_NAME, max_length, longest, total)


# ---- features --------------------------------------------------------------------------------------------------


def check_features(features: Any, what: str) -> None:
    """Raises unless features are jagged tensors with the same number of rows and the same kind of entries."""
    if not isinstance(features, Mapping) or not features:
        raise TypeError(
            f"{_NAME}.{what}: expected a dict from keys to JaggedTensors, got {_describe(features)}"
        )
    first = next(iter(features))
    for key, x in features.items():
        if not isinstance(x, JaggedTensor):
            raise TypeError(f"{_NAME}.{what}: expected a JaggedTensor for {key!r}, got {_describe(x)}")
        if x.ragged_dim != 1:
            cure = f"transpose it to 1 by x.transpose(1, {x.ragged_dim})"
            if x.ragged_dim == 0:
                cure = "unmerge it by x.unflatten(0, (B, T))"
            raise ValueError(
                f"{_NAME}.{what}: expected rows ragged along 1, got {key!r}, which is ragged along {x.ragged_dim}; "
                f"{cure}"
            )
        other = features[first]
        if x.shape[0] != other.shape[0] or x.dtype != other.dtype or x.shape[2:] != other.shape[2:]:
            raise ValueError(
                f"{_NAME}.{what}: expected as many rows and entries of one dtype and shape, got {_entry(x)} for "
                f"{key!r} and {_entry(other)} for {first!r}"
            )


def _entry(x: Any) -> str:
    return f"{x.shape[0]} rows of {x.dtype}{list(x.shape[2:])}"


def check_joinable(kjts: Sequence[Any], cls: type) -> None:
    """Raises unless keyed tensors can be joined along their keys."""
    if not kjts or not all(isinstance(x, cls) for x in kjts):
        raise TypeError(f"{_NAME}.cat: expected {_NAME}s, got {', '.join(map(_describe, kjts)) or 'none'}")
    first = kjts[0]
    for x in kjts:
        if x.batch_size != first.batch_size:
            raise ValueError(
                f"{_NAME}.cat: expected as many rows, got batch sizes {first.batch_size}, {x.batch_size}"
            )
        if (x._raw_weights is None) != (first._raw_weights is None):
            raise ValueError(f"{_NAME}.cat: expected all with weights or none; give ones to those without")
        if (x._raw_values.dtype, x._raw_values.shape[1:]) != (
            first._raw_values.dtype,
            first._raw_values.shape[1:],
        ):
            raise ValueError(
                f"{_NAME}.cat: expected entries of one dtype and shape, got {_describe(first._raw_values)} for "
                f"{_names(first)} and {_describe(x._raw_values)} for {_names(x)}"
            )


def _names(x: Any) -> str:
    return ", ".join(map(repr, x.keys))


def key_index(x: Any, key: Any) -> int:
    """Returns the index of a key; raises KeyError with the existing keys."""
    if key not in x.keys:
        raise KeyError(f"{_NAME} has no key {key!r}; its keys are {', '.join(x.keys)}")
    return x.keys.index(key)


def key_indices(x: Any, keys: Any) -> list[int]:
    """Returns the indices of keys that are given by name or by index."""
    given: tuple[Any, ...] = (
        tuple(keys) if isinstance(keys, Iterable) and not isinstance(keys, str) else (None,)
    )
    if not all(isinstance(k, str | int) for k in given):
        raise TypeError(f"{_NAME}.permute: expected a sequence of keys or of indices of keys, got {keys!r}")
    count = len(x.keys)
    for k in given:
        if isinstance(k, int) and not -count <= k < count:
            raise IndexError(f"{_NAME}.permute: expected indices below {count}, the number of keys, got {k}")
    return [key_index(x, k) if isinstance(k, str) else k % count for k in given]


def check_counts(counts: Any, dim: int) -> None:
    """Raises unless the counts are a sequence of ints, along the keys."""
    if dim not in (0, -3):
        raise DispatchError(
            f"{_NAME}.split: only dim 0, of the keys, is split, got dim {dim}",
            code="argument-refused",
            hint="x[key] is a JaggedTensor",
        )
    if not isinstance(counts, Sequence) or not all(isinstance(n, int) for n in counts):
        wrong = DispatchError if isinstance(counts, int) else TypeError  # torch.split accepts an int
        raise coded(
            wrong,
            f"{_NAME}.split: expected the number of keys of each part, such as [2, 1], got {counts!r}",
            code="argument-refused",
        )


def check_not_traced(x: Any, method: str, instead: str) -> None:
    """Raises DispatchError if a method that reads lengths is called while a graph is traced."""
    if is_traced(x._raw_values):
        raise DispatchError(
            f"{_NAME}.{method} reads the lengths, which a compiled function cannot",
            code="graph-refused",
            hint=instead,
        )


def is_traced(t: Tensor) -> bool:
    """Whether a graph is being traced, so that data cannot be read."""
    return is_compiling_here() or type(t) not in (Tensor, torch.nn.Parameter)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{one_of(type(value))} of {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}"
