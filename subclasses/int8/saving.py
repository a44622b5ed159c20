"""State dicts of plain tensors, for file formats that hold nothing else, such as safetensors.

``torch.save`` and ``load_state_dict`` accept an :class:`Int8Tensor` directly. Other formats need these two functions::

    tensors, metadata = to_plain(model.state_dict())
    safetensors.torch.save_file(tensors, path, metadata)
    ...
    model.load_state_dict(from_plain(tensors, metadata), assign=True)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subclasses.int8.tensor import Int8Tensor

TENSORS_KEY, TIED_KEY = "int8_tensors", "tied_tensors"
PARTS = ("qdata", "scale", "zero_point")
_METADATA = ("activation", "activation_symmetric", "partial")


def to_plain(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Flattens each ``Int8Tensor`` to ``name.qdata``, ``name.scale`` and, if present, ``name.zero_point``.

    A tensor under several names in the state, such as a tied weight, is stored once: safetensors refuses shared memory.

    Returns:
        The tensors, contiguous, and metadata of strings, which :func:`from_plain` needs.

    Raises:
        ValueError: two tensors would have the same name.
    """
    tensors: dict[str, Tensor] = {}
    described: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        data = value.data if isinstance(value, nn.Parameter) else value
        parts = {name: data}
        if isinstance(data, Int8Tensor):
            parts = {f"{name}.{p}": getattr(data, p) for p in PARTS if getattr(data, p) is not None}
            described[name] = {"dtype": str(data.dtype).removeprefix("torch.")}
            described[name] |= {key: getattr(data, key) for key in _METADATA}
        taken = parts.keys() & (tensors.keys() | (state.keys() - {name}))
        if taken:
            raise ValueError(f"to_plain: there is a tensor named {min(taken)} already")
        tensors |= {key: t.detach() for key, t in parts.items()}
    tied = _find_tied(tensors)
    kept = {key: t.contiguous() for key, t in tensors.items() if key not in tied}
    return kept, {TENSORS_KEY: json.dumps(described), TIED_KEY: json.dumps(tied)}


def _find_tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps the name of each repeated tensor to its first name."""
    first: dict[Any, str] = {}
    tied = {}
    for name, t in tensors.items():
        if t.is_meta or not t.numel():
            continue
        place = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride())
        if first.setdefault(place, name) != name:
            tied[name] = first[place]
    return tied


def from_plain(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """Rebuilds the state dict that :func:`to_plain` flattened.

    Raises:
        TypeError: the constructor rejects the type of a described value.
        ValueError: the metadata is not from :func:`to_plain`, an inner tensor is missing, or the constructor rejects a
            described value.
    """
    if metadata is None or TENSORS_KEY not in metadata:
        raise ValueError(
            f"from_plain: expected metadata with {TENSORS_KEY!r}, as to_plain returns it beside the tensors; "
            f"safetensors.safe_open(path, 'pt').metadata() reads it"
        )
    state: dict[str, Any] = dict(tensors)
    for name, first in _read_json(metadata, TIED_KEY).items():
        if name in tensors:
            raise ValueError(
                f"from_plain: expected tied names of tensors that the file leaves out, got {name!r}"
            )
        if first in tensors:
            state[name] = tensors[first]
    names = list(state)
    for name, description in _read_json(metadata, TENSORS_KEY).items():
        if name in state:
            raise ValueError(
                f"from_plain: {name} is a plain tensor in the file, and described as an Int8Tensor"
            )
        parts = [state.pop(f"{name}.{p}", None) for p in PARTS]
        if parts[0] is None or parts[1] is None:
            raise ValueError(f"from_plain: {name}.qdata or {name}.scale is missing")
        state[name] = Int8Tensor(*parts, **_described_metadata(name, description))
    return {name: state[name] for name in _in_order(state, names)}


def _read_json(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    try:
        found = json.loads(metadata.get(key, "{}"))
    except json.JSONDecodeError as error:
        raise ValueError(f"from_plain: {key} is not JSON text: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"from_plain: expected names in {key}, got {found!r:.200}")
    return found


def _described_metadata(name: str, description: Any) -> dict[str, Any]:
    """Returns the metadata of an ``Int8Tensor`` as arguments; the constructor checks the values."""
    known = {"dtype", *_METADATA}
    if not isinstance(description, dict) or not known.issuperset(description):
        raise ValueError(
            f"from_plain: expected {name} described by {sorted(known)}, got {description!r:.200}"
        )
    given = {key: value for key, value in description.items() if key != "dtype"}
    dtype = description.get("dtype")
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"from_plain: expected the dtype of {name}, its float_dtype, got {dtype!r:.200}")
    return given | {"float_dtype": found}


def _in_order(state: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns the names in the order of the file, with an Int8Tensor's name in place of its inner tensors' names."""
    return list(dict.fromkeys(key if key in state else key.rpartition(".")[0] for key in names))


# ---- several files of one model ----------------------------------------------------------------------------


def read_metadata(files: Sequence[Any]) -> dict[str, str]:
    """Returns the metadata of safetensors files, each of which describes the whole model."""
    from safetensors import safe_open

    metadata: dict[str, str] = {}
    for path in files:
        if str(path).endswith(".safetensors"):
            with safe_open(path, "pt") as file:
                metadata |= file.metadata() or {}
    return metadata


def tied_names(metadata: Mapping[str, str]) -> dict[str, str]:
    """Maps the name of each tensor that shares its memory with an earlier tensor to the earlier tensor's name."""
    described = json.loads(metadata.get(TENSORS_KEY, "{}"))
    tied = json.loads(metadata.get(TIED_KEY, "{}"))
    return {_owner(name, described): _owner(first, described) for name, first in tied.items()}


def _owner(name: str, described: Mapping[str, Any]) -> str:
    """Returns the name of the ``Int8Tensor`` that an inner tensor belongs to; a plain tensor's own name."""
    owner, _, part = name.rpartition(".")
    return owner if part in PARTS and owner in described else name
